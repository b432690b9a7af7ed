"""Chaos: the real processes on a real server under faults, and a judge of what their clients saw: `make chaos`."""
