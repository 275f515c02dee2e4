"""How tests are spread over workers, and fixtures that several files share: a NATS cluster, and front ends on it."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from coverage import Coverage
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
    """Three more than there are processors, as many slow tests wait for processes of theirs; quick ones do not."""
    return (os.cpu_count() or 1) + (0 if config.option.markexpr == "not slow" else 3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, so that none of them is left for the end, when other workers have nothing to do."""
    seconds: Counter[Path] = Counter()
    for item in items:
        if {"cluster", "chromium"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        if slow := item.get_closest_marker("slow"):
            seconds[item.path] += slow.args[0] if slow.args else 1
    items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """In a worker, end the measurement that pytest-cov begins before it knows of the worker.

    It would go on below the one that is read, and resume whenever that one pauses.
    """
    measurement = Coverage.current()
    if measurement is None:
        return
    measurement.stop()
    if (below := Coverage.current()) is not None:
        below.stop()
    measurement.start()


#: Processor seconds of a file's quick tests that are traced before sys.monitoring, where each costs half as much again.
TRACED = 0.1
_traced: defaultdict[Path, float] = defaultdict(float)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before sys.monitoring, trace the first quick tests of every file alone.

    Fixtures are left out with their tests, which the marker of pytest-cov does not do.
    """
    coverage = getattr(item.config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    if coverage is None or sys.version_info >= (3, 12):
        return (yield)
    if item.get_closest_marker("slow") or _traced[item.path] > TRACED:
        coverage.pause()
        try:
            return (yield)
        finally:
            coverage.resume()
    began = time.process_time()
    try:
        return (yield)
    finally:
        _traced[item.path] += time.process_time() - began


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
