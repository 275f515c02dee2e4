"""Many processes over three servers, killed with -9 in the middle of batches: nothing is lost, nothing is doubled."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from shufflerl.network import faults
from tests.network.system.test_processes import finish, ledger_of
from tests.support.nats_cluster import MISSING, Cluster, server_binary
from tests.support.nats_processes import FrontEnds, Rounds, front_ends
from tests.support.network_processes import Crowd
from tests.support.waiting import until

pytestmark = [pytest.mark.slow(15), pytest.mark.skipif(server_binary() is None, reason=MISSING)]


def test_killed_in_the_middle_of_batches(tmp_path: Path, cluster: Cluster) -> None:
    """A server, a front end and a worker in turn; the bench has more rounds, each with a victim drawn at random."""
    with front_ends(tmp_path, cluster) as system:
        system.start_all()
        rounds = Rounds(system)

        def kill_a_server() -> None:
            cluster.kill(1)
            cluster.start(1)

        def kill(*names: str) -> None:
            for name in names:
                system.kill(name)
                system.begin(name)

        rounds.play(30, kill_a_server)
        cluster.wait()
        rounds.play(30, lambda: kill("front-0"))
        system.heard("front-0")
        rounds.play(30, lambda: kill("worker-0", "front-1"))


def _die_at(system: FrontEnds, labels: list[str]) -> None:
    """A run in which, label after label, the front end that comes to it first dies there, and the others with it.

    All have the same label: of a batch's steps one front end does some, and another the rest.
    """
    crowd: Crowd | None = None
    for label in [*labels, ""]:
        for name in system.fronts:
            system.begin(name, label)
        for name in system.fronts:
            system.heard(name, label)
        if crowd is None:
            crowd = Crowd(system, bytes.fromhex(system.start("coordinator")["task"]))
        if label:
            until(partial(_died, system, crowd))
            for name in system.fronts:
                if not system.died(name):
                    system.kill(name)
    assert crowd is not None
    finish(system, crowd)
    for name in system.fronts:
        assert system.client.get(f"{system.at(name)}/readyz").status_code == 200


def _died(system: FrontEnds, crowd: Crowd) -> bool:
    crowd.step()
    return any(system.died(name) for name in system.fronts)


def test_killed_at_every_labelled_point(tmp_path: Path, cluster: Cluster) -> None:
    labels = ("dummies", *faults.SHUFFLER_LABELS)
    with front_ends(tmp_path, cluster, workers=0, episodes=200, noise="servers") as system:
        _die_at(system, random.Random(4).sample(labels, len(labels)))
        batches = len(system.ask("/v1/batches")["batches"])
    assert ledger_of(system) == [f"batch {number}" for number in range(batches)]


def test_masked_sums_through_two_front_ends_that_die_between_seal_and_release(tmp_path: Path, cluster: Cluster) -> None:
    """Seeds, exclusion and sum come from whichever is alive; what is counted is what was sent, once."""
    with front_ends(tmp_path, cluster, workers=0, episodes=24, transport="sums") as system:
        _die_at(system, ["seeds", "sum", "order", "exclude"])
        batches = system.ask("/v1/batches")["batches"]
        assert {batch["transport"] for batch in batches} == {"sums"}
    assert ledger_of(system) == [f"batch {number}" for number in range(len(batches))]
