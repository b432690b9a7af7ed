"""`bargein demo`: a conversation with interruptions, on a server and workers of its own."""
