"""A batch of masked vectors under any schedule of crashes and exclusions: one order, one exclusion, one sum."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl.network import faults
from shufflerl.network.node.reporting import seal_report
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import ProblemError, State, Transport
from shufflerl.network.shuffler import summing
from shufflerl.network.stores.store import BatchId
from tests.support.network_world import QUERY, Crash, World, pretend_to_seal, sealed_seed

USERS, EXCLUDABLE = 4, 2
LABELS = (*faults.SUMMING_LABELS, "release", "released")

events = st.one_of(
    st.just(("advance", None)),
    st.just(("restart", None)),
    st.tuples(st.just("die at"), st.sampled_from(LABELS)),
    st.tuples(st.just("exclude"), st.sets(st.integers(0, USERS - 1)).map(sorted)),
)


class Trial:
    """A full batch in which user i raises counter i, and all that was ever seen of it."""

    def __init__(self) -> None:
        self.deadly: str | None = None
        self.world = World(users=USERS, transport=Transport.sums, excludable=EXCLUDABLE)
        self.world.announce()
        checked, mint = self.world.checked(), self.world.mint
        reports = [seal_report(checked, [user], mint()) for user in range(USERS)]
        self.user_of = {sealed_seed(report): user for user, report in enumerate(reports)}
        self.world.upload(*reports)
        self.orders: set[tuple[bytes, ...]] = set()
        self.exclusions: set[bytes] = set()
        self.sums: set[bytes] = set()

    def reached(self, label: str) -> None:
        if label == self.deadly:
            raise Crash

    def happens(self, what: str, argument: Any) -> None:
        try:
            if what == "advance":
                assert self.world.shuffler.advance()
            elif what == "exclude":
                with contextlib.suppress(ProblemError):
                    self.world.exclude(*argument)
            elif what == "die at":
                self.deadly = argument
            else:
                raise Crash
        except Crash:
            self.deadly = None
            self.world.restart()
        self.look()

    def look(self) -> None:
        if (said := self.world.store.kept(BatchId(self.world.task, 0, 0), "exclusion")) is not None:
            self.exclusions.add(said)
        if self.world.shuffler.status(self.world.task).state == State.released:
            self.sums.add(self.world.collect())
        with contextlib.suppress(ProblemError):
            self.orders.add(tuple(self.world.seeds()))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(schedule=st.lists(events, max_size=12))
def test_one_order_one_exclusion_one_sum(schedule: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend_to_seal(patch)
        patch.setattr(summing, "SLICE", 1)
        patch.setattr(wire, "CHUNK_SEEDS", 3)
        trial = Trial()
        patch.setattr(faults, "reached", trial.reached)
        ending: list[tuple[str, Any]] = [("restart", None), ("advance", None), ("exclude", []), ("advance", None)]
        for what, argument in [*schedule, *ending]:
            trial.happens(what, argument)
        (order,), (said,), (total,) = trial.orders, trial.exclusions, trial.sums
        positions = msgspec.msgpack.decode(said)
        if len(positions) > EXCLUDABLE:
            assert total == b""
            return
        left = [sealed for place, sealed in enumerate(order) if place not in positions]
        counted = {trial.user_of[sealed] for sealed in left}
        expected = [int(user in counted) for user in range(QUERY.size)]
        assert trial.world.counts(trial.world.opened(left)) == expected
