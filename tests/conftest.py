"""How tests are spread over workers, and fixtures that several files share: a NATS cluster, and front ends on it."""

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


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors, as many tests wait for processes of theirs."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that none of them is left for the end, when other workers have nothing to do."""
    for item in items:
        if {"cluster", "chromium"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
