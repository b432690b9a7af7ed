"""All metrics, and the table of them in docs/metrics.md, which `python -m workers.metrics` prints. Pure."""

from __future__ import annotations

from workers.metrics import declared, declared_maintenance, declared_stage
from workers.metrics.metric import LABELS, Metric

METRICS: tuple[Metric, ...] = tuple(
    value
    for module in (declared, declared_stage, declared_maintenance)
    for value in vars(module).values()
    if isinstance(value, Metric)
)
"""All of them, in the order of their declarations."""


def render_table() -> str:
    """The metrics and their labels as Markdown."""
    lines = ["| metric | type, unit | labels | what | of |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{metric.name}` | {metric.kind}, {metric.unit} | {labels} | {metric.help} | {', '.join(metric.roles)} |"
        )
    lines += ["", "| label | values |", "|---|---|"]
    lines += [f"| `{label}` | {values} |" for label, values in LABELS.items()]
    return "\n".join(lines) + "\n"
