"""Fixtures that several files of tests share: a NATS cluster, and front ends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nats_cluster import Cluster
from tests.nats_fronts import Front


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers for one file of tests."""
    cluster = Cluster(tmp_path_factory.mktemp("nats"))
    yield cluster
    cluster.stop()


@pytest.fixture
def front(cluster: Cluster) -> Iterator[Front]:
    """Front ends of a shuffler of its own; they are closed with the test."""
    front = Front(cluster)
    yield front
    for store in front.stores:
        store.close()
