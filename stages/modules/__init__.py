"""Streaming torch modules that ship with the project, each small enough to read as an example."""
