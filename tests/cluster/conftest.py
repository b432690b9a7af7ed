"""A cluster that tests may break; it is mended and emptied after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters import ValkeyCluster


@pytest.fixture(scope="session")
def fragile_cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture
def breakable(fragile_cluster: ValkeyCluster) -> Iterator[ValkeyCluster]:
    """Six nodes; any may be killed or stopped, and any slot may be elsewhere at the end."""
    fragile_cluster.flush()
    yield fragile_cluster
    fragile_cluster.mend()
