"""What is decided, and nothing else. Pure: no IO, no clock, no randomness anywhere below this package."""
