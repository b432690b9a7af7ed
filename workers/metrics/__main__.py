"""`python -m workers.metrics`: the table of all metrics, as it stands in docs/metrics.md."""

from __future__ import annotations

import sys

from workers.metrics.table import render_table

sys.stdout.write(render_table())
