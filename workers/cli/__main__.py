"""`python -m workers.cli`: the same as `bargein`."""

from workers.cli.main import app

app(prog_name="bargein")
