"""Policies of any family on the network: what is announced, played, reported and learned, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl import envs
from shufflerl.counts import Batch
from shufflerl.envs.gym import TabularEnv, device_env
from shufflerl.envs.riverswim import riverswim
from shufflerl.envs.sensing import SpectrumSensing
from shufflerl.mdp import Mixture
from shufflerl.network.config import CoordinatorConfig
from shufflerl.network.coordinator.run import Run
from shufflerl.network.demo import policy_text
from shufflerl.network.node.composing import check, compose
from shufflerl.network.node.reporting import check_environment, play
from shufflerl.network.protocol import agreement, crypto, wire
from shufflerl.network.protocol.agreement import Agreement, UnacceptableError, parse_announcement
from shufflerl.network.protocol.wire import ProblemError
from shufflerl.noise import PoissonNoise
from shufflerl.policies import HEADS, MAX_PARAMETERS, Network, Table, describe
from shufflerl.privacy.accounting import Budget
from shufflerl.returns import ReturnProblem, ReturnQuery
from tests.support.network_runs import System, length_of_report, refused_everywhere
from tests.support.network_world import World, altered, pretend_to_seal

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

POINTS = (0.0, 10.0, 20.0)
LINEAR = Network(2, 2)
PROBLEM = ReturnProblem(2, 2, horizon=5, episodes=100, low=0.0, high=20.0)


def announced(mixture: Mixture, problem: Any = PROBLEM, points: tuple[float, ...] = POINTS) -> wire.Announcement:
    batch = Batch(3, 50, mixture, ReturnQuery(len(mixture.weights), points))
    named: Any = {"task": bytes(16), "attempt": 0, "tag_key": bytes(32)}
    return agreement.announce(batch, PoissonNoise(4.0), problem=problem, **named)


def parsed(family: Network | Table = LINEAR, policies: Any = None, **options: Any) -> Agreement:
    given = np.ones((2, *family.shape)) if policies is None else np.asarray(policies)
    mixture = Mixture(given, np.full(len(given), 1 / len(given)), family)
    return parse_announcement(wire.encode(announced(mixture, **options)))


@settings(max_examples=40)
@given(
    st.sampled_from(HEADS),
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_what_is_announced_is_what_is_played(head: str, hidden: list[int], policies: int, seed: int) -> None:
    """To the last bit: nodes act exactly as the coordinator's policies do."""
    family = Network(6, 3, tuple(hidden), head)
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(policies))
    mixture = Mixture(10.0 ** rng.uniform(-30, 30, (policies, family.size)), weights, family)
    problem = ReturnProblem(6, 3, 5, 100, head=head)
    said = announced(mixture, problem)
    meant = parse_announcement(wire.encode(said))
    assert meant.batch == Batch(3, 50, mixture, ReturnQuery(policies, POINTS))
    assert meant.batch.mixture.policies.tobytes() == mixture.policies.tobytes()
    assert (meant.query.touched_counters, meant.query.changed_counters) == (1, 2)
    assert isinstance(said.query, wire.Returns)
    assert (said.query.low, said.query.high) == (None, None)


NOT_A_FAMILY = {"family": "forest", "inputs": 2, "actions": 2, "hidden": [], "head": "choice"}
LARGE = {"family": "mlp", "inputs": 2, "actions": 2, "hidden": [2**40], "head": "choice"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"family": NOT_A_FAMILY}, "The policy family is 'forest'; expected one of: table, scores, linear, mlp."),
        ({"family": {}}, "The policy family is None; expected one of"),
        ({"family": LARGE}, f"size of a hidden layer is {2**40}; expected"),
        ({"family": LARGE | {"hidden": [400, 400]}}, f"162,001 parameters; expected at most {MAX_PARAMETERS:,}"),
        ({"family": LARGE | {"hidden": [1] * 5}}, "has 5 hidden layers; expected at most 4"),
        ({"family": LARGE | {"hidden": [3], "code": "x"}}, "is described by"),
        ({"family": LARGE | {"hidden": []}}, "expected sizes of layers of an mlp, and none of a linear one"),
        ({"family": NOT_A_FAMILY | {"family": "linear", "head": "any"}}, "head is 'any'; expected"),
        ({"family": {"family": "scores", "states": 1, "actions": 3}}, "expected tables or networks where returns are"),
        ({"family": {"family": "table", "horizon": 4, "states": 3}}, "Its tables are for 4 steps; expected 5"),
        ({"family": {"family": "table", "horizon": 5, "states": 2**62}}, "bytes; expected"),
        ({"policies": np.full((2, 3), np.nan, dtype="<f4").tobytes()}, "policies.* is nan; expected finite"),
        ({"policies": np.full((2, 3), np.inf, dtype="<f4").tobytes()}, "policies.* is inf; expected finite"),
        ({"policies": b""}, "The policies have 0 bytes; expected 12 for each policy"),
        ({"policies": bytes(25)}, "The policies have 25 bytes; expected 12 for each policy"),
        ({"policies": bytes(36)}, "weights"),
        ({"points": [0.0]}, "expected 2 to 1024 that increase"),
        ({"points": [1.0, 0.0]}, "expected 2 to 1024 that increase"),
        ({"points": [0.0, float("nan")]}, "a point of returns is nan"),
        ({"low": None}, r"Its returns lie in \[None, 20.0\]; expected a range, or none."),
        ({"low": 30.0}, r"Its returns lie in \[30.0, 20.0\]; expected a range"),
        ({"high": float("inf")}, "expected a range"),
        ({"low": -float("inf")}, "expected a range"),
        ({"high": 1e200}, "expected a range"),
        ({"low": 1e17, "high": 1e17 + 64}, "expected a range"),
        ({"weights": [1.0 / 5000] * 5000}, "policies is 5000; expected"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused_by_shuffler_and_node(changes: dict[str, Any], sentence: str) -> None:
    said = altered(announced(Mixture(np.zeros((2, 3)), [0.5, 0.5], LINEAR)), **changes)
    refused_everywhere(said, sentence)


def test_policies_too_large_are_refused_before_they_are_read() -> None:
    said = altered(announced(Mixture(np.zeros((2, 3)), [0.5, 0.5], LINEAR)), policies=bytes(50_000_004))
    with pytest.raises(ProblemError, match=r"Its policies have 50,000,004 bytes; at most 50,000,000 fit"):
        parse_announcement(wire.encode(said))


class Game(gymnasium.Env[Any, Any]):
    """One step that pays what it is told to, or raises it."""

    def __init__(self, pays: Any, seen: Any = None, acts: Any = None) -> None:
        self.pays = pays
        self.observation_space = seen or spaces.Box(-1.0, 1.0, (2,))
        self.action_space = acts or spaces.Discrete(2)
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        if isinstance(self.pays, BaseException):
            raise self.pays
        return self.observation_space.sample(), self.pays, True, False, {}


@pytest.mark.parametrize(
    ("pays", "point", "told"),
    [
        (0.0, 0, None),
        (10.0, 1, None),
        (20.0, 2, None),
        (35.0, 2, "returned 35; expected a return in [0, 20]"),
        (-3.0, 0, "returned -3; expected a return in [0, 20]"),
        (float("nan"), 0, "the least return is reported instead"),
        (float("inf"), 0, "the least return is reported instead"),
        ("much", 0, "the least return is reported instead"),
        (RuntimeError("broken"), 0, "the least return is reported instead"),
        (SystemExit(1), 0, "the least return is reported instead"),
    ],
    ids=str,
)
def test_whatever_an_episode_is_a_node_reports_one_tag(
    pays: Any, point: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    key = crypto.new_box_key().public_key().public_bytes_raw()
    agreed = parse_announcement(wire.encode(altered(parsed().announcement, tag_key=key)))
    episode = play(Game(pays), agreed)
    assert episode.points.tolist() == [point]
    assert 0 <= episode.policies[0] < 2
    assert (told is None and not caplog.records) or (told or "") in caplog.text
    assert length_of_report(agreed, episode) == agreed.envelope_bytes


def test_a_return_between_two_points_keeps_its_mean() -> None:
    """Of 600 returns of 3 three in ten are the second point; seven deviations, probability 3e-12."""
    agreed, game = parsed(), Game(3.0)
    points = np.concatenate([play(game, agreed).points for _ in range(600)])
    assert set(points) == {0, 1}
    assert abs(points.sum() - 0.3 * 600) < 7 * np.sqrt(0.3 * 0.7 * 600)


@pytest.mark.parametrize("seen", [spaces.Discrete(3, start=1), spaces.Box(-1.0, 1.0, (3,))])
@pytest.mark.parametrize("acts", [spaces.Discrete(2, start=4), spaces.Box(-2.0, 2.0, (2,))])
def test_any_box_or_number_is_played_as_the_policy_says(seen: Any, acts: Any) -> None:
    head = "box" if isinstance(acts, spaces.Box) else "choice"
    family = Network(3, 2, head=head)
    policy = np.zeros((1, family.size))
    policy[0, -1] = 50.0
    agreed, game = parsed(family, policy, problem=ReturnProblem(3, 2, 5, 100, head=head)), Game(10.0, seen, acts)
    check_environment(game, agreed)
    assert play(game, agreed).points.tolist() == [1]
    (action,) = game.actions
    assert np.ravel(action).tolist() == ([0.0, 2.0] if head == "box" else [5])


@pytest.mark.parametrize(
    ("seen", "acts"),
    [
        (spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2)),
        (spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)),
        (spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (2,))),
        (spaces.Text(3), spaces.Discrete(2)),
        (spaces.Discrete(2), spaces.MultiBinary(2)),
    ],
    ids=str,
)
def test_an_environment_that_is_another_is_refused_before_anything_is_spent(seen: Any, acts: Any) -> None:
    with pytest.raises(UnacceptableError, match=r"(expected|Supported).*This node does not take part\."):
        check_environment(Game(1.0, seen, acts), parsed())


def test_tables_are_compared_by_their_returns_too() -> None:
    """A search on states and actions deploys tables; what an episode returns is its reward bits added up."""
    mdp = riverswim(np.random.default_rng(0), n_states=3, horizon=4)
    agreed = parsed(
        Table(4, 3), np.ones((2, 4, 3), dtype=int), problem=mdp.problem(50), points=tuple(map(float, range(5)))
    )
    env = TabularEnv(mdp)
    check_environment(env, agreed)
    episodes = [play(env, agreed) for _ in range(20)]
    assert all(0 <= agreed.query.tags(episode)[0, 0] < agreed.query.size for episode in episodes)
    small = TabularEnv(riverswim(np.random.default_rng(0), n_states=5, horizon=4))
    with pytest.raises(UnacceptableError, match="The batch is for 3 states"):
        check_environment(small, agreed)


def test_sensing_step_by_step_is_sensing_at_once() -> None:
    """The same policy earns the same: means of 300 and 20,000 episodes, within six deviations of the smaller."""
    game = envs.make("spectrum-sensing", n_channels=4)
    assert isinstance(game, SpectrumSensing)
    family = Network(12, 4, head="score")
    mixture = Mixture([[1.0, 1.0, 0.5, 0.0]], [1.0], family)
    many = game.returns(mixture, np.zeros(20_000, dtype=int), np.random.default_rng(0))
    agreed = parsed(
        family, mixture.policies, problem=game.problem(100), points=tuple(map(float, range(game.horizon + 1)))
    )
    env = device_env("spectrum-sensing", n_channels=4)
    env.reset(seed=1)
    check_environment(env, agreed)
    few = [int(play(env, agreed).points[0]) for _ in range(300)]
    assert np.mean(few) == pytest.approx(many.mean(), abs=6 * many.std() / np.sqrt(300))


class Hill(Game):
    """What a policy is worth is public knowledge here: the nearer its bias to one, the more."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1), 20.0 * float(np.exp(-((np.ravel(action)[0] - 1.0) ** 2))), True, False, {}


HILL = Hill(0.0, spaces.Box(-1.0, 1.0, (1,)), spaces.Box(-2.0, 2.0, (1,)))


@pytest.mark.slow(2)
@pytest.mark.parametrize("noise", ["users", "servers"])
@pytest.mark.parametrize("transport", ["tags", "sums"])
def test_a_run_learns_from_returns_by_every_way(
    tmp_path: Path, noise: Any, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_seal(monkeypatch)
    problem = ReturnProblem(1, 1, horizon=3, episodes=600, low=0.0, high=20.0, head="box")
    parameters = {"first": 60, "family": "mlp", "hidden": 2} if transport == "sums" else {"first": 60}
    run = Run(problem, "policy-search", Budget(8.0, 1e-5), 7, parameters, transport=transport, noise=noise)
    told = System(tmp_path, run, HILL).learn_all()
    assert told["batches"] >= 2
    assert (told["returns"], told["log2_all_policies"], told["changed_actions"]) == (True, None, None)
    assert told["policy"]["family"] == ("mlp" if transport == "sums" else "linear")
    assert {len(row["cells"]) for row in told["policy"]["rows"]} == {len(told["policy"]["columns"])}
    for point in told["history"]:
        assert 0 <= point["low"] <= point["value"] <= point["high"] <= 20
        assert all(0 <= arm <= 20 for arm in point["arms"])
    assert told["history"][-1]["users"] == problem.episodes


def test_a_fleet_plays_gymnasiums_environments_by_their_ids() -> None:
    world = World(noise_mean=40.0)
    problem = envs.make("CartPole-v1").problem(3)
    family = Network(problem.inputs, problem.actions)  # type: ignore[union-attr]
    batch = Batch(0, 3, Mixture(np.zeros((1, 5)), [1.0], family), ReturnQuery(1, (0.0, 500.0)))
    key = crypto.new_box_key().public_key().public_bytes_raw()
    named: Any = {"task": world.task, "attempt": 0, "tag_key": key, "problem": problem}
    world.shuffler.announce(world.coordinator.sign(agreement.announce(batch, PoissonNoise(40.0), **named)))
    opened = wire.encode(world.shuffler.current(world.task))
    check("CartPole-v1", {}, opened, world.invitation)
    report = wire.decode(wire.Report, compose("CartPole-v1", {}, opened, world.invitation, world.mint()))
    assert world.upload(report)[0].problem is None
    with pytest.raises(UnacceptableError, match=r"expected 2 and 3 \(choice\), as the environment has"):
        check("MountainCar-v0", {}, opened, world.invitation)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        (Network(2, 3), "action 2: +2 x0 +4 x1 +6"),
        (Network(4, 2, head="score"), "part: +1 x0 +2 x1 +3"),
        (Network(2, 1, head="box"), "coordinate 0: +1 x0 +2 x1 +3"),
        (Network(2, 2, (3,)), "Its numbers are in --json."),
        (Network(40, 2), "Its numbers are in --json."),
    ],
    ids=str,
)
def test_a_policy_can_be_read(family: Network, sentence: str) -> None:
    parameters = [float(number) for number in range(1, family.size + 1)]
    policy = {"family": describe(family), "weights": [0.6, 0.4], "policies": [parameters, parameters]}
    lines = policy_text(policy).splitlines()
    assert lines[0].startswith(f"A {'network' if family.hidden else 'linear policy'} of {family.size} numbers")
    assert sentence in lines
    assert lines[-1] == "(given to 60% of users; the others have one of 1 more)"


def test_a_coordinator_that_is_told_of_its_learner_asks_as_many_users_as_are_mixed_even_so() -> None:
    named: Any = {"episodes": 100, "epsilon": 3.0, "environment": "CartPole-v1", "learner": "policy-search"}
    for told in ({}, {"family": "mlp"}, {"first": 7}):
        assert CoordinatorConfig(learner_parameters=told, **named).run.learner_parameters == {"first": 100, **told}
