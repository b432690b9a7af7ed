"""The only code that speaks Redis for the control side."""
