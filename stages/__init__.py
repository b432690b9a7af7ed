"""What runs models: the engine contract, the engines, the pipeline file and the model policy."""
