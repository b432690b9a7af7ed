"""A scrape as a test reads it: over HTTP as Prometheus does, or straight from what would be served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.metrics.families import Families

PATIENCE_S = 20.0


class Scrape:
    """`scrape["name", "label=value"]` is a sample, 0 where there is none; `names` and `series` are what there is."""

    def __init__(self, families: Iterable[Any]) -> None:
        self.families = {family.name: family for family in families}
        self._values: dict[tuple[str, frozenset[str]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                labels = frozenset(f"{name}={value}" for name, value in sample.labels.items())
                assert (sample.name, labels) not in self._values, "a series is there once"
                self._values[sample.name, labels] = float(sample.value)

    def __getitem__(self, wanted: str | tuple[str, ...]) -> float:
        name, *labels = (wanted,) if isinstance(wanted, str) else wanted
        return self._values.get((name, frozenset(labels)), 0.0)

    @property
    def series(self) -> set[tuple[str, frozenset[str]]]:
        return set(self._values)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._values}

    def nonzero(self, name: str) -> dict[str, float]:
        """The samples of a metric that are not 0, by their labels as one string."""
        return {",".join(sorted(labels)): v for (n, labels), v in self._values.items() if n == name and v}


def read(families: Families) -> Scrape:
    return Scrape(families)


def fetch(url: str, accept: str = "") -> tuple[int, str, str]:
    """Status, content type and body."""
    try:
        with urlopen(Request(url, headers={"Accept": accept} if accept else {}), timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(url: str) -> Scrape:
    status, _, body = fetch(url)
    assert status == 200, body
    return Scrape(text_string_to_metric_families(body))


def ready(url: str) -> tuple[int, dict[str, Any]]:
    """Status and checks of /readyz beside a /metrics."""
    status, _, body = fetch(url.replace("/metrics", "/readyz"))
    answer = json.loads(body)
    assert answer["ready"] == (status == 200)
    return status, answer["checks"]


def failing(url: str) -> set[str]:
    """The names of the checks that say no."""
    return {name for name, check in ready(url)[1].items() if not check["ok"]}
