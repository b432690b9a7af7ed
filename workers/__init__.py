"""The processes: control worker, stage worker, the embedded server and the command line."""
