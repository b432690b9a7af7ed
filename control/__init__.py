"""The control side: the pure core, the wire format and the Redis store."""
