"""What operators measure, and whether a process is ready: declared once, read by `/metrics`, `/healthz`, `/readyz`."""
