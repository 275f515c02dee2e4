"""The devices that docs/network.md shows and examples/ has: their very text takes part in a run of live servers."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from shufflerl import envs
from shufflerl.envs.gym import TabularEnv, device_env
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network import Invitation, Node, RunOverError, Terms
from shufflerl.network.coordinator.app import CoordinatorServer
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.run import Run
from shufflerl.network.demo import policy_text
from shufflerl.network.node.reporting import make_report, play
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.wire import Outcomes, Upload, Verdict
from shufflerl.network.shuffler.app import ShufflerServer
from shufflerl.network.stores.store import SQLiteStore
from shufflerl.policies import Network, describe
from shufflerl.privacy.accounting import Budget
from tests import pages
from tests.network.web.test_http import serving
from tests.support.network_world import World, new_identity
from tests.support.waiting import PATIENCE, until
from tests.test_cli import Call, call

__all__ = ["call"]
PAGE = Path(__file__).parents[3] / "docs" / "network.md"
EXAMPLE = PAGE.parents[1] / "examples" / "network" / "device.py"
USERS = 105
ENV = TabularEnv(riverswim(np.random.default_rng(0)))
#: One batch of what the page's device plays and accepts, as masked sums, which are quick to seal.
RUN = Run(
    ENV.mdp.problem(USERS),
    "optimistic",
    Budget(1.0, 1e-5),
    0,
    {"batches": 1, "first": USERS},
    transport="sums",
)


class Live:
    """A coordinator and a shuffler on loopback, and the users that the page's device is mixed with."""

    def __init__(self, world: World, coordinator: str, shuffler: str) -> None:
        self.world, self.coordinator, self.shuffler = world, coordinator, shuffler

    def status(self) -> dict[str, object]:
        said: dict[str, object] = httpx2.get(f"{self.coordinator}/v1/status", trust_env=False).json()
        return said

    def others(self, users: int, env: Any = ENV) -> None:
        """So many others take part in the batch that is open."""
        reports = []
        for _ in range(users):
            checked = self.world.checked()
            reports.append(make_report(checked, play(env, checked.agreement), self.world.mint()))
        path = f"{self.shuffler}/v1/tasks/{self.world.task.hex()}/reports"
        body = wire.encode(Upload(batch=0, attempt=0, reports=reports))
        answer = httpx2.post(path, content=body, trust_env=False, timeout=PATIENCE)
        assert {one.verdict for one in wire.decode(Outcomes, answer.content).outcomes} == {Verdict.accepted}


@contextmanager
def live(folder: Path, run: Run = RUN) -> Iterator[Live]:
    identity = SigningKey.load(folder / "coordinator" / "identity.pem")
    world = World(store=SQLiteStore(folder / "shuffler.db"))
    world.coordinator = identity
    world.restart()
    with serving(ShufflerServer(world.shuffler, world.store).app) as port:
        shuffler = f"http://127.0.0.1:{port}"
        server = CoordinatorServer(lambda: Coordinator(folder / "coordinator", run), shuffler, poll=0.05)
        with serving(server.app) as other:
            system = Live(world, f"http://127.0.0.1:{other}", shuffler)
            until(lambda: system.status()["shuffler_says"])
            world.task = bytes.fromhex(str(system.status()["task"]))
            yield system


@pytest.mark.slow
def test_the_device_of_the_page(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = (block for block in pages.blocks(PAGE.read_text()) if block.language in ("python", "text"))
    names: dict[str, Any] = {"__name__": "__main__"}
    monkeypatch.chdir(tmp_path)
    with live(tmp_path) as system:
        ask = ("invitation", "invitation.toml", "--at", system.coordinator)
        refused, _ = call(*ask, "--shuffler-key", str(new_identity().public))
        assert "not signed by the key" in str(refused)
        assert not Path("invitation.toml").exists()
        assert call(*ask, "--shuffler-key", str(system.world.identity.public))[0] == 0
        Path("token.txt").write_text(f"{system.world.mint().hex()}\n")
        system.others(USERS - 1)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * code.line + code.text, str(PAGE), "exec"), names)
        assert pages.same(shown.text, printed.getvalue())
        names["node"].close()
        until(lambda: system.status()["finished"])
        late = Node(ENV, Invitation.load("invitation.toml"), Terms(RUN.budget), system.world.mint(), "late")
        until(lambda: system.world.shuffler.status(system.world.task).state == "finished")
        with pytest.raises(RunOverError, match=r"The run is over: batch 0 was its last, .* neither played nor spent"):
            late.participate(timeout=PATIENCE)
        assert late.ledger.releases == []
        late.close()


@pytest.mark.slow
def test_the_device_of_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It balances a pole among others, and shows how what was learned can be read."""
    problem = envs.make("CartPole-v1").problem(USERS)
    run = Run(problem, "policy-search", RUN.budget, 0, {"first": USERS}, transport="sums")
    monkeypatch.chdir(tmp_path)
    with live(tmp_path, run) as system:
        keys = (system.world.coordinator.public, system.world.identity.public)
        Invitation(system.world.task, system.shuffler, *keys).save("invitation.toml")
        Path("token.txt").write_text(f"{system.world.mint().hex()}\n")
        with contextlib.closing(device_env("CartPole-v1")) as env:
            system.others(USERS - 1, env)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert printed.getvalue() == "Receipt(batch=0, verdict='accepted')\n"
        until(lambda: system.status()["finished"])
        deployed = httpx2.get(f"{system.coordinator}/v1/policy", trust_env=False).json()
    assert deployed["family"] == describe(Network(4, 2))
    assert np.shape(deployed["policies"]) == (len(deployed["weights"]), 5)
    text = policy_text(deployed).splitlines()
    assert text[0].startswith("A linear policy of 5 numbers, 4 to 1. It takes the action with the largest value")
    assert re.fullmatch(r"action 1:( [+-][\d.e-]+ x\d){4} [+-][\d.e-]+", text[1])


def test_an_invitation_is_the_same_in_texts_bytes_and_a_file(tmp_path: Path) -> None:
    keys = (new_identity().public, new_identity().public)
    made = Invitation(bytes(range(16)), "https://shuffler.example/", *keys)
    assert made == Invitation(bytes(range(16)).hex(), "https://shuffler.example", str(keys[0]), str(keys[1]))
    made.save(tmp_path / "invitation.toml")
    assert Invitation.load(str(tmp_path / "invitation.toml")) == made
    assert len((tmp_path / "invitation.toml").read_text()) < 500
    with pytest.raises(StorageError, match="cannot be written"):
        made.save(tmp_path / "missing" / "invitation.toml")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"task": "00"}, "The task is wrong; expected the 32 hexadecimal digits that `shufflerl status` gives"),
        ({"task": "zz" * 16}, "The task is wrong"),
        ({"task": 16}, "The task is wrong"),
        ({"shuffler": "not-a-url"}, "shuffler is 'not-a-url'; expected an address such as http"),
        ({"shuffler": "ftp://x"}, "expected an address"),
        ({"shuffler": "http://"}, "expected an address"),
        ({"shuffler": "http://x:port"}, "expected an address"),
        ({"shuffler": "http://a b"}, "expected an address"),
        ({"shuffler": 5}, "expected an address"),
        ({"coordinator_key": "00"}, "is not a public key"),
        ({"shuffler_key": b"raw"}, "is not a public key"),
    ],
)
def test_what_is_no_invitation(change: dict[str, object], text: str) -> None:
    values: dict[str, object] = {"task": "00" * 16, "shuffler": "http://x", "coordinator_key": "11" * 32}
    values |= {"shuffler_key": "22" * 32} | change
    with pytest.raises(InvalidInputError, match=text):
        Invitation(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "task = ", "task = '00'", "\xff", "a = 1\n"])
def test_what_is_no_file_of_an_invitation(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInputError, match="invitation"):
        Invitation.load(tmp_path / "file")


def test_what_is_no_token(tmp_path: Path) -> None:
    invitation = Invitation("00" * 16, "http://x", "11" * 32, "22" * 32)
    for token in ("", "zz" * wire.TOKEN_BYTES, "00" * (wire.TOKEN_BYTES - 1), b"0" * (wire.TOKEN_BYTES + 1)):
        with pytest.raises(InvalidInputError, match="The token is wrong; expected"):
            Node(ENV, invitation, Terms(RUN.budget), token, tmp_path)
    assert list(tmp_path.iterdir()) == []
