"""Bodies of every kind thrown at the decoder and at the owner of a partition; `python -m tests.fuzz`."""
