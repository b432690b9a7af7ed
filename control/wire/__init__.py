"""Bytes to values and back. Pure. Refuses what it does not know, and names the path of what is wrong."""
