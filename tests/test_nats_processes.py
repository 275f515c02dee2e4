"""Two front ends over three servers, killed with -9 in the middle of batches: nothing is lost, nothing is doubled."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.nats_cluster import MISSING, Cluster, server_binary
from tests.nats_processes import FrontEnds
from tests.network_processes import Crowd
from tests.test_network_processes import finish, ledger_of

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "nats").mkdir()
    cluster = Cluster(tmp_path / "nats")
    yield cluster
    cluster.stop()


@contextmanager
def front_ends(folder: Path, cluster: Cluster, **options: Any) -> Iterator[FrontEnds]:
    system = FrontEnds(folder, cluster.url, **options)
    try:
        yield system
    finally:
        system.stop()


def test_killed_at_random_moments(tmp_path: Path, cluster: Cluster) -> None:
    chance = random.Random(3)
    with front_ends(tmp_path, cluster, episodes=60) as system:
        for name in system.fronts:
            system.start(name)
        crowd = Crowd(system, bytes.fromhex(system.start("coordinator")["task"]))
        for round in range(3):
            victim = chance.choice(system.fronts)
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                crowd.step()
            system.kill(victim)
            cluster.kill(round)
            crowd.step()
            cluster.start(round)
            system.start(victim)
            cluster.wait()
        finish(system, crowd)
        batches = len(system.ask("/v1/batches")["batches"])
    assert ledger_of(system) == [f"batch {number}" for number in range(batches)]
