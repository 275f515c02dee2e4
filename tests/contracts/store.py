"""What every store of the shuffler must do; a test class inherits it and says how to make and reopen one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import replace

import pytest

from shufflerl.errors import ContractError
from shufflerl.network.protocol.wire import Reason, State
from shufflerl.network.stores.store import BatchId, BatchRow, Store

TASK = bytes(range(16))
ID = BatchId(TASK, 0, 0)
ROW = BatchRow(ID, users=3, announcement=b"announcement", opening=b"opening", deadline=50.0)
KEY = os.urandom(32)
REPORTS = [(os.urandom(16), os.urandom(size)) for size in (40, 4_000, 40_000)]


class StoreContract(ABC):
    """Operations are atomic, durable, idempotent; membership freezes; the first release stands; deleted is deleted."""

    @abstractmethod
    def make(self) -> Store:
        """A new, empty store."""

    @abstractmethod
    def reopen(self, store: Store) -> Store:
        """The same store in a new process, the old one having been killed."""

    @pytest.fixture
    def store(self) -> Store:
        store = self.make()
        store.create(ROW, KEY)
        return store

    def test_a_batch_is_created_once(self, store: Store) -> None:
        assert store.get(ID) == ROW
        assert store.create(replace(ROW, announcement=b"another"), os.urandom(32)) == ROW
        assert store.key(ID) == KEY
        assert store.latest(TASK) == ROW
        assert store.unfinished() == [ROW]
        assert store.latest(bytes(16)) is None
        assert store.get(replace(ID, attempt=1)) is None

    def test_the_latest_batch_is_the_last_attempt_at_the_highest_number(self, store: Store) -> None:
        for number, attempt in ((2, 0), (10, 0), (10, 1), (9, 5)):
            store.create(replace(ROW, id=BatchId(TASK, number, attempt)), KEY)
        latest = store.latest(TASK)
        assert latest is not None
        assert latest.id == BatchId(TASK, 10, 1)

    def test_the_last_report_seals_the_batch(self, store: Store) -> None:
        assert store.add(ID, REPORTS[:2]) == [None, None]
        assert _state(store) == (State.open, 2)
        more = (os.urandom(16), b"late")
        assert store.add(ID, [REPORTS[2], more]) == [None, Reason.late]
        assert _state(store) == (State.sealed, 3)
        assert store.add(ID, [more]) == [Reason.late]
        assert sorted(store.reports(ID)) == sorted(REPORTS)

    def test_slices_are_the_same_for_all_who_ask(self) -> None:
        store = self.make()
        reports = [(os.urandom(16), os.urandom(20)) for _ in range(12)]
        store.create(replace(ROW, users=12), KEY)
        for start, end in ((0, 5), (5, 6), (4, 12)):
            store.add(ID, reports[start:end])
        whole = list(store.reports(ID))
        assert sorted(whole) == sorted(reports)
        store = self.reopen(store)
        for first in range(13):
            for most in range(13):
                assert list(store.reports(ID, first, most)) == whole[first : first + most]
        assert list(store.reports(ID, 7)) == whole[7:]

    def test_what_was_added_survives_a_crash(self, store: Store) -> None:
        store.add(ID, REPORTS[:2])
        store = self.reopen(store)
        assert _state(store) == (State.open, 2)
        assert sorted(store.reports(ID)) == sorted(REPORTS[:2])
        assert store.key(ID) == KEY

    def test_a_report_counts_once(self, store: Store) -> None:
        first, second = REPORTS[:2]
        assert store.add(ID, [first, first]) == [None, Reason.duplicate]
        store = self.reopen(store)
        assert store.add(ID, [first, second, (second[0], b"other bytes")]) == [Reason.duplicate, None, Reason.replayed]
        assert _state(store) == (State.open, 2)

    def test_an_id_is_spent_for_the_whole_run_and_for_this_run_only(self, store: Store) -> None:
        store.add(ID, REPORTS)
        store.release(ID, [b"tags"])
        later, other = BatchId(TASK, 1, 0), BatchId(bytes(16), 0, 0)
        for id in (later, other):
            store.create(replace(ROW, id=id), KEY)
        assert store.add(later, REPORTS[:1]) == [Reason.replayed]
        assert store.add(ID, REPORTS[:1]) == [Reason.replayed]
        assert store.add(other, REPORTS[:1]) == [None]

    def test_the_first_partial_result_stands(self, store: Store) -> None:
        assert store.kept(ID, "order") is None
        assert store.keep(ID, "order", b"first") == b"first"
        store = self.reopen(store)
        store.add(ID, REPORTS)
        assert store.keep(ID, "order", b"second") == b"first"
        assert store.keep(ID, "other", b"") == b""
        assert (store.kept(ID, "order"), store.kept(ID, "other")) == (b"first", b"")
        assert store.kept(replace(ID, attempt=1), "order") is None
        store.release(ID, [b"tags"])
        assert store.kept(ID, "order") is None
        with pytest.raises(ContractError, match="only an unfinished one"):
            store.keep(ID, "order", b"too late")
        with pytest.raises(ContractError, match="no batch 7"):
            store.keep(replace(ID, number=7), "order", b"nowhere")

    def test_the_first_release_stands(self, store: Store) -> None:
        with pytest.raises(ContractError, match="only a sealed batch"):
            store.release(ID, [b"too early"])
        store.add(ID, REPORTS)
        store.release(ID, iter([b"first", b"second"]))
        store = self.reopen(store)
        store.release(ID, [b"another"])
        assert [store.chunk(ID, number) for number in range(3)] == [b"first", b"second", None]
        batch = store.get(ID)
        assert batch is not None
        assert (batch.state, batch.chunks) == (State.released, 2)
        assert store.unfinished() == []

    def test_a_release_takes_reports_and_key_with_it(self, store: Store) -> None:
        store.add(ID, REPORTS)
        store.release(ID, [b"tags"])
        assert list(store.reports(ID)) == []
        assert store.key(ID) is None

    def test_scrubbing_leaves_only_that_the_batch_was_there(self, store: Store) -> None:
        with pytest.raises(ContractError, match="only a released batch"):
            store.scrub(ID)
        store.add(ID, REPORTS)
        store.release(ID, [b"tags"])
        for _ in range(2):
            store.scrub(ID)
            store = self.reopen(store)
            assert store.chunk(ID, 0) is None
            assert _state(store) == (State.scrubbed, 3)
        store.release(ID, [b"again"])
        assert store.chunk(ID, 0) is None

    def test_that_a_batch_was_the_last_is_not_forgotten(self, store: Store) -> None:
        with pytest.raises(ContractError, match="only a released batch"):
            store.scrub(ID, last=True)
        store.add(ID, REPORTS)
        store.release(ID, [b"tags"])
        for last in (True, True, False):
            store.scrub(ID, last=last)
            store = self.reopen(store)
            assert _state(store) == (State.finished, 3)
            assert store.chunk(ID, 0) is None
        store.release(ID, [b"again"])
        store.abort(ID)
        store.extend(ID, 99.0, before=ROW.deadline)
        assert store.add(ID, REPORTS) == [Reason.replayed] * 3
        assert _state(store) == (State.finished, 3)
        assert (store.latest(TASK), store.unfinished()) == (store.get(ID), [])

    def test_a_scrubbed_batch_may_turn_out_to_be_the_last(self, store: Store) -> None:
        store.add(ID, REPORTS)
        store.release(ID, [b"tags"])
        store.scrub(ID)
        store.scrub(ID, last=True)
        assert _state(self.reopen(store)) == (State.finished, 3)

    def test_an_aborted_batch_is_never_released(self, store: Store) -> None:
        store.add(ID, REPORTS[:2])
        store.keep(ID, "dummies 0", b"sealed")
        for _ in range(2):
            store.abort(ID)
        assert _state(store)[0] == State.aborted
        assert (list(store.reports(ID)), store.key(ID), store.kept(ID, "dummies 0")) == ([], None, None)
        with pytest.raises(ContractError, match="only an unfinished one"):
            store.keep(ID, "dummies 1", b"too late")
        assert store.add(ID, REPORTS) == [Reason.replayed, Reason.replayed, Reason.late]
        with pytest.raises(ContractError):
            store.release(ID, [b"tags"])

    def test_a_sealed_batch_is_not_aborted_or_extended(self, store: Store) -> None:
        store.add(ID, REPORTS)
        store.abort(ID)
        store.extend(ID, 99.0, before=ROW.deadline)
        assert _state(store) == (State.sealed, 3)
        assert len(list(store.reports(ID))) == 3

    def test_an_open_batch_is_extended(self, store: Store) -> None:
        store.extend(ID, 99.0, before=ROW.deadline)
        batch = self.reopen(store).get(ID)
        assert batch is not None
        assert (batch.deadline, batch.extensions) == (99.0, 1)

    def test_a_deadline_that_passes_extends_a_batch_once(self, store: Store) -> None:
        """Whoever else saw it pass comes too late, however late; the next deadline is another."""
        store.extend(ID, 99.0, before=ROW.deadline)
        store = self.reopen(store)
        store.extend(ID, 100.0, before=ROW.deadline)
        store.extend(ID, 200.0, before=99.0)
        store.extend(ID, 300.0, before=99.0)
        batch = self.reopen(store).get(ID)
        assert batch is not None
        assert (batch.deadline, batch.extensions) == (200.0, 2)

    def test_batches_that_are_not_there_are_refused(self, store: Store) -> None:
        missing = replace(ID, number=7)
        for action in (store.scrub, store.abort, lambda id: store.add(id, REPORTS), lambda id: store.release(id, [])):
            with pytest.raises(ContractError, match="no batch 7"):
                action(missing)


def _state(store: Store) -> tuple[State, int]:
    batch = store.get(ID)
    assert batch is not None
    return batch.state, batch.accepted
