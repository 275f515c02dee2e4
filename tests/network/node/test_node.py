"""The node's SDK: one user, one report, whatever happens to the network and to the node."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import BudgetExceededError, ContractError, InvalidInputError, StorageError
from shufflerl.network.node import node as module
from shufflerl.network.node.node import Backoff, Node, Receipt, TimeLimitError, take_part
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import Terms, UnacceptableError
from shufflerl.network.protocol.wire import Outcome, ProblemError, Verdict
from shufflerl.network.web import contact
from shufflerl.noise import PoissonNoise
from shufflerl.privacy.accounting import Budget, calibrate
from shufflerl.privacy.loss import privacy_loss
from tests.support.network_world import Crash, World, new_identity
from tests.support.nodes import ENV, TERMS, Place, Short, place, releases
from tests.support.waiting import PATIENCE, until

__all__ = ["place"]


def test_a_node_takes_part_once(place: Place) -> None:
    node = place.node("a")
    assert node.participate() == Receipt(0, "accepted")
    with pytest.raises(ContractError, match="once"):
        node.participate()
    node.close()
    again = place.node("a")
    with pytest.raises(ContractError, match="once"):
        again.participate()
    again.close()
    assert place.accepted == 1


def test_the_ledger_refuses_a_second_participation_even_without_an_outbox(place: Place) -> None:
    node = place.node("a")
    node.participate()
    node.close()
    for path in (place.folder / "a").glob("outbox.db*"):
        path.unlink()
    node = place.node("a")
    with pytest.raises((ContractError, BudgetExceededError)):
        node.participate()
    node.close()
    assert place.accepted == 1


def test_a_node_whose_ledger_is_gone_does_not_begin_another(place: Place) -> None:
    """It would have forgotten what it spent, in this run or others."""
    node = place.node("a")
    node.participate()
    node.close()
    for path in (place.folder / "a").glob("ledger.db*"):
        path.unlink()
    with pytest.raises(StorageError, match=r"has an outbox but no ledger\.db, which says what its users have spent"):
        place.node("a")
    assert not (place.folder / "a" / "ledger.db").exists()


def test_another_run_composes_against_the_same_budget(place: Place) -> None:
    """A budget that one run uses up has nothing left for the next, though that has another name."""
    epsilon = privacy_loss(PoissonNoise(40.0), 6).epsilon(1e-5)
    for factor, fits in ((1.01, False), (2.0, True)):
        terms, token = Terms(Budget(factor * epsilon, 1e-5), min_batch_size=2), place.world.mint()
        node = place.node(f"{factor}", terms=terms)
        take_part(ENV, place.world.checked(), terms, token, node.ledger)
        place.world.task = bytes(reversed(place.world.task))
        place.announce()
        second = place.world.checked()
        with contextlib.nullcontext() if fits else pytest.raises(BudgetExceededError):
            take_part(ENV, second, terms, token, node.ledger)
        node.close()
        place.world.task = bytes(reversed(place.world.task))


def test_what_may_not_fit_into_a_report_is_charged_for_every_run(place: Place) -> None:
    """Of two runs that fit but for it, and that each are within the terms, the second is refused."""
    budget, lost = Budget(8.0, 1e-10), (1 + math.exp(8.0)) * math.exp(-35)
    for reserved, fits in ((1, False), (2, True)):
        mean = calibrate(Budget(8.0, 1e-10 - reserved * lost), 6, 2).mean
        node = place.node(f"{reserved}", terms=Terms(budget, min_batch_size=2))
        for number in range(2):
            place.world.task = secrets.token_bytes(wire.TASK_BYTES)
            place.announce(noise_mean=mean)
            with contextlib.nullcontext() if fits or not number else pytest.raises(BudgetExceededError):
                node.prepare(place.world.checked())
        assert node.ledger.spent <= 8.0
        node.close()


def test_a_node_that_was_killed_sends_the_very_same_bytes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    node = place.node("a")
    with monkeypatch.context() as patch:
        patch.setattr(Node, "deliver", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            node.participate()
    node.close()
    kept = place.parcel("a")
    assert kept.report is not None
    again = place.node("a")
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it must not play again"))
    assert again.participate() == Receipt(0, "accepted")
    assert place.accepted == 1
    ((_, envelope),) = place.world.store.reports(place.world.store.unfinished()[0].id)
    assert envelope == wire.decode(wire.Report, kept.report).envelope
    again.close()
    assert place.parcel("a").report is None


def test_a_lost_answer_is_asked_for_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shuffler stored the report but its answer was lost: the retry is a duplicate and counts once."""
    node = place.node("a")
    post, lost = httpx2.Client.post, [True]

    def lossy(*args: Any, **kwargs: Any) -> Any:
        answer = post(*args, **kwargs)
        if lost.pop() if lost else False:
            raise httpx2.ReadTimeout("lost")
        return answer

    monkeypatch.setattr(httpx2.Client, "post", lossy)
    assert node.participate().verdict == "accepted"
    assert place.accepted == 1
    assert place.world.shuffler.refused[wire.Reason.duplicate] == 1
    node.close()


def test_a_late_node_is_told_and_does_not_try_again(place: Place) -> None:
    late = place.node("late")
    parcel = late.prepare(place.world.checked())
    for name in ("a", "b"):
        node = place.node(name)
        node.participate()
        node.close()
    assert late.deliver(parcel, 1e18) == Receipt(0, "refused: late")
    with pytest.raises(ContractError, match="late"):
        late.participate()
    late.close()


def test_a_node_refuses_before_it_plays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it must not play"))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"terms": Terms(Budget(0.5, 1e-5), min_batch_size=2)}, UnacceptableError, "told to accept"),
        ({"terms": Terms(Budget(8.0, 1e-5), min_batch_size=3)}, UnacceptableError, "min_batch_size"),
        ({"invitation": replace(place.invitation, coordinator_key=new_identity().public)}, ProblemError, "not signed"),
        ({"invitation": replace(place.invitation, shuffler_key=new_identity().public)}, ProblemError, "not signed"),
    ]
    larger = TabularEnv(riverswim(np.random.default_rng(0), n_states=5, horizon=2))
    cases.append(({"env": larger}, UnacceptableError, "2 states and 2 actions, but the environment has 5"))
    for number, (options, error, text) in enumerate(cases):
        node = place.node(f"refusing {number}", **options)
        with pytest.raises(error, match=text):
            node.participate(timeout=PATIENCE)
        assert node.ledger.releases == []
        node.close()
    assert place.accepted == 0


def test_a_node_refuses_a_second_attempt_that_does_not_meet_its_terms(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt would have done; the second asks fewer users, or has less noise."""
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it must not play"))
    TERMS.check(place.world.checked().agreement)
    changes: list[dict[str, Any]] = [{"users": 1}, {"noise_mean": 10.0}]
    for attempt, change in enumerate(changes, 1):
        place.abort()
        place.announce(0, attempt, **change)
        node = place.node(f"{attempt}")
        with pytest.raises(UnacceptableError, match="does not take part"):
            node.participate(timeout=PATIENCE)
        assert node.ledger.releases == []
        node.close()
    assert place.accepted == 0


def test_a_node_is_charged_before_it_plays(place: Place) -> None:
    """Who looks while it plays finds the charge on disk."""
    charged: list[list[str]] = []

    class Watched(Short):
        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            charged.append(releases(place.folder / "a" / "ledger.db"))
            return super().step(action)

    node = place.node("a", env=Watched())
    node.participate()
    node.close()
    assert charged == [[f"run {place.world.task.hex()}"]]


def test_a_node_that_dies_while_it_plays_has_had_its_turn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(module, "play", die)
    for attempt in range(2):
        node = place.node("a")
        with pytest.raises(ContractError if attempt else Crash):
            node.participate()
        node.close()
    assert place.accepted == 0


def test_waiting_has_an_end(place: Place) -> None:
    node = place.node("a", invitation=replace(place.invitation, task=bytes(16)))
    with pytest.raises(TimeLimitError, match="No batch was open"):
        node.participate(timeout=0.3)
    node.close()
    node = place.node("b", invitation=replace(place.invitation, shuffler="http://127.0.0.1:9"))
    with pytest.raises(TimeLimitError):
        node.participate(timeout=0.3)
    node.close()


def test_a_node_that_is_not_drawn_waits_says_so_once_and_is_charged_for_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.abort()
    place.announce(0, 1, drawn=1e-12)
    node = place.node("a")
    with pytest.raises(TimeLimitError, match="batch 0 is open, and this node is not drawn for it"):
        node.participate(timeout=1.0)
    assert [text for text in caplog.messages if "drawn" in text] == [
        "No token left here is drawn for batch 0; users are drawn by lot, for each batch anew."
    ]
    asked = [sent.line.rpartition("/")[2] for sent in place.sent]
    assert asked.count("status") > asked.count("batch") == 1  # what is known is not fetched again
    assert releases(place.folder / "a" / "ledger.db") == []
    place.abort()
    place.announce(0, 2, drawn=0.999999)
    assert node.participate() == Receipt(0, "accepted")
    node.close()


def test_a_node_is_told_of_false_extensions_in_vain(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is not signed. What the shuffler did not sign draws nobody: nothing is charged, played or sent."""
    place.abort()
    place.announce(0, 1, drawn=1e-9)
    node, told = place.node("a"), contact.status
    monkeypatch.setattr(contact, "status", lambda answer: msgspec.structs.replace(told(answer), extensions=60))
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it must not play"))
    with pytest.raises(TimeLimitError, match="this node is not drawn for it"):
        node.participate(timeout=1.0)
    assert releases(place.folder / "a" / "ledger.db") == []
    assert not [sent for sent in place.sent if sent.line.endswith("reports")]
    node.close()


def test_a_node_takes_part_once_more_time_has_drawn_it(place: Place) -> None:
    """It waits, uncharged, and finds by itself when it is drawn; its report is taken."""
    place.abort()
    place.announce(0, 1, drawn=0.01)
    token = next(token for token in iter(place.world.mint, b"") if not place.world.checked().draws(token))
    place.tokens["a"] = token
    node = place.node("a")
    for _ in range(8):  # until everybody is drawn, at the latest
        if place.world.checked().draws(token):
            break
        with pytest.raises(TimeLimitError, match="not drawn"):
            node.participate(timeout=0.3)
        assert releases(place.folder / "a" / "ledger.db") == []
        place.extend()
    assert node.participate() == Receipt(0, "accepted")
    node.close()


def test_a_node_that_waits_hears_of_more_time(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.abort()
    place.announce(0, 1, drawn=1e-9)
    node = place.node("a")

    def extend_until_all_are_drawn() -> None:
        until(lambda: "drawn for batch 0" in caplog.text)
        place.extend(60)

    with ThreadPoolExecutor(1) as other:
        done = other.submit(extend_until_all_are_drawn)
        assert node.participate(timeout=PATIENCE) == Receipt(0, "accepted")
        done.result(PATIENCE)
    node.close()


def test_a_report_whose_token_is_not_drawn_is_kept_and_sent_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another front end may not have heard of an extension yet: that spends no node's report."""
    node, refused = place.node("a"), list[int]()

    def unheard(*_: object) -> None:
        refused.append(1)
        raise ProblemError(wire.Reason.not_drawn, "Of all tokens 0.02 are drawn for batch 0, and this one is not.")

    with monkeypatch.context() as patch:
        patch.setattr(place.world.shuffler, "_check_report", unheard)
        with pytest.raises(TimeLimitError, match="was not delivered in time and is kept"):
            node.participate(timeout=1.0)
    assert refused
    assert node.participate() == Receipt(0, "accepted")
    assert len(releases(place.folder / "a" / "ledger.db")) == 1
    node.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_is_in_the_way_is_told_once_it_lasts_and_once(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    line = contact.Contact(bytes(16), "http://x")
    down = httpx2.ConnectError("Connection refused")
    line.failed(down)
    assert caplog.messages == []  # a request that was lost is nothing to speak of
    for _ in range(3):
        clock[0] += 1.5
        line.failed(down)
    assert caplog.messages == ["The shuffler at http://x cannot be reached (Connection refused). It is tried again."]
    line.failed(ProblemError(wire.Reason.unknown_batch, "No batch."))
    assert "knows no batch of run 00000000000000000000000000000000" in caplog.messages[1]
    line.failed(ProblemError(wire.Reason.storage, "The disk is full."))
    assert caplog.messages[2] == "The shuffler at http://x refuses: The disk is full. It is tried again."
    line.answered()
    line.answered()
    assert caplog.messages[3:] == ["The trouble with the shuffler at http://x is over."]
    clock[0] += 1.5
    line.failed(down)
    assert len(caplog.messages) == 5  # another time


def test_an_answer_that_no_shuffler_gives_says_so() -> None:
    asked = httpx2.Request("GET", "http://x:1/v1/tasks")
    ours = msgspec.json.encode(ProblemError(wire.Reason.not_found, "This is a coordinator.").problem)
    for status, body in ((200, b"{}"), (200, b"\xff"), (404, ours), (502, b"Bad Gateway"), (500, b'{"type": "urn:x"}')):
        with pytest.raises(
            ProblemError, match=f"What answers at http://x:1 is no shuffler.*status {status}"
        ) as refused:
            contact.status(httpx2.Response(status, content=body, request=asked))
        assert refused.value.reason == wire.Reason.unreachable
    full = msgspec.json.encode(ProblemError(wire.Reason.storage, "Full.").problem)
    with pytest.raises(ProblemError, match=r"^Full\.$"):
        contact.outcome(httpx2.Response(507, content=full, request=asked))
    with pytest.raises(ProblemError, match="no shuffler"):
        contact.outcome(httpx2.Response(200, content=wire.encode(wire.Outcomes(outcomes=[])), request=asked))


def test_a_node_says_what_it_waits_for_and_that_it_was_refused(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact, "PATIENCE", -1.0)
    for changes, text in (
        ({"task": bytes(16)}, "knows no batch of run"),
        ({"shuffler": "http://127.0.0.1:9"}, "cannot be reached"),
    ):
        node = place.node(text, invitation=replace(place.invitation, **changes))
        with pytest.raises(TimeLimitError):
            node.participate(timeout=0.3)
        node.close()
        (told,) = caplog.messages
        assert text in told
        caplog.clear()
    place.tokens["false"] = bytes(wire.TOKEN_BYTES)
    node = place.node("false")
    assert node.participate() == Receipt(0, "refused: unauthorized")
    assert "was refused: The token in the envelope was not issued here" in caplog.text
    node.close()


def test_what_a_verdict_means() -> None:
    def outcome(reason: wire.Reason) -> Outcome:
        verdict = Verdict.duplicate if reason == wire.Reason.duplicate else Verdict.refused
        return Outcome(bytes(16), verdict, ProblemError(reason, "x").problem)

    for again in (False, True):
        assert module.settled(Outcome(bytes(16), Verdict.accepted), again=again) == "accepted"
        assert module.settled(outcome(wire.Reason.duplicate), again=again) == "accepted"
        assert module.settled(outcome(wire.Reason.late), again=again) == "refused: late"
    assert module.settled(outcome(wire.Reason.replayed), again=True) == "accepted"
    assert module.settled(outcome(wire.Reason.replayed), again=False) == "refused: replayed"


@pytest.mark.parametrize("trouble", [httpx2.ReadTimeout("lost"), httpx2.ConnectError("no route"), None], ids=str)
def test_a_token_that_somebody_else_spent_is_not_called_accepted(
    place: Place, trouble: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the node's own report may have been there before: its answer was lost."""
    thief = place.node("thief")
    place.tokens["robbed"] = place.tokens["thief"]
    robbed = place.node("robbed")
    assert thief.participate() == Receipt(0, "accepted")
    post, troubles = httpx2.Client.post, [] if trouble is None else [trouble]

    def troubled(*args: Any, **kwargs: Any) -> Any:
        if troubles:
            raise troubles.pop()
        return post(*args, **kwargs)

    monkeypatch.setattr(httpx2.Client, "post", troubled)
    unclear = isinstance(trouble, httpx2.ReadTimeout)
    assert robbed.participate() == Receipt(0, "accepted" if unclear else "refused: replayed")
    assert place.accepted == 1
    for node in (thief, robbed):
        node.close()


def test_a_report_of_the_outbox_whose_token_is_spent_is_in(place: Place) -> None:
    """It may have been sent before its process died."""
    first = place.node("first")
    place.tokens["other"] = place.tokens["first"]
    other = place.node("other")
    first.prepare(place.world.checked())
    assert other.participate() == Receipt(0, "accepted")
    assert first.participate() == Receipt(0, "accepted")
    for node in (first, other):
        node.close()


@pytest.mark.parametrize("address", [[], None, 5, b"http://127.0.0.1:8742", ("http://127.0.0.1",)], ids=repr)
def test_what_is_no_invitation_is_refused_in_one_sentence(address: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"shuffler is .* expected an address"):
        replace(World().invitation, shuffler=address)
    given: Any = "invitation.toml"
    with pytest.raises(InvalidInputError, match=r"The invitation is 'invitation\.toml'; expected an Invitation"):
        Node(ENV, given, TERMS, bytes(wire.TOKEN_BYTES), tmp_path)


def test_waits_grow_and_vary() -> None:
    backoff = Backoff(first=1.0, limit=4.0)
    waits = [backoff.wait() for _ in range(5)]
    for wait, middle in zip(waits, (1, 2, 4, 4, 4), strict=True):
        assert 0.5 * middle <= wait < 1.5 * middle
    backoff.reset()
    assert backoff.wait() < 1.5
