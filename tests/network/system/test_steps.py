"""One random step on the network: what is announced, played, reported and learned, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

from shufflerl import envs
from shufflerl.counts import Batch, CountQuery
from shufflerl.envs.gym import TabularEnv, device_env
from shufflerl.envs.sensing import SensingTiles
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Mixture
from shufflerl.network import demo
from shufflerl.network.config import CoordinatorConfig
from shufflerl.network.coordinator.run import Run
from shufflerl.network.demo import policy_text
from shufflerl.network.node.reporting import check_environment, play
from shufflerl.network.protocol import agreement, crypto, wire
from shufflerl.network.protocol.agreement import Agreement, UnacceptableError, parse_announcement
from shufflerl.noise import PoissonNoise
from shufflerl.policies import Network, Scores, describe
from shufflerl.population import StepPopulation
from shufflerl.privacy.accounting import Budget
from shufflerl.steps import StepProblem
from tests.support.examples import unsteered_mdp
from tests.support.network_runs import System, length_of_report, refused_everywhere
from tests.support.network_world import altered, pretend_to_seal

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

PROBLEM = StepProblem(steps=5, n_states=3, n_actions=2, episodes=100)
SCORES = [[[0.0, 1.0], [1.0, 0.0], [0.5, 0.7]], [[1.0, 0.0]] * 3]
MIXTURE = Mixture(SCORES, [0.5, 0.5], Scores(3, 2))


def announced(mixture: Mixture = MIXTURE, problem: Any = PROBLEM) -> wire.Announcement:
    query = CountQuery.everything(StepProblem.of(problem))
    named: Any = {"task": bytes(16), "attempt": 0, "tag_key": crypto.new_box_key().public_key().public_bytes_raw()}
    return agreement.announce(Batch(3, 50, mixture, query), PoissonNoise(4.0), problem=problem, **named)


def parsed(mixture: Mixture = MIXTURE, problem: Any = PROBLEM) -> Agreement:
    return parse_announcement(wire.encode(announced(mixture, problem)))


def test_what_is_announced_is_what_is_asked() -> None:
    """Of a problem of one step, and of one of states and actions whose episodes are as long."""
    for problem in (PROBLEM, unsteered_mdp(0, horizon=5).problem(100)):
        agreed = parsed(problem=problem)
        assert agreed.announcement.query == wire.Steps(horizon=5, states=3, actions=2)
        assert agreed.batch.mixture == MIXTURE
        assert agreed.query == CountQuery.everything(PROBLEM)
        assert (agreed.query.touched_counters, agreed.query.changed_counters) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"horizon": wire.MAX_STEPS + 1}, "horizon"),
        ({"weights": [1 / 5000] * 5000, "policies": bytes(24 * 5000)}, "has 5,000 policies; expected at most 4,096"),
        ({"states": 2}, "weights has shape"),
        ({"actions": 5}, "bytes; expected 60 for each policy"),
        ({"states": 10**9}, f"states is {10**9}; expected a whole number of at least 1 and at most 100000"),
        ({"states": 10**5, "actions": 10**5}, "scores; expected at most 100,000"),
        ({"policies": np.full((2, 3, 2), np.nan, dtype="<f4").tobytes()}, "policies.* is nan; expected finite"),
        ({"policies": b""}, "The policies have 0 bytes; expected 24 for each policy"),
        ({"policies": bytes(25)}, "The policies have 25 bytes; expected 24 for each policy"),
        ({"weights": [0.5, 0.6]}, "weights"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_shuffler_and_node(changes: dict[str, Any], sentence: str) -> None:
    refused_everywhere(altered(announced(), **changes), sentence)


def test_longer_episodes_than_nodes_would_play_are_not_announced() -> None:
    long = StepProblem(steps=wire.MAX_STEPS + 1, n_states=3, n_actions=2, episodes=100)
    with pytest.raises(InvalidInputError, match=r"Episodes have 100,001 steps; expected at most 100,000"):
        announced(problem=long)
    payload = msgspec.msgpack.encode({"of": "returns", "family": {}, "horizon": wire.MAX_STEPS + 1, "points": []})
    with pytest.raises(msgspec.ValidationError, match="horizon"):
        msgspec.msgpack.decode(payload, type=wire.Counts | wire.Returns | wire.Steps)


class Slots(gymnasium.Env[Any, Any]):
    """Shows one state after the other and pays what it is told to, or raises it."""

    def __init__(self, shown: Any, pays: Any, seen: Any = None, ends: int = 10**9) -> None:
        self.shown, self.pays, self.ends = shown, pays, ends
        self.observation_space = seen or spaces.Discrete(3)
        self.action_space = spaces.Discrete(2)
        self.actions: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.actions, self._states = [], itertools.cycle(self.shown)
        return next(self._states), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        if isinstance(self.pays, BaseException):
            raise self.pays
        return next(self._states), self.pays, len(self.actions) >= self.ends, False, {}


def drawn(env: Any, agreed: Agreement, times: int) -> Any:
    """tags[i] of so many nodes."""
    return np.array([int(agreed.query.tags(play(env, agreed))[0, 0]) for _ in range(times)])


@pytest.mark.parametrize("step", range(5))
def test_every_step_is_told_as_often(step: int) -> None:
    """The one step in state 0 is told by a fifth of all nodes; fails by chance with probability 1e-6."""
    env, agreed = Slots([0 if h == step else 1 for h in range(5)], 0.0), parsed()
    told = int((drawn(env, agreed, 500) < 4).sum())
    assert stats.binomtest(told, 500, 0.2).pvalue > 2e-7


class Reusing(Slots):
    """Shows all states in one array, which it changes in place."""

    def __init__(self, first: int, later: int) -> None:
        super().__init__([0], 0.0, spaces.MultiDiscrete([3, 3]))
        self.first, self.later, self._seen = first, later, np.zeros(2, dtype=np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seen[:] = self.first
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._seen[:] = self.later
        return self._seen, 0.0, False, False, {}


@pytest.mark.parametrize("later", [1, 7, -1, 10**9])
def test_an_environment_may_change_its_observation_in_place(later: int) -> None:
    """What was seen when the action was taken is told, and a node never falls silent for what comes next."""
    agreed = parsed(Mixture(SCORES[:1], [1.0], Scores(3, 2)))
    assert set(drawn(Reusing(0, later), agreed, 100)) == {2, 4 if later == 1 else 10}


def test_the_whole_episode_is_played_and_any_step_of_it_told() -> None:
    """Steps are told equally often: chi-square, fails by chance with probability 1e-4."""
    env, agreed = Slots([0, 1, 2, 1, 2], 1.0), parsed(Mixture(SCORES[:1], [1.0], Scores(3, 2)))
    tags = drawn(env, agreed, 1_000)
    assert env.actions == [1, 0, 1, 0, 1]
    counts = np.bincount(tags, minlength=12).reshape(3, 2, 2)
    paid = [counts[0, 1, 1], counts[1, 0, 1], counts[2, 1, 1]]
    assert sum(paid) == 1_000
    assert stats.chisquare(paid, [200, 400, 400]).pvalue > 1e-4


def test_every_action_may_have_a_state_of_its_own() -> None:
    seen = spaces.MultiDiscrete([3, 3])
    env, agreed = Slots([[0, 0], [2, 1], [1, 2]], 0.0, seen), parsed(Mixture(SCORES[:1], [1.0], Scores(3, 2)))
    check_environment(env, agreed)
    found = {agreed.query.counter(tag)[2:] for tag in drawn(env, agreed, 200)}  # type: ignore[attr-defined]
    # Scores 0 and 1, then .5 of action 0 in state 2 and 0 of action 1 in state 1, then 1 and .7.
    assert found == {(0, 1, 0), (2, 0, 0), (1, 0, 0)}


@pytest.mark.parametrize(
    ("env", "tags", "told"),
    [
        (Slots([0], 0.0), {2}, None),
        (Slots([0], 7.0), {3}, "paid 7; expected a reward in [0, 1]"),
        (Slots([9], 1.0), {11}, "is in state 9; the batch is for 3 states"),
        (Slots([-1], 1.0), {11}, "is in state -1; the batch is for 3 states"),
        (Slots([0], 1.0, ends=1), {3, 10}, None),
        (Slots([0], RuntimeError("broken")), {2}, "a step in the first state is reported instead"),
        (Slots([0], SystemExit(1)), {2}, "a step in the first state is reported instead"),
        (Slots(["somewhere"], 1.0), {2}, "a step in the first state is reported instead"),
        (Slots([[0, 1, 2]], 1.0), {2}, "a step in the first state is reported instead"),
    ],
    ids=["unpaid", "overpaid", "beyond", "below", "ended", "broken", "exits", "text", "too many"],
)
def test_whatever_an_episode_is_a_node_reports_one_tag(
    env: Any, tags: set[int], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """An episode that ended stays in the last state, unpaid: tags of state 0 or 2, action 1."""
    agreed = parsed(Mixture(SCORES[:1], [1.0], Scores(3, 2)))
    assert set(drawn(env, agreed, 60)) == tags
    assert (told is None and not caplog.records) or (told or "") in caplog.text
    assert length_of_report(agreed, play(env, agreed)) == agreed.envelope_bytes


@pytest.mark.parametrize(
    "seen",
    [spaces.Discrete(4), spaces.Discrete(1), spaces.MultiDiscrete([3, 3, 3]), spaces.MultiDiscrete([3, 4])],
    ids=str,
)
def test_an_environment_of_other_states_is_refused(seen: Any) -> None:
    with pytest.raises(UnacceptableError, match=r"is for 3 states and 2 actions.*This node does not take part\."):
        check_environment(Slots([0], 1.0, seen), parsed())
    check_environment(Slots([0], 1.0, spaces.Discrete(2)), parsed())  # it may end early


def test_devices_play_as_the_simulation_does() -> None:
    """Tags of 1,500 nodes and of 60,000 simulated users, chi-square: fails by chance with probability 1e-4."""
    made = envs.make("spectrum-tiles", n_channels=3, tiles=2)
    assert isinstance(made, SensingTiles)
    mixture = Mixture([[[0.3, 0.2, 0.1], [0.8, 0.9, 0.6]]], [1.0], made.family)
    problem = made.problem(100)
    many = StepPopulation(made, 0).play(Batch(0, 60_000, mixture, CountQuery.everything(problem))).values
    agreed, env = parsed(mixture, problem), device_env("spectrum-tiles", n_channels=3, tiles=2)
    env.reset(seed=1)
    check_environment(env, agreed)
    few = np.bincount(drawn(env, agreed, 1_500), minlength=len(many))
    often = many >= 200
    assert few[~often].sum() <= 40
    assert stats.chi2_contingency(np.stack([many[often], few[often]])).pvalue > 1e-4


def test_a_table_of_states_is_played_too() -> None:
    mdp = unsteered_mdp(1, horizon=5)
    agreed = parsed(problem=mdp.problem(100))
    env = TabularEnv(mdp)
    check_environment(env, agreed)
    assert set(drawn(env, agreed, 100)) <= set(range(12))


@pytest.mark.slow(2)
@pytest.mark.parametrize("noise", ["users", "servers"])
@pytest.mark.parametrize("transport", ["tags", "sums"])
def test_a_run_learns_from_steps_by_every_way(
    tmp_path: Path, noise: Any, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_seal(monkeypatch)
    problem = envs.make("spectrum-tiles", n_channels=2, tiles=2).problem(240)
    assert isinstance(problem, StepProblem)
    run = Run(problem, "contextual-bandit", Budget(8.0, 1e-5), 7, {"first": 60}, transport=transport, noise=noise)
    told = System(tmp_path, run, device_env("spectrum-tiles", n_channels=2, tiles=2)).learn_all()
    assert told["batches"] >= 2
    assert told["policy"]["family"] == "scores"
    assert [len(row["cells"]) for row in told["policy"]["rows"]] == [2, 2]
    assert all(0 <= point["low"] <= point["value"] <= point["high"] <= 20 for point in told["history"])
    assert told["history"][-1]["users"] == 240


def test_actions_that_steer_are_refused_before_a_run() -> None:
    named: Any = {"episodes": 100, "epsilon": 1.0, "learner": "contextual-bandit"}
    with pytest.raises(InvalidInputError, match="depends on their action"):
        _ = CoordinatorConfig(environment="riverswim", **named).run
    assert CoordinatorConfig(environment="spectrum-tiles", **named).run.learner_parameters == {"first": 100}


def test_the_demonstration_knows_tiles() -> None:
    chosen = demo.chosen(None, "spectrum-tiles", None, epsilon=1.0, seed=0)
    assert (chosen.learner, chosen.users) == ("contextual-bandit", demo.RETURN_USERS)
    with pytest.raises(InvalidInputError, match="use the learner contextual-bandit"):
        demo.chosen(None, "spectrum-tiles", "optimistic", epsilon=1.0, seed=0)
    policy = {"family": describe(Scores(3, 2)), "weights": [0.6, 0.4], "policies": SCORES}
    assert policy_text(policy).splitlines()[1] == "state 0: 0.000 1.000"
    scores = Mixture(np.ones((1, 6, 8)), [1.0], Scores(6, 8))
    game = envs.make("spectrum-sensing", 0)
    assert isinstance(game, envs.Player)
    public = game.problem(1)
    linear = Network(public.inputs, public.actions, head=public.head)
    for env, mixture in (
        ("spectrum-tiles", scores),
        ("spectrum-sensing", Mixture(np.zeros((1, linear.size)), [1.0], linear)),
    ):
        optimal = demo.value_learned(env, mixture)["optimal"]
        assert optimal is not None
        assert 14 < optimal < 20, env  # the best that is known, and not a slot's reward in each of 20
