"""Real processes of the network on loopback, for tests: started here, ended here, by their own ids."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np

from shufflerl.arrays import IntArray
from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import LostWorkersError
from shufflerl.network.node.reporting import Invitation, check_signatures, play, randomize_episode, seal_report
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.wire import BatchStatus, OpenBatch, Outcome, Outcomes, Report, State, Upload, Verdict
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, telling
from tests.support.warm import WarmRole

MDP = riverswim(np.random.default_rng(0), n_states=2, horizon=2)
#: The run of most tests: small batches of a tiny problem. With this much epsilon few noise tags are needed.
RUN = """
episodes = {episodes}
epsilon = 8.0
environment = "riverswim"
environment_parameters = {{ n_states = 2, horizon = 2 }}
learner = "sdp-pe"
learner_parameters = {{ first = 1 }}
transport = "{transport}"
noise = "{noise}"
poll_seconds = 0.02
"""


class Processes:
    """A shuffler and a coordinator that come back on the same ports when they are started again."""

    def __init__(
        self,
        folder: Path,
        *,
        episodes: int = 60,
        transport: str = "tags",
        noise: str = "users",
        shuffler_options: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.ports = {"shuffler": free_port(), "coordinator": free_port()}
        self.roles: dict[str, WarmRole] = {}
        self.keys = {name: SigningKey.load(folder / name / "identity.pem").public for name in self.ports}
        self.enrolment = SigningKey.load(folder / "shuffler" / "enrolment.pem")
        (folder / "run.toml").write_text(RUN.format(episodes=episodes, transport=transport, noise=noise))
        self._shuffler_options = shuffler_options
        self.client = httpx2.Client(timeout=PATIENCE, trust_env=False)

    def mint(self) -> bytes:
        return crypto.mint(self.enrolment)

    def start(self, name: str, crash_at: str = "") -> dict[str, Any]:
        common = ("--folder", str(self.folder / name), "--listen", f"127.0.0.1:{self.ports[name]}")
        arguments = {
            "shuffler": ("--coordinator-key", str(self.keys["coordinator"]), "--min-batch-size", "1"),
            "coordinator": (str(self.folder / "run.toml"), "--shuffler", self.at("shuffler")),
        }[name]
        extra = self._shuffler_options if name == "shuffler" else ()
        self.roles[name] = WarmRole(
            name, self.folder, *arguments, *common, *extra, environment={"SHUFFLERL_CRASH_AT": crash_at}
        )
        return self.heard(name, crash_at)

    def heard(self, name: str, crash_at: str = "") -> dict[str, Any]:
        """What a process says when it listens."""
        try:
            return self.roles[name].heard()
        except LostWorkersError:
            if not crash_at:
                raise
            return {}  # it died before it could say that it listens

    def kill(self, name: str) -> None:
        """As if the power were cut; it may be over already, where it was told to crash."""
        with suppress(ProcessLookupError):
            os.kill(self.roles[name].process.pid, signal.SIGKILL)
        self.roles[name].process.wait()
        self.roles[name].stop()

    def died(self, name: str) -> bool:
        if self.roles[name].process.poll() is None:
            return False
        self.roles[name].stop()
        return True

    def at(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def ask(self, path: str) -> Any:
        return self.client.get(f"{self.at('coordinator')}{path}").json()

    def stop(self) -> None:
        for role in self.roles.values():
            role.stop()
        self.client.close()


@contextmanager
def processes(folder: Path, **options: Any) -> Iterator[Processes]:
    system = Processes(folder, **options)
    try:
        with telling(folder):
            yield system
    finally:
        system.stop()


class Crowd:
    """Users, each with a token of its own; what they sent is known exactly, and sent again until it has a verdict."""

    def __init__(self, system: Processes, task: bytes) -> None:
        self.system = system
        self.task = task
        self.invitation = Invitation(task, system.at("shuffler"), system.keys["coordinator"], system.keys["shuffler"])
        self.env = TabularEnv(MDP)
        self.true: dict[int, IntArray] = {}
        self.sent: dict[int, IntArray] = {}
        self.waiting: list[Upload] = []
        self.answered: set[tuple[int, int]] = set()
        self.all: list[Upload] = []

    def status(self) -> BatchStatus:
        answer = self.system.client.get(f"{self.system.at('shuffler')}/v1/tasks/{self.task.hex()}/status")
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=BatchStatus)

    def batch(self) -> OpenBatch:
        answer = self.system.client.get(f"{self.system.at('shuffler')}/v1/tasks/{self.task.hex()}/batch")
        answer.raise_for_status()
        return wire.decode(OpenBatch, answer.content)

    def report(self, batch: OpenBatch, token: bytes | None = None) -> Report:
        """A user plays and reports."""
        checked = check_signatures(self.invitation, batch)
        agreed = checked.agreement
        episode = play(self.env, agreed)
        tags = randomize_episode(agreed, episode)
        size = agreed.query.size
        for counts, these in ((self.true, agreed.query.tags(episode)[0]), (self.sent, tags)):
            np.add.at(counts.setdefault(agreed.batch.index, np.zeros(size, dtype=np.int64)), these, 1)
        return seal_report(checked, tags, token or self.system.mint())

    def post(self, upload: Upload | bytes) -> httpx2.Response:
        content = upload if isinstance(upload, bytes) else wire.encode(upload)
        return self.system.client.post(
            f"{self.system.at('shuffler')}/v1/tasks/{self.task.hex()}/reports", content=content
        )

    def outcomes(self, upload: Upload) -> list[Outcome]:
        answer = self.post(upload)
        answer.raise_for_status()
        return wire.decode(Outcomes, answer.content).outcomes

    def step(self) -> Crowd:
        """Answer a new batch with exactly as many users as it asks; go on with what has no verdict yet."""
        try:
            status = self.status()
            if status.state == State.open and (status.batch, status.attempt) not in self.answered:
                batch = self.batch()
                number, attempt = status.batch, status.attempt
                self.answered.add((number, attempt))
                for _ in range(status.users):
                    report = self.report(batch)
                    self.waiting.append(Upload(batch=number, attempt=attempt, reports=[report]))
            while self.waiting:
                (outcome,) = self.outcomes(self.waiting[0])
                taken = outcome.verdict in (Verdict.accepted, Verdict.duplicate)
                assert taken or (outcome.problem is not None and outcome.problem.type.endswith("replayed"))
                self.all.append(self.waiting.pop(0))
        except httpx2.HTTPError:
            pass  # the shuffler is down; later
        return self

    def check(self, batches: list[dict[str, Any]]) -> None:
        """Released counts are the true counts plus the noise drawn: nothing lost, nothing counted twice.

        What the servers have drawn nobody else knows: twelve deviations of Laplace noise come once in ten million.
        """
        assert [one["batch"] for one in batches] == sorted(self.sent)
        for one in batches:
            sent = self.sent[one["batch"]]
            noise = sent - self.true[one["batch"]]
            assert one["invalid_messages"] == 0
            if one["noise"] == "servers":
                assert (noise == 0).all()
                assert (np.abs(one["noisy_counts"] - sent) < 12 * one["noise_sd"]).all()
                assert one["messages"] >= (one["users"] if one["transport"] == "sums" else sent.sum())
                continue
            assert (noise >= 0).all()
            # Exactly what was sent, less its expectation: one message more or less would be off by one.
            np.testing.assert_allclose(one["noisy_counts"], sent - one["noise_sd"] ** 2, rtol=0, atol=1e-6)
            assert one["messages"] == (one["users"] if one["transport"] == "sums" else sent.sum())
