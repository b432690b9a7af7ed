"""Chaos (`make chaos`): the real processes on a real server under faults, and a judge of what their clients saw.

`python -m tests.chaos` is the run with its checker, `python -m tests.chaos.failover` measures how long sessions wait.
"""
