"""How tests are spread over workers, and fixtures that several files share: a NATS cluster, and front ends on it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.nats_cluster import Cluster
from tests.support.nats_fronts import Front

pytest.register_assert_rewrite("shufflerl.testing")

# Python imports it by itself; where the system has one of that name, as Debian's has, pytest could not.
collect_ignore = ["support/recording/sitecustomize.py"]

# The same examples every time, and no clock: what passed here passes elsewhere. HYPOTHESIS_PROFILE=search draws others.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two more than there are processors, as many slow tests wait for processes of theirs; quick ones do not."""
    return (os.cpu_count() or 1) + (0 if config.option.markexpr == "not slow" else 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, so that none of them is left for the end, when other workers have nothing to do."""
    seconds: Counter[Path] = Counter()
    traced: set[str] = set()
    for item in items:
        if {"cluster", "chromium"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        if slow := item.get_closest_marker("slow"):
            seconds[item.path] += slow.args[0] if slow.args else 1
        # Before sys.monitoring tracing costs half as much again: of quick tests the first case shows what is reached.
        test = item.nodeid.partition("[")[0]
        if sys.version_info < (3, 12) and (slow or test in traced):
            item.add_marker("no_cover")
        traced.add(test)
    items.sort(key=lambda item: -seconds[item.path])


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
