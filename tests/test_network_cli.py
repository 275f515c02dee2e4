"""The commands of the network: settings, keys, tokens, and answers that say what to do."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shufflerl.errors import InvalidInputError, MissingExtraError, StateMismatchError
from shufflerl.network import check_installed, demo, roles
from shufflerl.network.config import CoordinatorConfig, NodeConfig, ShufflerConfig, address, read
from shufflerl.network.crypto import SigningKey, VerifyKey, enrolled
from tests.test_cli import Call, call

EXAMPLES = Path(__file__).parent.parent / "examples" / "network"
__all__ = ["call"]


def test_the_examples_are_settings() -> None:
    shuffler = read(ShufflerConfig, EXAMPLES / "shuffler.toml")
    assert shuffler.limits.min_batch_size == 100
    run = read(CoordinatorConfig, EXAMPLES / "coordinator.toml").run
    assert (run.problem.n_states, run.problem.episodes, run.budget.epsilon) == (4, 20_000, 1.0)
    run.make_learner()
    node = read(NodeConfig, EXAMPLES / "node.toml")
    assert node.terms.budget == run.budget
    assert node.invitation.task == bytes(16)


def test_every_setting_is_in_an_example_with_its_default_or_a_choice() -> None:
    for kind, name in ((ShufflerConfig, "shuffler"), (CoordinatorConfig, "coordinator"), (NodeConfig, "node")):
        text = (EXAMPLES / f"{name}.toml").read_text()
        assert [field for field in kind.__struct_fields__ if field not in text] == []


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
    assert read(CoordinatorConfig, None, episodes=10, epsilon=1.0, shape=shape).run.problem.n_states == 3
    tokens = NodeConfig(task="", coordinator_key="", shuffler_key="", epsilon=1.0, tokens=str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="shufflerl tokens"):
        tokens.read_tokens()


def test_keys_and_tokens(tmp_path: Path, call: Call) -> None:
    code, text = call("keys", str(tmp_path / "role"))
    assert (code, text.strip()) == (0, str(SigningKey.load(tmp_path / "role" / "identity.pem").public))
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


def test_a_role_without_its_settings_says_so(call: Call) -> None:
    assert "coordinator_key" in str(call("shuffler")[0])
    assert "episodes" in str(call("coordinator")[0])
    assert "task" in str(call("node")[0])


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
    "transport": "sums",
    "transport_costs": "a report costs much",
    "messages": 1234,
    "invalid_messages": 0,
    "why": "Batch 1 waits for users: 5 of 40 reports are in, 35 are missing.",
}
POLICY = {"episodes_played": 33, "weights": [0.25, 0.75], "policies": [[[0, 1]], [[1, 1]]]}


class Canned(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(STATUS if self.path == "/v1/status" else POLICY).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


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
        assert "travel as sums; a report costs much" in text
        assert json.loads(call("status", *at, "--json")[1]) == STATUS
        code, text = call("policy", *at)
        assert "step 1: 1 1" in text
        assert "75%" in text
        assert json.loads(call("policy", *at, "--json")[1]) == POLICY
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"shufflerl\[network\]"):
        check_installed()


def test_the_demonstration_is_told() -> None:
    figures = {
        "users": 5000,
        "learner": "sdp-pe",
        "environment": "spectrum",
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
    text = demo.told(figures)
    for part in ("5,000 users", "67% of the way", "THE CERTIFICATE", "not one origin", "shuffler 100 MB"):
        assert part in text
    assert (
        "99 messages in random order, true and noise alike; 50 random seeds of masks in random order and 2 sums" in text
    )


def test_a_role_does_not_move_in_with_another(tmp_path: Path, call: Call) -> None:
    """One folder with both would have one identity and hold tags beside origins."""
    for name in ("shuffler", "coordinator"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.db").touch()
    shuffler = ("shuffler", "--folder", str(tmp_path / "coordinator"), "--coordinator-key", "00" * 32)
    run = ("--environment", "riverswim", "--episodes", "100", "--epsilon", "1")
    assert "folder of a coordinator" in str(call(*shuffler)[0])
    assert "folder of a shuffler" in str(call("coordinator", "--folder", str(tmp_path / "shuffler"), *run)[0])


def test_tokens_are_not_written_over_others(tmp_path: Path, call: Call) -> None:
    out = str(tmp_path / "tokens.txt")
    call("keys", "--enrolment", str(tmp_path / "role"))
    assert call("tokens", str(tmp_path / "role"), out)[0] == 0
    assert "cannot be written" in str(call("tokens", str(tmp_path / "role"), out)[0])


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
    (tmp_path / "shuffler.db").touch()
    key = "0" * 64
    config = ShufflerConfig(coordinator_key=key, folder=str(tmp_path), store="nats://127.0.0.1:1")
    with pytest.raises(StateMismatchError, match="spent tokens"):
        roles.run_shuffler(config)


def test_a_store_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shufflerl.network.nats_store", None)
    config = ShufflerConfig(coordinator_key="0" * 64, folder=str(tmp_path), store="nats://127.0.0.1:1")
    with pytest.raises(MissingExtraError, match=r"shufflerl\[nats\]"):
        roles.run_shuffler(config)
