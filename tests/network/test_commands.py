"""The commands of the network: settings, keys, tokens, and answers that say what to do."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from shufflerl.errors import InvalidInputError, MissingExtraError, StateMismatchError
from shufflerl.mdp import Problem
from shufflerl.network import check_installed, demo, logs, roles
from shufflerl.network.config import CoordinatorConfig, NodeConfig, ShufflerConfig, address, read
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node.reporting import Invitation
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.crypto import SigningKey, VerifyKey, enrolled
from shufflerl.network.web import http
from shufflerl.privacy.accounting import Budget
from tests.test_cli import Call, call

EXAMPLES = Path(__file__).parents[2] / "examples" / "network"
__all__ = ["call"]


def test_the_examples_are_settings() -> None:
    shuffler = read(ShufflerConfig, EXAMPLES / "shuffler.toml")
    assert shuffler.limits.min_batch_size == 100
    run = read(CoordinatorConfig, EXAMPLES / "coordinator.toml").run
    assert isinstance(run.problem, Problem)
    assert (run.problem.n_states, run.problem.episodes, run.budget.epsilon) == (4, 20_000, 1.0)
    run.make_learner()
    node = read(NodeConfig, EXAMPLES / "node.toml")
    assert node.terms.budget == run.budget
    with pytest.raises(InvalidInputError, match="an example's zeros are to be replaced"):
        Invitation.load(EXAMPLES / str(node.invitation))


def test_every_setting_is_in_an_example_with_its_default_or_a_choice() -> None:
    for kind, name in ((ShufflerConfig, "shuffler"), (CoordinatorConfig, "coordinator"), (NodeConfig, "node")):
        text = (EXAMPLES / f"{name}.toml").read_text()
        assert [field for field in kind.__struct_fields__ if field not in text] == []


def test_every_setting_of_a_run_arrives() -> None:
    """From a file and from the command line: one that is dropped leaves the run as it was."""
    told: dict[str, Any] = {
        "delta": 1e-6,
        "noise": "users",
        "transport": "sums",
        "excludable": 0.02,
        "admission": 3.0,
        "learner": "ucbvi",
        "learner_parameters": {"batch": 5},
        "seed": 9,
    }
    plain: dict[str, Any] = {"episodes": 10, "epsilon": 1.0, "environment": "riverswim"}
    for name, value in told.items():
        assert read(CoordinatorConfig, None, **plain, **{name: value}).run != read(CoordinatorConfig, None, **plain).run
    run = read(CoordinatorConfig, None, **plain, **told, honest_fraction=0.9, enrolled=12).run
    assert run == Run(
        run.problem, "ucbvi", Budget(1.0, 1e-6), 9, {"batch": 5}, 0.9, "sums", 0.02, "users", admission=3.0, enrolled=12
    )
    assert {field.name for field in fields(Run)} - set(told) == {"problem", "budget", "honest_fraction", "enrolled"}
    assert run.drawn(1, 0, 0) == 0.25


def test_the_command_line_wins_over_the_file() -> None:
    assert read(ShufflerConfig, EXAMPLES / "shuffler.toml", min_batch_size=7, listen=None).min_batch_size == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_batch_size = 'many'", "Expected `int`"),
        ("min_size = 5", "unknown field `min_size`"),
        ("a = ", "cannot be read"),
        ("", "missing required field `coordinator_key`"),
        ("coordinator_key = 'x'\nwhen_late = 'release'", "Invalid enum value"),
    ],
)
def test_wrong_settings_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.toml").write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read(ShufflerConfig, tmp_path / "file.toml")


def test_wrong_values_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read(ShufflerConfig, tmp_path / "missing.toml")
    with pytest.raises(InvalidInputError, match="host:port"):
        address("8741")
    assert address("[::1]:80") == ("::1", 80)
    with pytest.raises(InvalidInputError, match="either"):
        _ = read(CoordinatorConfig, None, episodes=10, epsilon=1.0).run
    shape = {"horizon": 2, "states": 3, "actions": 2}
    shaped = read(CoordinatorConfig, None, episodes=10, epsilon=1.0, shape=shape).run
    assert shaped.problem.fingerprint == Problem(2, 3, 2, 10).fingerprint
    for text, message in ((None, "No such file"), ("", "has no tokens"), ("00\n", "Line 1 of .* is wrong")):
        if text is not None:
            (tmp_path / "tokens").write_text(text)
        with pytest.raises(InvalidInputError, match=f"{message}.*`shufflerl tokens`"):
            NodeConfig(epsilon=1.0, tokens=str(tmp_path / "tokens")).read_tokens()
    for wrong in ({"workers": 0}, {"poll_seconds": 0.0}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            read(CoordinatorConfig, None, episodes=10, epsilon=1.0, **wrong)
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            read(NodeConfig, None, epsilon=1.0, **wrong)


def test_a_node_is_invited_by_a_file_or_setting_by_setting(tmp_path: Path) -> None:
    path, key = str(tmp_path / "invitation.toml"), "11" * 32
    texts: dict[str, Any] = {"task": "00" * 16, "coordinator_key": key, "shuffler_key": "22" * 32}
    one_by_one = NodeConfig(epsilon=1.0, **texts).read_invitation()
    assert one_by_one.shuffler == "http://127.0.0.1:8742"
    one_by_one.save(path)
    assert NodeConfig(epsilon=1.0, invitation=path).read_invitation() == one_by_one
    wrongs: list[dict[str, Any]] = [{}, {"task": "00" * 16}, {"invitation": path, "shuffler": "http://x"}]
    for wrong in (*wrongs, {"invitation": path, **texts}):
        with pytest.raises(InvalidInputError, match="Give either `invitation`"):
            NodeConfig(epsilon=1.0, **wrong).read_invitation()


def test_keys_and_tokens(tmp_path: Path, call: Call) -> None:
    first, again = (call("keys", str(tmp_path / "role")) for _ in range(2))
    assert first == again == (0, f"{SigningKey.load(tmp_path / 'role' / 'identity.pem').public}\n")
    code, text = call("keys", "--enrolment", str(tmp_path / "desk"))
    assert code == 0
    assert call("tokens", str(tmp_path / "desk"), str(tmp_path / "tokens.txt"), "--count", "3")[0] == 0
    lines = (tmp_path / "tokens.txt").read_text().split()
    assert len(set(lines)) == 3
    assert all(enrolled(VerifyKey.from_text(text.strip()), bytes.fromhex(line)) for line in lines)


def test_tokens_of_a_mistyped_folder_are_refused_and_nothing_is_made(tmp_path: Path, call: Call) -> None:
    (tmp_path / "role").mkdir()
    for folder in ("role", "rolle"):
        assert "no enrolment key" in str(call("tokens", str(tmp_path / folder), str(tmp_path / "tokens.txt"))[0])
    assert [path.name for path in tmp_path.rglob("*")] == ["role"]


def test_an_environment_that_there_is_not_is_refused_at_the_door(tmp_path: Path, call: Call) -> None:
    node = ("node", "--epsilon", "1", "--folder", str(tmp_path / "node"))
    assert "no environment 'nope'" in str(call(*node, "--environment", "nope")[0])
    (tmp_path / "node.toml").write_text("epsilon = 1.0\nenvironment_parameters = { n_stats = 3 }\n")
    assert "has no parameter 'n_stats'" in str(call("node", str(tmp_path / "node.toml"))[0])
    assert not (tmp_path / "node").exists()


def test_a_role_without_its_settings_says_so(call: Call) -> None:
    assert "coordinator_key" in str(call("shuffler")[0])
    assert "episodes" in str(call("coordinator")[0])
    assert "epsilon" in str(call("node")[0])
    assert "shufflerl invitation" in str(call("node", "--epsilon", "1")[0])


def test_what_does_not_start_says_why_before_anything_is_made(tmp_path: Path, call: Call) -> None:
    where, key = ("--folder", str(tmp_path / "role")), "11" * 32
    run = ("coordinator", "--environment", "riverswim", "--episodes", "100", "--epsilon", "1")
    nodes = ("node", "--epsilon", "1", "--task", "00" * 16, "--coordinator-key", key, "--shuffler-key", key)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = ("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        for role in (run, ("shuffler", "--coordinator-key", key)):
            assert "shufflerl: Nothing can listen at 127.0.0.1:" in str(call(*role, *where, *listen)[0])
    (tmp_path / "tokens").write_text("00" * wire.TOKEN_BYTES)
    free = ("--listen", "127.0.0.1:0")
    for command in ((*run, *free), (*nodes, "--tokens", str(tmp_path / "tokens"))):
        code = call(*command, *where, "--shuffler", "not-a-url")[0]
        assert code == "shufflerl: shuffler is 'not-a-url'; expected an address such as http://127.0.0.1:8742."
    assert not (tmp_path / "role").exists()


@pytest.mark.parametrize("name", ["shuffler", "coordinator"])
def test_a_folder_without_its_identity_is_refused(tmp_path: Path, call: Call, name: str) -> None:
    (tmp_path / f"{name}.db").touch()
    options = {
        "shuffler": ("--coordinator-key", "11" * 32),
        "coordinator": ("--environment", "riverswim", "--episodes", "100", "--epsilon", "1"),
    }[name]
    for command in ((name, *options, "--folder", str(tmp_path), "--listen", "127.0.0.1:0"), ("keys", str(tmp_path))):
        assert f"has {name}.db but no identity.pem" in str(call(*command)[0])
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.db"]


def test_a_shuffler_whose_enrolment_key_is_lost_is_not_given_another(tmp_path: Path, call: Call) -> None:
    """Every token that is out would be worthless, without a word."""
    SigningKey.load(tmp_path / "identity.pem")
    (tmp_path / "shuffler.db").touch()
    shuffler = ("shuffler", "--coordinator-key", "11" * 32, "--folder", str(tmp_path), "--listen", "127.0.0.1:0")
    for command in (shuffler, ("keys", "--enrolment", str(tmp_path))):
        assert "has shuffler.db but no enrolment.pem" in str(call(*command)[0])


@pytest.mark.parametrize(
    ("role", "made"),
    [
        (("shuffler", "--coordinator-key", "11" * 32, "--listen", "127.0.0.1:0"), ["identity.pem", "enrolment.pem"]),
        (
            (
                "coordinator",
                "--environment",
                "riverswim",
                "--episodes",
                "100",
                "--epsilon",
                "1",
                "--listen",
                "127.0.0.1:0",
            ),
            ["identity.pem", "ledger.db"],
        ),
        (
            (
                "node",
                "--epsilon",
                "1",
                "--task",
                "00" * 16,
                "--coordinator-key",
                "11" * 32,
                "--shuffler-key",
                "22" * 32,
            ),
            ["ledger.db"],
        ),
        (("keys",), ["identity.pem"]),
    ],
    ids=lambda value: value[0],
)
def test_what_is_made_in_a_new_folder_is_told_once(
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: tuple[str, ...],
    made: list[str],
) -> None:
    """In a mistyped folder a role would be somebody else, or have spent nothing, without a word."""

    async def nothing(*_: object) -> None:
        pass

    async def begin_and_end(app: Starlette) -> None:
        async with app.router.lifespan_context(app):
            pass

    monkeypatch.setattr(roles, "_until_stopped", nothing)
    monkeypatch.setattr(http, "serve", lambda app, *_: asyncio.run(begin_and_end(app)))
    monkeypatch.setattr(logs, "to_standard_error", lambda: None)  # caplog listens instead
    (tmp_path / "tokens").write_text("00" * wire.TOKEN_BYTES)
    folder, options = tmp_path / "role", ("--tokens", str(tmp_path / "tokens")) if role[0] == "node" else ()
    where = (str(folder),) if role[0] == "keys" else ("--folder", str(folder))
    for _ in range(2):
        assert call(*role, *where, *options)[0] in (0, None)
    assert caplog.messages == [f"There was no {folder / name}: a new one is made." for name in made]


def test_keys_says_nothing_was_made_where_it_refuses(
    tmp_path: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shuffler.db").touch()
    assert "no identity.pem" in str(call("keys", str(tmp_path))[0])
    assert caplog.messages == []


def test_status_of_nobody(call: Call) -> None:
    for command in ("status", "policy"):
        assert "is it running" in str(call(command, "--at", "http://127.0.0.1:9")[0])


STATUS = {
    "task": "00" * 16,
    "learner": "sdp-pe",
    "episodes": 100,
    "episodes_played": 33,
    "epsilon_spent": 0.90001,
    "epsilon_budget": 1.0,
    "delta": 1e-5,
    "noise": "servers",
    "transport": "sums",
    "transport_costs": "a report costs much",
    "messages": 1234,
    "invalid_messages": 0,
    "why": "Batch 1 waits for users: 5 of 40 reports are in, 35 are missing.",
}
POLICY = {
    "episodes_played": 33,
    "family": {"family": "table", "horizon": 1, "states": 2},
    "weights": [0.25, 0.75],
    "policies": [[[0, 1]], [[1, 1]]],
}


class Canned(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(STATUS if self.path == "/v1/status" else POLICY).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Elsewhere(Canned):
    """A server that is no coordinator."""

    answers = ((200, b"<html>"), (200, b"[]"), (404, b"no"), (404, b'{"detail": "This is a shuffler."}'))
    answer = answers[0]

    def do_GET(self) -> None:
        status, body = self.answer
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_status_and_policy(call: Call) -> None:
    server = HTTPServer(("127.0.0.1", 0), Canned)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        at = ("--at", f"http://127.0.0.1:{server.server_port}/")
        code, text = call("status", *at)
        assert code == 0
        assert "35 are missing" in text
        assert "33 of 100" in text
        assert "epsilon 0.9001 of 1 spent" in text
        assert "travel as sums, noise by servers; a report costs much" in text
        assert json.loads(call("status", *at, "--json")[1]) == STATUS
        code, text = call("policy", *at)
        assert "step 1: 1 1" in text
        assert "75%" in text
        assert json.loads(call("policy", *at, "--json")[1]) == POLICY
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_an_address_where_no_coordinator_is(call: Call) -> None:
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    at = f"http://127.0.0.1:{server.server_port}"
    try:
        for command in (("status",), ("policy",), ("invitation", "unwritten", "--shuffler-key", "22" * 32)):
            for answer in Elsewhere.answers:
                Elsewhere.answer = answer
                code = str(call(*command, "--at", at)[0])
                said = "is no coordinator" if answer[1][:1] != b"{" else "refuses: This is a shuffler"
                assert said in code
                assert at in code
            assert "--at is 'nowhere'; expected an address" in str(call(*command, "--at", "nowhere")[0])
            assert "does not answer" in str(call(*command, "--at", "http://127.0.0.1:9")[0])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not Path("unwritten").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"shufflerl\[network\]"):
        check_installed()


def test_the_demonstration_is_told() -> None:
    figures = {
        "users": 5000,
        "learner": "sdp-pe",
        "environment": "spectrum",
        "noise": "servers",
        "batches": [
            {"transport": "tags", "messages": 99},
            {"transport": "sums", "messages": 20},
            {"transport": "sums", "messages": 30},
        ],
        "seconds": 60.0,
        "reports_per_second": 83.0,
        "policy": POLICY,
        "value": {"learned": 3.0, "random": 1.0, "optimal": 4.0},
        "certificate": {"text": "THE CERTIFICATE"},
        "saw": {"shuffler": {"reports": 5000, "bytes": 2e6}, "coordinator": {"messages": 149}},
        "peak_mb": {"shuffler": 100.0, "coordinator": None},
    }
    text = demo.as_text(figures)
    for part in ("5,000 users", "67% of the way", "THE CERTIFICATE", "not one origin", "shuffler 100 MB"):
        assert part in text
    assert (
        "99 messages in random order, users' and dummies alike; 50 random seeds of masks in random order and 2 sums"
        in text
    )


def test_a_role_does_not_move_in_with_another(tmp_path: Path, call: Call) -> None:
    """One folder with both would have one identity and hold tags beside origins."""
    for name in ("shuffler", "coordinator"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.db").touch()
    shuffler = ("shuffler", "--folder", str(tmp_path / "coordinator"), "--coordinator-key", "11" * 32)
    run = ("--environment", "riverswim", "--episodes", "100", "--epsilon", "1")
    assert "folder of a coordinator" in str(call(*shuffler)[0])
    assert "folder of a shuffler" in str(call("coordinator", "--folder", str(tmp_path / "shuffler"), *run)[0])


def test_tokens_are_not_written_over_others(tmp_path: Path, call: Call) -> None:
    out = str(tmp_path / "tokens.txt")
    call("keys", "--enrolment", str(tmp_path / "role"))
    assert call("tokens", str(tmp_path / "role"), out)[0] == 0
    assert "is there already and is not written over" in str(call("tokens", str(tmp_path / "role"), out)[0])


def test_transports_are_compared(call: Call) -> None:
    large = ("--epsilon", "1", "--horizon", "10", "--states", "100", "--actions", "10")
    few, many = (json.loads(call("transport", *large, "--users", users, "--json")[1]) for users in ("1000", "1000000"))
    assert (few["cheaper"], many["cheaper"]) == ("sums", "tags")
    assert 1000 < few["tags_cheaper_from_users"] == many["tags_cheaper_from_users"] <= 1_000_000
    code, text = call("transport", *large)
    assert code == 0
    assert f"Tags are so from {few['tags_cheaper_from_users']:,} users on" in text
    assert "bound what one user can falsify" in text
    assert "masked sums end at 2^31" in str(call("transport", "--epsilon", "1", "--users", str(2**31))[0])


def test_a_shuffler_does_not_leave_its_file_for_servers(tmp_path: Path) -> None:
    """They would not know which tokens are spent."""
    for name in ("identity.pem", roles.ENROLMENT):
        SigningKey.load(tmp_path / name)
    (tmp_path / "shuffler.db").touch()
    config = ShufflerConfig(
        coordinator_key="0" * 64, folder=str(tmp_path), store="nats://127.0.0.1:1", listen="127.0.0.1:0"
    )
    with pytest.raises(StateMismatchError, match="spent tokens"):
        roles.run_shuffler(config)


def test_a_store_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shufflerl.network.stores.nats_store", None)
    config = ShufflerConfig(
        coordinator_key="0" * 64, folder=str(tmp_path), store="nats://127.0.0.1:1", listen="127.0.0.1:0"
    )
    with pytest.raises(MissingExtraError, match=r"shufflerl\[nats\]"):
        roles.run_shuffler(config)
