"""End to end over real processes: kills at every labelled point and at random moments lose and double nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
import pytest

from shufflerl.network import faults
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import parse_announcement
from shufflerl.network.protocol.wire import Signed, Upload
from tests.network.stores.test_store import left_of
from tests.support.network_processes import Crowd, Processes, processes
from tests.support.waiting import PATIENCE, telling, until

pytestmark = pytest.mark.slow(8)

RECORDING = Path(__file__).parents[2] / "support" / "recording"


def finish(system: Processes, crowd: Crowd) -> None:
    def over() -> bool:
        crowd.step()
        return bool(system.ask("/v1/status")["finished"])

    until(over)
    crowd.check(system.ask("/v1/batches")["batches"])


def ledger_of(system: Processes) -> list[str]:
    with closing(sqlite3.connect(system.folder / "coordinator" / "ledger.db")) as db:
        return [name for (name,) in db.execute("SELECT name FROM releases ORDER BY number")]


@pytest.mark.parametrize(("name", "noise"), [("shuffler", "servers"), ("coordinator", "users")])
def test_killed_at_every_labelled_point(tmp_path: Path, name: str, noise: str) -> None:
    labels = list(("dummies", *faults.SHUFFLER_LABELS) if name == "shuffler" else faults.COORDINATOR_LABELS)
    with processes(tmp_path, episodes=80, noise=noise) as system:
        system.start("shuffler", labels.pop(0) if name == "shuffler" else "")
        said = system.start("coordinator")
        if name == "coordinator":
            system.kill("coordinator")
            system.start("coordinator", labels.pop(0))
        crowd = Crowd(system, bytes.fromhex(said["task"]))
        while True:
            until(lambda: crowd.step() and system.died(name))
            if not labels:
                break
            system.start(name, labels.pop(0))
        system.start(name)
        finish(system, crowd)
        batches = len(system.ask("/v1/batches")["batches"])
        assert system.client.get(f"{system.at('shuffler')}/readyz").status_code == 200
    assert ledger_of(system) == [f"batch {number}" for number in range(batches)]


def test_masked_sums_survive_kills_between_seal_and_release(tmp_path: Path) -> None:
    """`test_summing` and `test_opening` crash at every label; here real processes die where most is at stake."""
    with processes(tmp_path, episodes=40, transport="sums", noise="servers") as system:
        system.start("shuffler", "seeds")
        crowd = Crowd(system, bytes.fromhex(system.start("coordinator", "seeds opened")["task"]))
        for name, next_label in (
            ("shuffler", "noise"),
            ("coordinator", "excluded"),
            ("shuffler", ""),
            ("coordinator", ""),
        ):
            until(partial(lambda name: crowd.step() and system.died(name), name))
            system.start(name, next_label)
        finish(system, crowd)
        batches = system.ask("/v1/batches")["batches"]
        assert {batch["transport"] for batch in batches} == {"sums"}
    assert ledger_of(system) == [f"batch {number}" for number in range(len(batches))]


def test_killed_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(2)
    with processes(tmp_path, episodes=120) as system:
        system.start("shuffler")
        crowd = Crowd(system, bytes.fromhex(system.start("coordinator")["task"]))
        for _ in range(4):
            name = chance.choice(["shuffler", "coordinator"])
            deadline = time.monotonic() + 0.3 * chance.random()
            while time.monotonic() < deadline:
                crowd.step()
            system.kill(name)
            system.start(name)
        finish(system, crowd)
        batches = len(system.ask("/v1/batches")["batches"])
        until(lambda: crowd.status().state == "finished")
        secrets = [report.envelope for upload in crowd.all for report in upload.reports]
        ids = [report.report_id for upload in crowd.all for report in upload.reports]
    assert ledger_of(system) == [f"batch {number}" for number in range(batches)]
    # After the last scrub no byte of any report is on the shuffler's disk; the coordinator's never held an id.
    assert left_of(secrets, tmp_path / "shuffler") == []
    assert left_of(ids, tmp_path / "coordinator", 16) == []
    logs = (tmp_path / "shuffler.log").read_text() + (tmp_path / "coordinator.log").read_text()
    assert not any(report.hex() in logs for report in ids)
    assert "127.0.0.1:" not in "".join(line for line in logs.splitlines() if "report" in line)


def test_replays_across_batches_and_runs_are_refused(tmp_path: Path) -> None:
    with processes(tmp_path, episodes=60) as system:
        system.start("shuffler")
        crowd = Crowd(system, bytes.fromhex(system.start("coordinator")["task"]))
        waits = re.compile(r"waits for users: 0 of 3 reports are in, 3 are missing\. In \d+ min its time is up\.")
        until(lambda: waits.search(system.ask("/v1/status")["why"]))
        until(lambda: len(crowd.step().answered) >= 2)
        old = crowd.all[0]
        status = crowd.status()
        reasons = []
        for batch in (old.batch, status.batch):
            (outcome,) = crowd.outcomes(Upload(batch=batch, attempt=0, reports=old.reports))
            assert outcome.problem is not None
            reasons.append(outcome.problem.type.rpartition(":")[2])
        assert reasons[0] == "replayed"
        assert reasons[1] in ("malformed", "undecryptable", "replayed")
        crowd.task = bytes(16)
        (outcome,) = crowd.outcomes(old)
        assert outcome.problem is not None
        assert outcome.problem.type.endswith("unknown-batch")


def _gone(pages: list[str]) -> None:
    for page in pages:
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(page, trust_env=False)


def test_a_demonstration_that_is_told_to_end_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shufflerl", "demo", "--users", "100000", "--folder", str(tmp_path)]
    demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with telling(tmp_path):
            assert demo.stderr is not None
            pages = re.findall(r"http://127\.0\.0\.1:\d+/", demo.stderr.readline() + demo.stderr.readline())
            assert [httpx2.get(page, trust_env=False).status_code for page in pages] == [200, 200]
            demo.terminate()
            assert demo.wait(PATIENCE) == 128 + signal.SIGTERM
            _gone(pages)
    finally:
        demo.kill()
        demo.communicate()


def test_the_demonstration(tmp_path: Path) -> None:
    """The command itself, with fleets and workers; what the fleet sent is what the coordinator counted.

    Its pages are there while it runs and stay until they are told to end.
    """
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "shufflerl", "demo", "--users", "60", "--env", "riverswim", "--epsilon", "8"]
    command += ["--noise", "users"]
    demo = subprocess.Popen(
        [*command, "--json", "--keep", "--folder", str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{RECORDING}:{os.environ.get('PYTHONPATH', '')}", "RECORDING": str(record)},
    )
    try:
        with telling(tmp_path):
            assert demo.stdout is not None
            assert demo.stderr is not None
            assert "Starting" in demo.stderr.readline()
            said = demo.stderr.readline()
            pages = re.findall(r"http://127\.0\.0\.1:\d+/", said)
            assert len(pages) == 2, said
            assert "<title>shufflerl coordinator" in httpx2.get(pages[0], trust_env=False).text
            figures = json.loads(demo.stdout.readline())
            assert "Ctrl-C" in demo.stderr.readline()
            assert httpx2.get(f"{pages[0]}v1/status", trust_env=False).json()["finished"]
            assert "<title>shufflerl shuffler" in httpx2.get(pages[1], trust_env=False).text
            demo.send_signal(signal.SIGINT)
            _, said = demo.communicate(timeout=PATIENCE)
            assert demo.returncode == 0, said
            _gone(pages)
    finally:
        demo.kill()
        demo.communicate()
    assert figures["verdicts"] == {"accepted": 60}
    assert figures["saw"]["shuffler"]["reports"] == 60
    assert figures["value"]["random"] < figures["value"]["optimal"]
    assert figures["certificate"]["epsilon"] <= 8.0
    kept: dict[str, dict[int, Counter[int]]] = {"true": {}, "sent": {}}
    for one in map(json.loads, record.read_text().splitlines()):
        for which, batches in kept.items():
            batches.setdefault(one["batch"], Counter()).update(one[which])
    with closing(sqlite3.connect(tmp_path / "demo" / "coordinator" / "coordinator.db")) as db:
        rows = {
            number: (noisy, said)
            for number, noisy, said in db.execute("SELECT number, noisy, announcement FROM batches")
        }
    assert sum(sum(counts.values()) for counts in kept["sent"].values()) == figures["saw"]["coordinator"]["messages"]
    for batch in figures["batches"]:
        true, sent = (kept[which][batch["batch"]] for which in ("true", "sent"))
        noisy, said = rows[batch["batch"]]
        query = parse_announcement(wire.decode(Signed, said).payload).batch.query  # a learner may leave counters out
        assert sum(true.values()) == query.touched_counters * batch["users"]
        assert sum(sent.values()) == batch["messages"]
        assert all(sent[tag] >= count for tag, count in true.items())
        counted = np.frombuffer(noisy) + batch["noise_sd"] ** 2
        assert {tag: count for tag, count in enumerate(counted.round(6)) if count} == sent
    assert set(figures["peak_mb"]) == {"shuffler", "coordinator", "fleet"}
