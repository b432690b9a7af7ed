"""The declarations: names, help and labels as Prometheus wants them, and the table in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workers.metrics.histogram import BOUNDS_S, BUCKETS, Histogram
from workers.metrics.metric import LABELS, Metric
from workers.metrics.table import METRICS, render_table

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_every_metric_has_one_declaration_with_help_and_unit() -> None:
    names = [metric.name for metric in METRICS]
    # A counter's family is without its suffix.
    assert len({name.removesuffix("_total") for name in names}) == len(names) > 50
    for metric in METRICS:
        assert re.fullmatch(r"bargein_[a-z][a-z0-9_]*[a-z]", metric.name)
        assert metric.help.endswith((".", "!")), metric.name
        assert len(metric.help) > 10, metric.name
        assert metric.unit, metric.name
        assert set(metric.labels) <= set(LABELS), metric.name
    assert set(LABELS) == {label for metric in METRICS for label in metric.labels}


def test_no_label_names_a_session_a_request_or_a_worker() -> None:
    assert not {"session", "session_id", "request", "request_id", "worker", "worker_id", "control_id"} & set(LABELS)


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("commands_total", "counter", "1"),
        ("bargein_commands", "counter", "1"),
        ("bargein_commands_total", "gauge", "1"),
        ("bargein_latency", "histogram", "seconds"),
        ("bargein_latency_seconds", "histogram", "milliseconds"),
    ],
)
def test_a_name_that_breaks_the_conventions_is_not_declared(name: str, kind: str, unit: str) -> None:
    with pytest.raises(AssertionError):
        Metric(name, kind, unit, "It would be wrong.")  # type: ignore[arg-type]


def test_the_table_in_the_docs_is_made_from_the_declarations() -> None:
    text = DOCS.read_text()
    shown = text.partition("<!-- begin: python -m workers.metrics -->\n")[2].partition("<!-- end -->")[0]
    assert shown == render_table(), "run: python -m workers.metrics, and put it between the marks in docs/metrics.md"


def test_a_histogram_counts_in_the_bucket_that_prometheus_would_choose() -> None:
    histogram = Histogram()
    for took_ms in (-3, 0, 0.5, 0.6, 1, 2, 999, 10_000, 10_001):
        histogram.note_ms(took_ms)
    buckets, total_s = histogram.read()
    expected = [sum(ms <= bound * 1000 for ms in (-3, 0, 0.5, 0.6, 1, 2, 999, 10_000, 10_001)) for bound in BOUNDS_S]
    assert [count for _, count in buckets] == [*expected, 9]
    assert buckets[-1][0] == "+Inf"
    assert total_s == pytest.approx(21.0041)
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.0005, 10.0)


def test_the_quick_buckets_are_those_of_the_bounds() -> None:
    for took_ms, bucket in enumerate(BUCKETS):
        histogram = Histogram()
        histogram.note_ms(took_ms)
        assert histogram.counts[bucket] == 1
