"""Numbers as prometheus_client wants them: one family a metric, samples by label.

Responsible for what of the library's the project uses. Leaves names and help to `declared.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.metrics.declared import Metric
    from workers.metrics.histogram import Histogram

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_KINDS: dict[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Families:
    """One scrape's families; iterate over it when all is put."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """A counter's or a gauge's value."""
        family = self._family(metric)
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

    def put_histogram(self, metric: Metric, histogram: Histogram, *labels: str) -> None:
        """A histogram as it is now."""
        family = self._family(metric)
        assert isinstance(family, HistogramMetricFamily)
        buckets, total_s = histogram.read()
        family.add_metric(labels, buckets, total_s)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.name)
        if family is None:
            family = _KINDS[metric.kind](metric.name, metric.help, labels=metric.labels)
            self._families[metric.name] = family
        return family
