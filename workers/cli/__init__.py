"""The command line `bargein`: one module a group of commands, found by `main.py` when they are called."""
