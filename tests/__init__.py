"""The tests, which mirror the sources; servers.py and conftest.py start what they need."""
