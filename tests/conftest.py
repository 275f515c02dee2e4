"""Fixtures that several files of tests share: a NATS cluster, and front ends on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.nats_cluster import Cluster
from tests.nats_fronts import Front

# The same examples every time, and no clock: what passed here passes elsewhere. HYPOTHESIS_PROFILE=search draws others.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


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
