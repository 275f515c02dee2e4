"""Many nodes in one process: each takes part once, whatever happens to the list of tokens, and ends when it is told."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from shufflerl.errors import LostWorkersError, StateMismatchError, StorageError
from shufflerl.network import roles
from shufflerl.network.node import fleet as module
from shufflerl.network.node.composing import compose
from shufflerl.network.node.fleet import Fleet
from shufflerl.network.node.outbox import Outbox
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Terms, UnacceptableError
from shufflerl.network.web import contact
from shufflerl.network.workers import pool
from shufflerl.privacy.accounting import Budget
from tests.support.network_world import Crash, World, open_batch
from tests.support.nodes import ENV, TERMS, Place, check_sent, place, releases
from tests.support.waiting import PATIENCE, until
from tests.test_cli import Call, call

__all__ = ["call", "place"]
SMALL = {"n_states": 2, "horizon": 2}
#: What two users with noise of mean 40 do not offer.
OTHER_TERMS = [
    Terms(Budget(1.0, 1e-5), min_batch_size=2),
    Terms(Budget(2.0, 1e-5), honest_fraction=0.5, min_batch_size=2),
    Terms(Budget(8.0, 1e-5), min_batch_size=3),
    Terms(Budget(8.0, 1e-5), min_batch_size=2, max_messages=10),
]


@contextmanager
def fleet(place: Place, tokens: list[bytes], **changes: Any) -> Iterator[Fleet]:
    options: dict[str, Any] = {
        "env": "riverswim", "parameters": SMALL, "invitation": place.invitation, "terms": TERMS, **changes
    }  # fmt: skip
    made = Fleet(tokens=tokens, folder=place.folder / "nodes", **options)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_node_is_its_token_wherever_it_stands_in_the_list(place: Place) -> None:
    tokens = [place.world.mint() for _ in range(2)]
    with fleet(place, tokens) as first:
        asyncio.run(asyncio.wait_for(first.run(), 20))
        assert first.verdicts == {"accepted": 2}
        assert len(first.ledger.releases) == 2
    check_sent(place)
    with fleet(place, [tokens[1], tokens[1], tokens[0]]) as again:
        asyncio.run(asyncio.wait_for(again.run(), 20))
        assert again.verdicts == {}
        assert len(again.ledger.releases) == 2


@pytest.mark.parametrize("env", ["riverswim", ENV], ids=["by name", "itself"])
def test_workers_play_the_environment_and_do_not_only_report(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An episode that cannot be played is reported too, so a fleet that plays none would look like any other."""
    world = World(noise_mean=40.0)
    world.announce()
    report = compose(env, SMALL, wire.encode(open_batch(world)), world.invitation, world.mint())
    assert world.upload(wire.decode(wire.Report, report))[0].problem is None
    assert caplog.messages == []


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_fleet_whose_ledger_is_gone_does_not_begin_another(place: Place) -> None:
    tokens = [place.world.mint() for _ in range(2)]
    with fleet(place, tokens) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 20))
    (place.folder / "nodes" / "ledger.db").unlink()
    with pytest.raises(StorageError, match=r"has an outbox but no ledger\.db"), fleet(place, tokens):
        pass


def test_a_batch_that_wants_one_more_gets_it(place: Place) -> None:
    node = place.node("first")
    node.participate()
    node.close()
    with fleet(place, [place.world.mint()]) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 20))
    assert nodes.verdicts == {"accepted": 1}
    assert place.accepted == place.world.users


@pytest.mark.usefixtures("here")
def test_a_fleet_whose_token_was_spent_elsewhere_says_so(place: Place) -> None:
    node = place.node("first")
    node.participate()
    node.close()
    with fleet(place, [place.tokens["first"]]) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 20))
    assert nodes.verdicts == {"refused: replayed": 1}
    assert place.accepted == 1


@pytest.mark.usefixtures("here")
def test_a_fleet_sends_those_who_are_drawn(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """One who is drawn, among three who are not: they wait, as the batch wants another, and are not charged."""
    place.abort()
    place.announce(0, 1, drawn=0.3)
    found: dict[bool, list[bytes]] = {True: [], False: []}
    while not found[True] or len(found[False]) < 3:
        token = place.world.mint()
        found[place.world.checked().draws(token)].append(token)
    (drawn, *_), others = found[True], found[False][:3]
    with fleet(place, [*others, drawn]) as nodes:

        async def until_told() -> None:
            running = asyncio.create_task(nodes.run())
            while "drawn for batch 0" not in caplog.text:
                await asyncio.sleep(0.05)
            nodes.stop()
            await running

        asyncio.run(asyncio.wait_for(until_told(), PATIENCE))
        assert (nodes.verdicts, nodes.unused, nodes.over) == ({"accepted": 1}, 3, False)
        assert len(nodes.ledger.releases) == 1
    assert place.world.store.unfinished()[0].accepted == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("forged", [False, True])
def test_a_fleet_sends_those_whom_more_time_draws(
    place: Place, forged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody, until the shuffler has signed that it gave more time; a status that says so is believed by none."""
    place.abort()
    place.announce(0, 1, drawn=1e-9)
    if forged:
        told = contact.status
        monkeypatch.setattr(contact, "status", lambda answer: msgspec.structs.replace(told(answer), extensions=60))
    with fleet(place, [place.world.mint() for _ in range(2)]) as nodes:

        async def until_told() -> None:
            running = asyncio.create_task(nodes.run())
            while "drawn for batch 0" not in caplog.text:
                await asyncio.sleep(0.05)
            asked = len(place.sent)
            while len(place.sent) < asked + 5:
                await asyncio.sleep(0.05)
            assert (nodes.unused, nodes.verdicts) == (2, {})
            await asyncio.to_thread(place.extend, 60)
            await running

        asyncio.run(asyncio.wait_for(until_told(), PATIENCE))
    assert nodes.verdicts == {"accepted": 2}
    assert place.accepted == 2


def test_a_folder_of_one_run_is_refused_for_another(place: Place) -> None:
    """What its users have spent would not be added up."""
    with fleet(place, []):
        pass
    other = replace(place.invitation, task=bytes(16))
    with pytest.raises(StateMismatchError, match="run"), fleet(place, [], invitation=other):
        pass


def test_a_batch_for_another_environment_is_refused_before_anyone_is_charged(place: Place) -> None:
    with fleet(place, [place.world.mint()], parameters={"n_states": 4, "horizon": 2}) as wrong:
        with pytest.raises(UnacceptableError, match="environment has 4"):
            asyncio.run(wrong.run())
        assert wrong.ledger.releases == []


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads of this process, where they can be watched."""
    monkeypatch.setattr(module, "pool", ThreadPoolExecutor)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("number", "attempt"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("terms", OTHER_TERMS, ids=str)
def test_a_fleet_sends_nothing_where_its_terms_are_not_met(
    place: Place, terms: Terms, number: int, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little noise, too little of honest users, too few users, too long reports: it charges, plays and sends none.

    An attempt that comes to nothing changes nothing of that, nor does a batch that came before.
    """
    if number:
        place.fill(number - 1)
        place.announce(number, 0)
    if attempt:
        place.abort()
        place.announce(0, attempt)
    monkeypatch.setattr(module, "compose", lambda *_: pytest.fail("it must not play"))
    with fleet(place, [place.world.mint() for _ in range(2)], terms=terms) as nodes:
        with pytest.raises(UnacceptableError):
            asyncio.run(asyncio.wait_for(nodes.run(), 30))
        assert nodes.ledger.releases == []
    outbox = Outbox(place.folder / "nodes" / "outbox.db")
    assert outbox.of_run(place.world.task) == []
    outbox.close()
    assert place.accepted == (place.world.users if number else 0)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("worse", [{"noise_mean": 1.0}, {"users": 1}], ids=str)
def test_a_fleet_that_has_played_looks_at_the_terms_again(place: Place, worse: dict[str, Any]) -> None:
    """A first batch that is as agreed says nothing of those that follow."""
    with fleet(place, [place.world.mint()]) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 30))
        assert len(nodes.ledger.releases) == 1
    place.abort()
    place.announce(0, 1, **worse)
    with fleet(place, [place.world.mint()]) as nodes:
        with pytest.raises(UnacceptableError):
            asyncio.run(asyncio.wait_for(nodes.run(), 30))
        assert len(nodes.ledger.releases) == 1
    assert place.accepted == 1


@pytest.mark.usefixtures("here")
def test_a_fleet_is_charged_before_anybody_plays(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who looks while they play finds every charge on disk; killed there, they have had their turn."""
    charged: list[list[str]] = []

    def die(*_: Any) -> bytes:
        charged.append(releases(place.folder / "nodes" / "ledger.db"))
        raise Crash

    tokens = [place.world.mint() for _ in range(2)]
    with fleet(place, tokens) as nodes:
        monkeypatch.setattr(module, "compose", die)
        with pytest.raises((Crash, BaseExceptionGroup)):
            asyncio.run(nodes.run())
    assert charged
    assert all(len(names) == 2 for names in charged)
    monkeypatch.setattr(module, "compose", lambda *_: pytest.fail("it must not play again"))
    with fleet(place, tokens) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 30))
    assert place.accepted == 0
    assert "2 tokens were charged by a process that was killed" in caplog.text


def die(*_: object) -> bytes:
    os._exit(9)


@pytest.mark.slow(3)
def test_a_fleet_whose_worker_is_killed_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compose", die)
    with fleet(place, [place.world.mint()]) as nodes:
        with pytest.raises(ExceptionGroup) as raised:
            asyncio.run(asyncio.wait_for(nodes.run(), 60))
        assert raised.group_contains(LostWorkersError, match="A worker has died")
        assert nodes.lost == 1


MANY = 40


@pytest.fixture
def many(place: Place) -> list[bytes]:
    """Tokens for a batch that is much larger than what a worker has at once."""
    place.abort()
    place.announce(0, 1, users=MANY)
    return [place.world.mint() for _ in range(MANY)]


def told_to_stop(
    place: Place, patch: pytest.MonkeyPatch, *signals: signal.Signals, ended: threading.Event | None = None
) -> None:
    """The fifth node of a fleet is sent signals while it plays; everybody's own charge is on disk by then."""
    played = itertools.count(1)

    def play(*given: Any) -> bytes:
        own = crypto.report_id(place.world.task, given[-1]).hex()
        assert any(own in name for name in releases(place.folder / "nodes" / "ledger.db"))
        if next(played) == 5:
            for number in signals:
                os.kill(os.getpid(), number)
            if ended is not None:
                assert ended.wait(30)
        return compose(*given)

    patch.setattr(module, "compose", play)


@pytest.mark.usefixtures("here")
def test_a_fleet_that_is_told_to_stop_finishes_who_was_charged_and_charges_no_others(
    place: Place, many: list[bytes], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_to_stop(place, monkeypatch, signal.SIGTERM)
    code, said = run_nodes(place, call, many)
    charged = releases(place.folder / "nodes" / "ledger.db")
    assert 5 <= len(charged) <= 2 + module.GROUP * 2
    assert (code, said["verdicts"]) == (0, {"accepted": len(charged)})
    assert (said["unused_tokens"], said["charged_without_report"]) == (MANY - len(charged), 0)
    monkeypatch.setattr(module, "compose", compose)
    code, said = run_nodes(place, call, many)
    assert (code, said["verdicts"]) == (0, {"accepted": MANY - len(charged)})
    assert place.accepted == MANY


@pytest.mark.usefixtures("here")
def test_tokens_that_were_charged_for_nothing_are_told_and_a_failure(
    place: Place, many: list[bytes], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told twice, a fleet ends at once."""
    ended = threading.Event()
    told_to_stop(place, monkeypatch, signal.SIGTERM, signal.SIGINT, ended=ended)
    monkeypatch.setattr(roles, "peak_memory", lambda _: ended.set())
    code, said = run_nodes(place, call, many)
    lost = said["charged_without_report"]
    kept = sum(said["verdicts"].values())
    assert lost >= 1
    assert len(releases(place.folder / "nodes" / "ledger.db")) >= lost + kept
    assert code == f"shufflerl: {lost} tokens were charged without a report: they have had their turn."


@pytest.mark.usefixtures("here")
def test_a_fleet_that_is_told_to_stop_keeps_what_it_cannot_deliver(
    place: Place, many: list[bytes], call: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unreachable(*_: Any, **__: Any) -> None:
        raise httpx2.ConnectError("no route")

    told_to_stop(place, monkeypatch, signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(httpx2.AsyncClient, "post", unreachable)
        code, said = run_nodes(place, call, many)
    charged = len(releases(place.folder / "nodes" / "ledger.db"))
    assert (code, said["verdicts"], said["charged_without_report"]) == (0, {}, 0)
    assert f"{charged} reports are not delivered; they are kept" in caplog.text
    with fleet(place, []) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 30))
        assert (nodes.verdicts, nodes.undelivered) == ({"accepted": charged}, 0)


@pytest.mark.usefixtures("here", "many")
def test_tokens_of_another_enrolment_are_found_out_before_most_are_charged(place: Place) -> None:
    false = [bytes([number]) * wire.TOKEN_BYTES for number in range(MANY)]
    with fleet(place, false, connections=2) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 30))
        assert nodes.verdicts == {"refused: unauthorized": 2}
        assert len(nodes.ledger.releases) == 2
        assert nodes.unused == MANY - 2


def run_nodes(place: Place, call: Call, tokens: list[bytes]) -> tuple[object, dict[str, Any]]:
    """The command itself: its exit code or message, and what it says."""
    place.invitation.save(place.folder / "invitation.toml")
    (place.folder / "tokens").write_text("".join(f"{token.hex()}\n" for token in tokens))
    (place.folder / "node.toml").write_text(f"""
invitation = "{place.folder}/invitation.toml"
tokens = "{place.folder}/tokens"
folder = "{place.folder}/nodes"
epsilon = 8.0
min_batch_size = 2
environment_parameters = {{ n_states = 2, horizon = 2 }}
""")
    code, said = call("node", str(place.folder / "node.toml"))
    return code, json.loads(said)


@pytest.mark.slow
def test_a_fleet_ends_with_the_run(place: Place, call: Call, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens that were not needed are told, and no failure: their users are not charged."""
    with fleet(place, [place.world.mint() for _ in range(2)]) as first:
        asyncio.run(first.run())
    finish = wire.encode(place.world.command(wire.Action.finish))
    scrubs = f"{place.invitation.shuffler}/v1/scrubs"
    until(lambda: httpx2.post(scrubs, content=finish, trust_env=False).status_code == 200)
    tokens = [place.world.mint() for _ in range(3)]
    with fleet(place, tokens) as nodes:
        asyncio.run(asyncio.wait_for(nodes.run(), 20))
        assert (nodes.verdicts, nodes.unused) == ({}, 3)
    code, said = run_nodes(place, call, tokens)
    assert (code, said["verdicts"], said["unused_tokens"]) == (0, {}, 3)
    assert caplog.messages == ["The run is over: 3 tokens were not needed; their users neither played nor spent."]
    with fleet(place, []) as left:
        assert len(left.ledger.releases) == 2


@pytest.mark.slow
def test_refused_reports_are_told_and_a_failure(place: Place, call: Call) -> None:
    """If the first tokens were all not issued here, the others are not tried: they would be charged for nothing."""
    false = [bytes([number]) * wire.TOKEN_BYTES for number in range(4)]
    code, said = run_nodes(place, call, false[:3])
    assert said["verdicts"] == {"refused: unauthorized": 2}
    assert code == (
        "shufflerl: 2 of 2 reports were refused (2 as unauthorized), 1 tokens are left. The token or signature is not "
        "valid here: see docs/errors/unauthorized.md."
    )
    code, said = run_nodes(place, call, [place.world.mint(), false[3]])
    assert said["verdicts"] == {"accepted": 1, "refused: unauthorized": 1}
    assert "1 of 2 reports were refused (1 as unauthorized), 0 tokens are left" in str(code)


@pytest.mark.slow
def test_nodes_say_that_they_wait_and_end_in_order_when_told_to(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("00" * wire.TOKEN_BYTES)
    pinned = ("--task", "00" * 16, "--coordinator-key", "11" * 32, "--shuffler-key", "22" * 32, "--epsilon", "1")
    where = ("--folder", str(tmp_path / "nodes"), "--tokens", str(tmp_path / "tokens"))
    nodes = subprocess.Popen(
        [sys.executable, "-m", "shufflerl", "node", *pinned, *where, "--shuffler", "http://127.0.0.1:9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert nodes.stderr is not None
        assert "There was no" in nodes.stderr.readline()
        told = nodes.stderr.readline()
        assert told.startswith("shufflerl: The shuffler at http://127.0.0.1:9 cannot be reached (")
        nodes.send_signal(signal.SIGTERM)
        said, more = nodes.communicate(timeout=PATIENCE)
    finally:
        nodes.kill()
    assert (nodes.returncode, more) == (0, "")
    assert json.loads(said)["verdicts"] == {}


def test_workers_can_be_nicer_than_their_role() -> None:
    with pool(1, niceness=3) as workers:
        assert workers.submit(os.nice, 0).result() == min(19, os.nice(0) + 3)


def test_who_ends_a_group_of_processes_leaves_workers_to_their_role() -> None:
    """Ctrl-C in a terminal, or `timeout`: a worker that died of it would take the reports of charged nodes with it."""
    with pool(1) as workers:
        assert workers.submit(os.getpgrp).result() != os.getpgrp()


def test_workers_end_with_their_role_even_if_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "role.py"
    script.write_text("""
import os, time
from shufflerl.network.web import contact
from shufflerl.network.workers import pool
if __name__ == "__main__":
    print(pool(1).submit(os.getpid).result(), flush=True)
    time.sleep(60)
""")
    role = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert role.stdout is not None
    worker = int(role.stdout.readline())
    role.kill()
    role.communicate()

    def gone() -> bool:
        try:
            return Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone)
