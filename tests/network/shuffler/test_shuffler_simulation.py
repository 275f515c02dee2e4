"""The shuffler under hundreds of schedules: reports dropped, doubled, reordered and replayed, crashes at every label.

A discrete-event simulation with a clock of its own. Every report carries marks that no other has, so that a mark seen
twice proves a replay and one not seen proves a loss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shufflerl.network import faults
from shufflerl.network.protocol.wire import Action, ProblemError, Report, State, Verdict
from shufflerl.network.shuffler.shuffler import Limits
from shufflerl.network.stores.store import BatchId
from tests.support.network_world import Crash, World, pretend_to_seal


@dataclass(frozen=True)
class Sent:
    """A report on the network: it may arrive never, late or many times."""

    mark: int
    number: int
    attempt: int
    report: Report


class Schedules(RuleBasedStateMachine):
    """What may happen, in any order; what must hold, always."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        pretend_to_seal(self.patch)
        self.patch.setattr(faults, "reached", self.reached)
        self.deadly: str | None = None
        self.marks = 0
        self.network: list[Sent] = []
        self.tokens: list[bytes] = []
        self.acked: dict[BatchId, set[int]] = {}  # marks a node was told are accepted
        self.releases: dict[BatchId, bytes] = {}
        self.frozen: dict[BatchId, frozenset[bytes]] = {}
        self.counted: Counter[int] = Counter()

    def teardown(self) -> None:
        self.world.store.close()
        self.patch.undo()

    def reached(self, label: str) -> None:
        if label == self.deadly:
            self.deadly = None
            raise Crash

    @initialize(users=st.integers(1, 4), when_late=st.sampled_from(["extend", "abort"]))
    def begin(self, users: int, when_late: str) -> None:
        limits = Limits(min_batch_size=1, timeout=100.0, when_late=when_late)  # type: ignore[arg-type]
        self.world = World(users=users, limits=limits, noise_mean=1e-9)
        self.world.announce()

    @property
    def batch(self) -> tuple[BatchId, State]:
        status = self.world.shuffler.status(self.world.task)
        return BatchId(self.world.task, status.batch, status.attempt), status.state

    def restart(self) -> None:
        self.deadly = None
        self.world.restart()

    # What may happen.

    @rule(again=st.booleans())
    def a_node_makes_a_report(self, again: bool) -> None:
        """With a new token, or dishonestly with one used before."""
        self._report(again)

    def _report(self, again: bool = False) -> Sent:
        id, _ = self.batch
        token = self.tokens[self.marks % len(self.tokens)] if again and self.tokens else self.world.mint()
        self.tokens.append(token)
        self.marks += 1
        report = self.world.marked_report(self.marks, token)
        self.network.append(Sent(self.marks, id.number, id.attempt, report))
        return self.network[-1]

    @rule(again=st.booleans(), missing=st.integers(0, 2))
    def about_as_many_nodes_report_as_are_asked(self, again: bool, missing: int) -> None:
        """Few schedules would come to a release otherwise. The first may have taken part before."""
        self._arrive([self._report(again), *(self._report() for _ in range(self.world.users - missing))])

    @precondition(lambda self: self.network)
    @rule(data=st.data(), copies=st.integers(1, 3))
    def some_reports_arrive(self, data: st.DataObject, copies: int) -> None:
        """In any order, any number of times; some never do."""
        self._arrive(data.draw(st.lists(st.sampled_from(self.network), min_size=1, max_size=4)) * copies)

    def _arrive(self, sent: list[Sent]) -> None:
        try:
            outcomes = self.world.shuffler.upload(
                self.world.task, [(one.number, one.attempt, one.report) for one in sent]
            )
        except Crash:
            self.restart()
            return
        for one, outcome in zip(sent, outcomes, strict=True):
            if outcome.verdict in (Verdict.accepted, Verdict.duplicate):
                self.acked.setdefault(BatchId(self.world.task, one.number, one.attempt), set()).add(one.mark)

    @rule(seconds=st.sampled_from([1.0, 60.0, 150.0]))
    def time_passes(self, seconds: float) -> None:
        self._advance(seconds)

    @rule()
    def all_that_is_due_is_done(self) -> None:
        self._advance(0.0)
        self._collect()
        self._go_on()

    def _advance(self, seconds: float) -> None:
        self.world.now += seconds
        try:
            assert self.world.shuffler.advance()
        except Crash:
            self.restart()

    @rule(label=st.sampled_from(faults.SHUFFLER_LABELS))
    def the_next_visit_to_a_label_is_deadly(self, label: str) -> None:
        self.deadly = label

    @rule()
    def the_process_is_killed(self) -> None:
        self.restart()

    @rule()
    def the_coordinator_collects(self) -> None:
        self._collect()

    def _collect(self) -> None:
        id, state = self.batch
        if state != State.released:
            with pytest.raises(ProblemError):
                self.world.shuffler.collect(self.world.command(Action.collect, id.number, id.attempt))
            return
        released, again = (self.world.collect(id.number, id.attempt) for _ in range(2))
        assert self.releases.setdefault(id, released) == released == again
        marks = Counter(tag // 3 for tag in self.world.tags(released, id.number, id.attempt))
        assert set(marks.values()) == {3}
        assert len(marks) == self.world.users
        assert self.acked.get(id, set()) <= set(marks)

    @rule()
    def the_coordinator_goes_on(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        """Only a release that was collected is scrubbed; then the next batch is announced."""
        id, state = self.batch
        try:
            if state == State.aborted:
                self.world.announce(id.number, id.attempt + 1)
            elif state == State.released and id in self.releases:
                self.world.scrub(id.number, id.attempt)
                self._learn(id)
                self.world.announce(id.number + 1)
            elif state == State.scrubbed:
                self.world.announce(id.number + 1)
        except Crash:
            self.restart()
            if self.batch[1] == State.scrubbed:
                self._learn(self.batch[0])

    def _learn(self, id: BatchId) -> None:
        marks = {tag // 3 for tag in self.world.tags(self.releases[id], id.number, id.attempt)}
        self.counted.update(marks)

    # What must hold.

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        assert all(count == 1 for count in self.counted.values())

    @invariant()
    def membership_never_changes_once_it_is_frozen(self) -> None:
        id, state = self.batch
        if state == State.sealed:
            members = frozenset(report for report, _ in self.world.store.reports(id))
            assert len(members) == self.world.users
            assert self.frozen.setdefault(id, members) == members

    @invariant()
    def what_was_acknowledged_is_kept(self) -> None:
        id, state = self.batch
        if state in (State.open, State.sealed):
            kept = {report for report, _ in self.world.store.reports(id)}
            ids = {one.mark: one.report.report_id for one in self.network}
            assert {ids[mark] for mark in self.acked.get(id, set())} <= kept
            assert len(kept) == self.world.shuffler.status(self.world.task).accepted

    @invariant()
    def a_release_is_full_and_its_key_is_gone(self) -> None:
        id, state = self.batch
        if state in (State.released, State.scrubbed, State.aborted):
            assert self.world.store.key(id) is None
            assert list(self.world.store.reports(id)) == []
        if state in (State.released, State.scrubbed):
            assert self.world.shuffler.status(self.world.task).accepted == self.world.users


TestSchedules = pytest.mark.slow(10)(
    pytest.mark.filterwarnings("default::hypothesis.errors.NonInteractiveExampleWarning")(Schedules.TestCase)
)
TestSchedules.settings = settings(
    max_examples=400, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
