"""Admission by lot: who is drawn for a batch is chance, is the same to all, and leaves liars their share.

Error rates are of the tests' own chance: keys are drawn anew each time. Where tokens and keys are fixed there is none.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.arrays import IntArray
from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node.reporting import check_signatures, make_report, play
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import UnacceptableError, parse_announcement
from shufflerl.network.protocol.wire import Action, Opening, ProblemError, Reason, State, Transport
from shufflerl.network.shuffler.shuffler import Limits
from shufflerl.privacy.accounting import Budget
from tests.support.network_world import World, agreement_of, pretend_to_seal

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

MDP = riverswim(np.random.default_rng(0), n_states=2, horizon=2)
ENV = TabularEnv(MDP)
BATCH = 100


def run_of(episodes: int, **options: Any) -> Run:
    return Run(MDP.problem(episodes), "ucbvi", Budget(8.0, 1e-5), 7, {"batch": BATCH}, **options)


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_seal(monkeypatch)


def tokens_of(count: int) -> list[bytes]:
    rng = np.random.default_rng(1)
    return [rng.bytes(wire.TOKEN_BYTES) for _ in range(count)]


def test_lots_are_uniform_and_those_of_two_batches_independent() -> None:
    """By chi-square, of fixed tokens and keys: of such a pair of tests one in 500 would fail, and then always."""
    tokens, table = tokens_of(20_000), np.zeros((16, 16))
    for token in tokens:
        table[crypto.lot(bytes(32), token) >> 60, crypto.lot(b"\1" + bytes(31), token) >> 60] += 1
    assert stats.chisquare(table.sum(axis=1)).pvalue > 0.001
    assert stats.chi2_contingency(table).pvalue > 0.001


def test_a_lot_is_of_the_key_and_the_nonce_alone() -> None:
    """Another signature of the same random bytes is no second lot."""
    token = bytes(range(wire.TOKEN_BYTES))
    again = token[: wire.NONCE_BYTES] + bytes(wire.TOKEN_BYTES - wire.NONCE_BYTES)
    assert crypto.lot(bytes(32), token) == crypto.lot(bytes(32), again)
    assert crypto.lot(bytes(32), token) != crypto.lot(b"\1" + bytes(31), token)


@pytest.mark.parametrize("transport", list(Transport))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.floats(0.01, 0.99), extensions=st.integers(0, 4))
def test_the_shuffler_takes_whom_nodes_find_drawn_and_no_other(
    transport: Transport, drawn: float, extensions: int
) -> None:
    there = World(users=50, transport=transport)
    there.announce(drawn=drawn)
    for _ in range(extensions):
        there.now += there.limits.timeout
        assert there.shuffler.advance()
    assert there.shuffler.status(there.task).extensions == extensions
    checked, tokens = there.checked(), [there.mint() for _ in range(8)]
    found = [checked.draws(token) for token in tokens]
    outcomes = there.upload(*(there.report(token) for token in tokens))
    assert [there.reason(outcome) for outcome in outcomes] == [None if own else Reason.not_drawn for own in found]
    assert there.shuffler.refused[Reason.not_drawn] == found.count(False)
    assert there.shuffler.status(there.task).accepted == found.count(True)


def test_every_extension_draws_twice_as_many_and_in_the_end_all() -> None:
    agreed = agreement_of(World(), drawn=0.01)
    lots = [[agreed.draws(bytes(32), token, more) for token in tokens_of(20_000)] for more in range(8)]
    for more, (before, after) in enumerate(itertools.pairwise(lots)):
        assert all(late >= early for early, late in zip(before, after, strict=True))
        assert abs(sum(before) - 200 * 2**more) < 5 * math.sqrt(200 * 2**more)
    assert all(lots[7])
    everybody = agreement_of(World())
    assert everybody.drawn == 1.0
    assert all(everybody.draws(bytes(32), token, 0) for token in tokens_of(100))


def test_who_was_not_drawn_has_spent_nothing_and_is_drawn_later() -> None:
    there = World(users=50)
    there.announce(drawn=0.02)
    token = next(token for token in iter(there.mint, b"") if not there.checked().draws(token))
    report = there.report(token)
    assert there.reason(there.upload(report)[0]) == Reason.not_drawn
    while not there.checked().draws(token):
        there.now += there.limits.timeout
        assert there.shuffler.advance()
    assert there.upload(report)[0].problem is None


def test_time_that_another_process_gave_counts() -> None:
    """A front end that has not heard of it would refuse a node that another one has told so."""
    there = World(users=50)
    there.announce(drawn=0.02)
    token = next(token for token in iter(there.mint, b"") if not there.checked().draws(token))
    report, stale = there.report(token), there.store.unfinished()[0]
    there.now += there.limits.timeout
    while not there.checked().draws(token):
        assert there.shuffler.advance()
        there.now += there.limits.timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(there.store, "get", lambda _: stale)
        assert there.upload(report)[0].problem is None


def test_one_timeout_draws_twice_as_many_whoever_sees_it() -> None:
    """Front ends that share a store look at the clock at once, and some of them act late."""
    there = World(users=50)
    there.announce(drawn=0.02)
    for more in range(1, 4):
        there.now += there.limits.timeout
        seen = there.store.unfinished()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(there.store, "unfinished", lambda seen=seen: seen)
            for _ in range(3):
                there.now += 1.0
                there.restart()
                assert there.shuffler.advance()
        assert there.shuffler.status(there.task).extensions == there.checked().extensions == more


def test_only_the_shuffler_says_that_a_batch_has_more_time() -> None:
    """It signs how often. Nobody else can make a node take itself for drawn, nor can the opening of another batch."""
    there = World(users=50)
    there.announce(drawn=0.02)
    first = there.shuffler.current(there.task)
    there.now += there.limits.timeout
    assert there.shuffler.advance()
    extended = there.shuffler.current(there.task)
    assert (check_signatures(there.invitation, first).extensions, there.checked().extensions) == (0, 1)
    said = wire.decode(Opening, extended.opening.payload)
    forged = msgspec.structs.replace(
        extended.opening, payload=wire.encode(msgspec.structs.replace(said, extensions=60))
    )
    for opening in (forged, there.coordinator.sign(msgspec.structs.replace(said, extensions=60))):
        with pytest.raises(ProblemError, match="not signed by the key"):
            check_signatures(there.invitation, msgspec.structs.replace(extended, opening=opening))
    there.store.abort(there.store.unfinished()[0].id)
    there.announce(0, 1, drawn=0.02)
    again = there.shuffler.current(there.task)
    assert there.checked().extensions == 0
    with pytest.raises(UnacceptableError, match="a key made for another batch"):
        check_signatures(there.invitation, msgspec.structs.replace(again, opening=extended.opening))


def test_where_nobody_is_drawn_an_opening_stays_as_it_was() -> None:
    there = World(users=50)
    there.announce()
    first = there.shuffler.current(there.task)
    there.now += there.limits.timeout
    assert there.shuffler.advance()
    assert there.shuffler.current(there.task) == first
    assert "extensions" not in msgspec.msgpack.decode(first.opening.payload)


@pytest.mark.parametrize("drawn", [0.0, -0.1, 1.0, 1.5, math.nan, math.inf, "0.5", None])
def test_a_share_that_is_none_is_refused(drawn: Any) -> None:
    """Everybody is said by saying nothing: one agreed, one message."""
    said = msgspec.msgpack.decode(wire.encode(World().announcement(drawn=0.5)))
    parse_announcement(msgspec.msgpack.encode(said))
    with pytest.raises(ProblemError) as refused:
        parse_announcement(msgspec.msgpack.encode(said | {"drawn": drawn}))
    assert refused.value.reason == Reason.malformed


def test_the_announced_share() -> None:
    run = run_of(1000, admission=2)
    assert run.drawn(BATCH, 0, 0) == 0.2
    assert run.drawn(BATCH, 500, 0) == 0.4
    assert run.drawn(BATCH, 900, 0) == run.drawn(BATCH, 0, 3) == run.drawn(BATCH, 0, 10**6) == 1.0
    assert run.drawn(BATCH, 0, 1) == 0.4
    assert run_of(1000, admission=2, enrolled=4000).drawn(BATCH, 0, 0) == 0.05
    assert run_of(1000).drawn(BATCH, 0, 0) == 1.0
    assert run_of(1000, admission=2).drawn(BATCH, 1000, 0) == run_of(1000, admission=2).drawn(BATCH, 1100, 0) == 1.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"admission": 0.5}, r"admission is 0.5; expected"),
        ({"admission": math.nan}, r"admission is nan; expected"),
        ({"admission": 2, "enrolled": 999}, r"enrolled is 999; expected a whole number of at least 1000"),
        ({"enrolled": 2000}, r"set admission too"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        run_of(1000, **options)


def test_a_run_goes_on_with_its_own_admission(tmp_path: Path) -> None:
    Coordinator(tmp_path, run_of(300, admission=2)).close()
    with pytest.raises(StateMismatchError, match=r"admission was 2 and is null now"):
        Coordinator(tmp_path, run_of(300))
    Coordinator(tmp_path, run_of(300, admission=2)).close()


class Users:
    """A coordinator, a shuffler and users who all try each batch, in the order of their tokens."""

    def __init__(self, folder: Path, run: Run, users: int, when_late: Literal["extend", "abort"] = "extend") -> None:
        self.coordinator = Coordinator(folder, run)
        self.world = World(limits=Limits(min_batch_size=1, timeout=10.0, when_late=when_late))
        self.world.coordinator, self.world.task = self.coordinator.identity, self.coordinator.task
        self.world.restart()
        self.waiting = [self.world.mint() for _ in range(users)]
        self.tokens = list(self.waiting)
        self.extensions = self.attempts = 0

    def step(self) -> IntArray:
        """A batch: who played it, by the place of their tokens."""
        there, shuffler = self.world, self.world.shuffler
        while True:
            assert self.coordinator.pending is not None
            number, attempt, signed = self.coordinator.pending
            status = shuffler.announce(signed)
            checked = check_signatures(there.invitation, shuffler.current(there.task))
            drawn = [token for token in self.waiting if checked.draws(token)]
            came = drawn[: status.users - status.accepted]
            reports = (make_report(checked, play(ENV, checked.agreement), token) for token in came)
            assert all(outcome.problem is None for outcome in there.upload(*reports, number=number, attempt=attempt))
            gone = set(came)
            self.waiting = [token for token in self.waiting if token not in gone]
            played = np.array([self.tokens.index(token) for token in came])
            assert shuffler.advance()
            status = shuffler.status(there.task)
            if status.state == State.released:
                self._learn(number, attempt, status.chunks)
                return played
            assert self.waiting, "nobody is left to play"
            there.now += 10.0
            assert shuffler.advance()
            if shuffler.status(there.task).state == State.aborted:
                self.coordinator.reopen()
                self.attempts += 1
            else:
                self.extensions += 1

    def _learn(self, number: int, attempt: int, chunks: int) -> None:
        command, shuffler = self.coordinator.command, self.world.shuffler
        collected = [shuffler.collect(command(number, attempt, Action.collect, chunk)) for chunk in range(chunks)]
        self.coordinator.absorb(collected)
        for one, again, action in self.coordinator.store.unacknowledged():
            shuffler.scrub(command(one, again, action))
            self.coordinator.store.acknowledged(one)


@pytest.mark.parametrize("admission", [None, 2])
def test_liars_who_come_first_are_no_more_than_their_share_of_the_drawn(
    tmp_path: Path, admission: float | None
) -> None:
    """A tenth of all users lie and come first. By lot they are a fifth of the first batch: so many, with 1e-9."""
    users, liars = 600, 60
    there = Users(tmp_path, run_of(users, admission=admission), users)
    first = int((there.step() < liars).sum())
    if admission is None:
        assert first == liars
    else:
        share = admission * BATCH / users
        assert first <= stats.binom.isf(1e-9, liars, share) < 0.75 * liars
    while there.coordinator.pending is not None:
        there.step()
    assert there.waiting == []
    assert there.world.shuffler.accepted == users
    there.coordinator.close()


@pytest.mark.parametrize("enrolled", [None, 1000])
def test_of_those_who_have_not_played_as_many_are_drawn_for_each_batch(tmp_path: Path, enrolled: int | None) -> None:
    """Twice its users on average, in the last batch as in the first: what is announced, and who is drawn."""
    there = Users(tmp_path, run_of(600, admission=2, enrolled=enrolled), enrolled or 600)
    while there.coordinator.pending is not None:
        left = len(there.waiting)
        said = parse_announcement(there.coordinator.pending[2].payload)
        assert said.drawn * left == pytest.approx(min(left, 2 * BATCH), rel=1e-12)
        assert len(there.step()) == BATCH
    assert len(there.waiting) == (enrolled or 600) - 600
    there.coordinator.close()


def test_a_batch_that_was_filled_in_vain_draws_no_more_than_before(tmp_path: Path) -> None:
    """Liars who spoil masked sums would else have ever more of their kind drawn. Those who came are gone."""
    coordinator = Coordinator(tmp_path, run_of(1000, admission=2))

    def announced() -> tuple[int, float]:
        assert coordinator.pending is not None
        _, attempt, signed = coordinator.pending
        return attempt, round(parse_announcement(signed.payload).drawn, 12)

    assert announced() == (0, 0.2)
    coordinator.reopen(filled=True)
    assert announced() == (1, round(2 * BATCH / (1000 - BATCH), 12))
    coordinator.reopen()
    assert announced() == (2, round(2 * 2 * BATCH / (1000 - BATCH), 12))
    coordinator.close()
    coordinator = Coordinator(tmp_path, run_of(1000, admission=2))
    coordinator.reopen(filled=True)
    assert announced() == (3, round(2 * 2 * BATCH / (1000 - 2 * BATCH), 12))
    coordinator.close()


@pytest.mark.parametrize("when_late", ["extend", "abort"])
def test_a_run_ends_though_most_of_the_drawn_do_not_come(tmp_path: Path, when_late: Literal["extend", "abort"]) -> None:
    """Two of three users are there, and no more are drawn than are needed: 67 of 100 come, all of them with 1e-4."""
    there = Users(tmp_path, run_of(300, admission=1, enrolled=3000), 2000, when_late)
    while there.coordinator.pending is not None:
        there.step()
    assert (there.extensions if when_late == "extend" else there.attempts) >= 3
    there.coordinator.close()
