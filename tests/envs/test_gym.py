"""The bridge both ways: our environments in Gymnasium, Gymnasium's environments here."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from scipy import stats

from shufflerl.arrays import PolicyArray
from shufflerl.envs import make
from shufflerl.envs.gym import GYMNASIUM_IDS, GymSimulator, TabularEnv, register
from shufflerl.errors import InvalidInputError, MissingExtraError, UnknownNameError
from shufflerl.mdp import MDP
from shufflerl.planning import greedy, optimal_q, policy_values, visit_probabilities
from shufflerl.population_kernels import play_returns, play_users

#: Standard errors allowed: a comparison of normal means fails by chance with probability 6e-7.
STANDARD_ERRORS = 5.0


def bridged(id: str, horizon: int, **parameters: Any) -> MDP:
    mdp = make("gymnasium", id=id, horizon=horizon, **parameters)
    assert isinstance(mdp, MDP)
    return mdp


def simulated(id: str, horizon: int, **parameters: Any) -> GymSimulator:
    simulator = make("gymnasium", id=id, horizon=horizon, **parameters)
    assert isinstance(simulator, GymSimulator)
    return simulator


def some_policy(mdp: MDP, seed: int) -> PolicyArray:
    """Optimal in half of the states and random in the others, so that much of the MDP is visited."""
    rng = np.random.default_rng(seed)
    best = greedy(optimal_q(mdp.transitions, mdp.rewards), rng)
    other = rng.integers(mdp.n_actions, size=best.shape)
    return np.where(rng.random(best.shape) < 0.5, best, other).astype(np.int32)


def agrees(samples: list[float], expected: float) -> bool:
    error = np.std(samples, ddof=1) / np.sqrt(len(samples))
    return bool(abs(np.mean(samples) - expected) < STANDARD_ERRORS * error)


def raw_value(id: str, policy: PolicyArray, **options: Any) -> float:
    """The expected sum of raw rewards, straight from Gymnasium's table and by its own rules of termination."""
    env: Any = gymnasium.make(id, **options).unwrapped
    value = np.zeros(len(env.P))
    for h in range(len(policy) - 1, -1, -1):
        value = np.array(
            [
                sum(p * (r + (0.0 if over else value[y])) for p, y, r, over in env.P[x][int(policy[h, x])])
                for x in range(len(env.P))
            ]
        )
    return float(env.initial_state_distrib @ value)


class TestOursInGymnasium:
    @pytest.mark.parametrize("id", GYMNASIUM_IDS)
    def test_passes_the_checker(self, id: str) -> None:
        check_env(gymnasium.make(id).unwrapped)

    @pytest.mark.parametrize("id", GYMNASIUM_IDS)
    def test_plays_under_gymnasiums_wrappers(self, id: str) -> None:
        env = gymnasium.make(id)
        assert isinstance(env.unwrapped, TabularEnv)
        env.action_space.seed(0)
        _, info = env.reset(seed=0)
        assert info == {"step": 0}
        horizon = env.unwrapped.mdp.horizon
        for step in range(1, horizon + 1):
            _, reward, terminated, truncated, info = env.step(env.action_space.sample())
            assert reward in (0.0, 1.0)
            assert (terminated, truncated, info) == (step == horizon, False, {"step": step})
        with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
            env.unwrapped.step(np.int64(0))

    def test_parameters_and_seed_are_ours(self) -> None:
        env = gymnasium.make("shufflerl/Random-v0", n_states=3, horizon=4, seed=5).unwrapped
        same = make("random", 5, n_states=3, horizon=4)
        assert isinstance(env, TabularEnv)
        assert isinstance(same, MDP)
        assert np.array_equal(env.mdp.rewards, same.rewards)
        with pytest.raises(UnknownNameError, match=r"has no parameter 'n_state'\. Did you mean 'n_states'\?"):
            gymnasium.make("shufflerl/Random-v0", n_state=3)

    def test_wrong_action(self) -> None:
        env = gymnasium.make("shufflerl/RiverSwim-v0").unwrapped
        env.reset(seed=0)
        with pytest.raises(gymnasium.error.InvalidAction, match=r"The action is 2; expected 0\.\.1"):
            env.step(2)

    @pytest.mark.parametrize("name", ["riverswim", "spectrum", "random", "FrozenLake-v1"])
    def test_returns_and_visits_have_the_mdps_law(self, name: str) -> None:
        mdp = make(name, 0) if name != "FrozenLake-v1" else bridged(name, 12)
        assert isinstance(mdp, MDP)
        policy, env, episodes = some_policy(mdp, seed=1), TabularEnv(mdp), 3000
        returns, visits = [], np.zeros((mdp.horizon, mdp.n_states))
        env.reset(seed=11)
        for _ in range(episodes):
            state, info = env.reset()
            total, terminated = 0.0, False
            while not terminated:
                visits[info["step"], state] += 1
                state, reward, terminated, _, info = env.step(np.int64(policy[info["step"], state]))
                total += reward
            returns.append(total)
        assert max(returns) == 1 or name != "FrozenLake-v1"
        assert agrees(returns, policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None])[0])
        expected = visit_probabilities(mdp.transitions, mdp.start, policy[None])[0]
        # 48 cells at most, 5 standard errors each: fails by chance in fewer than 1e-4 of seeds.
        error = np.sqrt(expected * (1 - expected) / episodes)
        assert (np.abs(visits / episodes - expected) <= STANDARD_ERRORS * error + 1e-12).all()

    def test_registering_twice_changes_nothing(self) -> None:
        before = dict(gymnasium.registry)
        register()
        assert dict(gymnasium.registry) == before

    @pytest.mark.parametrize(
        "program",
        [
            "import gymnasium; gymnasium.make('shufflerl.envs:shufflerl/RiverSwim-v0')",
            "import gymnasium; gymnasium.make('shufflerl.envs.gym:shufflerl/RiverSwim-v0')",
            "import shufflerl.network, gymnasium; gymnasium.make('shufflerl.envs.gym:shufflerl/RiverSwim-v0')",
            "import gymnasium, shufflerl.envs; gymnasium.make('shufflerl/RiverSwim-v0')",
            "import shufflerl.envs.gym, gymnasium; gymnasium.make('shufflerl/RiverSwim-v0')",
            "import shufflerl.envs as e, gymnasium; e.make('gymnasium', id='shufflerl/RiverSwim-v0', horizon=2)",
        ],
    )
    def test_found_in_a_fresh_interpreter(self, program: str) -> None:
        light = program + "; import sys; assert 'numba' not in sys.modules"
        subprocess.run([sys.executable, "-W", "error", "-c", light], check=True)


class TestTables:
    def test_frozen_lake_without_slipping_is_a_shortest_path(self) -> None:
        options = '{"is_slippery": false}'
        assert bridged("FrozenLake-v1", 6, options=options).optimal_value == pytest.approx(1.0)
        assert bridged("FrozenLake-v1", 5, options=options).optimal_value == 0.0

    def test_frozen_lake_with_slipping(self) -> None:
        # The best policy of the slippery 4x4 lake reaches the goal with probability 14/17 in the long run.
        assert bridged("FrozenLake-v1", 1000).optimal_value == pytest.approx(14 / 17, abs=1e-3)

    def test_cliff_walking_takes_thirteen_steps(self) -> None:
        mdp = bridged("CliffWalking-v1", 20)
        assert mdp.optimal_value == pytest.approx((-13 + 20 * 100) / 100)

    @pytest.mark.parametrize(
        ("id", "horizon", "low", "high"),
        [("FrozenLake-v1", 12, 0, 1), ("CliffWalking-v1", 9, -100, 0), ("CliffWalkingSlippery-v1", 9, -100, 0)],
    )
    def test_values_are_affinely_equivalent(self, id: str, horizon: int, low: float, high: float) -> None:
        mdp = bridged(id, horizon)
        for seed in range(3):
            policy = some_policy(mdp, seed)
            value = policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None])[0]
            assert value == pytest.approx((raw_value(id, policy) - horizon * low) / (high - low), rel=1e-12)

    def test_a_wider_range_can_be_chosen(self) -> None:
        mdp = bridged("FrozenLake-v1", 8, reward_low=-1, reward_high=3)
        plain = bridged("FrozenLake-v1", 8)
        assert np.allclose(mdp.rewards, (plain.rewards + 1) / 4)
        assert mdp.optimal_value == pytest.approx((plain.optimal_value + 8) / 4)

    def test_a_lake_pays_once(self) -> None:
        """Whether the goal pays depends on whether it is reached, which ends the episode."""
        lake = bridged("FrozenLake-v1", 100)
        best = greedy(optimal_q(lake.transitions, lake.rewards), np.random.default_rng(0))
        returns = play_returns(np.random.default_rng(1), lake.dynamics, best, 3000)
        assert set(returns) == {0.0, 1.0}
        assert agrees(returns.tolist(), lake.optimal_value)
        assert not len(bridged("FrozenLake-v1", 6, options='{"is_slippery": false}').transition_rewards)

    @pytest.mark.slow
    @pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 3.0)])
    def test_steps_have_the_joint_law_of_the_game(self, low: float, high: float) -> None:
        """Of the step before an end: where it led, and what it paid."""
        lake = bridged("FrozenLake-v1", 30, reward_low=low, reward_high=high)
        simulator = GymSimulator(gymnasium.make("FrozenLake-v1", max_episode_steps=-1), 30, low, high)
        best = greedy(optimal_q(lake.transitions, lake.rewards), np.random.default_rng(0))
        rng, done = np.random.default_rng(2), lake.n_states - 1
        played = [simulator.play(best, rng) for _ in range(2000)]
        theirs = tuple(np.stack(column) for column in zip(*played, strict=True))
        ours = play_users(rng, lake.dynamics, best[None], np.ones(1), 20_000)
        shares = []
        for states, _, bits in (theirs, ours):
            ends = (states[:, 1:] == done) & (states[:, :-1] != done)
            shares.append(np.bincount(states[:, :-1][ends] * 2 + bits[:, :-1][ends], minlength=2 * done))
        tables = np.stack(shares)[:, np.stack(shares).sum(axis=0) > 50]
        assert stats.chi2_contingency(tables).pvalue > 1e-6

    def test_done_state_and_support(self) -> None:
        mdp = bridged("FrozenLake-v1", 4)
        done = mdp.n_states - 1
        assert mdp.n_states == 17
        assert (mdp.transitions[:, done, :, done] == 1).all()
        assert (mdp.transitions[:, 15, :, done] == 1).all()
        assert mdp.support is not None
        assert np.array_equal(mdp.support, mdp.transitions > 0)
        assert mdp.start[0] == 1
        assert (mdp.rewards[:, done] == 0).all()

    def test_own_units_lead_back_to_what_gymnasium_pays(self) -> None:
        """CliffWalking's shortest way takes 13 steps, which cost 1 each."""
        mdp = bridged("CliffWalking-v1", 20)
        assert (mdp.units.low, mdp.units.high, mdp.units.steps) == (-100, 0, 20)
        assert mdp.units.value(mdp.optimal_value) == pytest.approx(-13)
        assert bridged("FrozenLake-v1", 3).units.ours

    def test_an_id_without_version_is_the_newest(self) -> None:
        mdp = bridged("Taxi", 3)
        assert (mdp.n_states, mdp.n_actions) == (501, 6)
        assert np.count_nonzero(mdp.start) == 300
        assert np.allclose(mdp.rewards[:, -1], 10 / 30)

    def test_range_that_misses_a_reward(self) -> None:
        with pytest.raises(InvalidInputError, match=r"rewards from -100 to -1, outside \[-50, 0\]"):
            bridged("CliffWalking-v1", 3, reward_low=-50)

    @pytest.mark.parametrize(("low", "high"), [(0, 0), (0.5, 1), (2, -2)])
    def test_range_without_zero(self, low: float, high: float) -> None:
        with pytest.raises(InvalidInputError, match="expected reward_low <= 0 <= reward_high"):
            bridged("FrozenLake-v1", 3, reward_low=low, reward_high=high)

    def test_strange_table(self) -> None:
        class Strange(Scripted):
            P = "not a table"

        gymnasium.register("shufflerl-test/Strange-v0", entry_point=lambda **_: Strange())
        try:
            with pytest.raises(InvalidInputError, match="transition table of an unknown form"):
                bridged("shufflerl-test/Strange-v0", 3)
        finally:
            del gymnasium.registry["shufflerl-test/Strange-v0"]


class Scripted(gymnasium.Env[Any, Any]):
    """Shows its observations one after another, pays its rewards, and ends at the end of the list."""

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        observations: tuple[Any, ...] = (0, 1, 2),
        rewards: tuple[float, ...] = (1.0, -1.0),
        truncates: bool = False,
    ) -> None:
        self.observation_space = observation_space or spaces.Discrete(3)
        self.action_space = action_space or spaces.Discrete(2)
        self.observations, self.rewards, self.truncates, self.seen = observations, rewards, truncates, 0
        self.taken: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen = 0
        return self.observations[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(int(action))
        self.seen += 1
        over = self.seen == len(self.observations) - 1
        ended = (over and not self.truncates, over and self.truncates)
        return self.observations[self.seen], self.rewards[self.seen - 1], *ended, {}


class TestSimulators:
    @pytest.mark.slow
    def test_agrees_with_the_table(self) -> None:
        mdp = bridged("FrozenLake-v1", 12, reward_low=-0.5, reward_high=1.5)
        simulator = GymSimulator(gymnasium.make("FrozenLake-v1", max_episode_steps=-1), 12, -0.5, 1.5)
        assert (simulator.n_states, simulator.n_actions) == (mdp.n_states, mdp.n_actions)
        policy, rng, episodes = some_policy(mdp, seed=2), np.random.default_rng(12), 3000
        played = [simulator.play(policy, rng) for _ in range(episodes)]
        value = policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None])[0]
        assert agrees([float(rewards.sum()) for _, _, rewards in played], value)
        ended = [float(states[-1] == mdp.n_states - 1) for states, _, _ in played]
        assert agrees(ended, visit_probabilities(mdp.transitions, mdp.start, policy[None])[0, -1, -1])

    @pytest.mark.slow
    def test_our_own_environment_declares_its_rewards(self) -> None:
        simulator = simulated("shufflerl/RiverSwim-v0", 6)
        mdp = make("riverswim")
        assert isinstance(mdp, MDP)
        policy, rng = some_policy(mdp, seed=3), np.random.default_rng(13)
        padded = np.pad(policy, ((0, 0), (0, 1)))
        returns = [float(simulator.play(padded, rng)[2].sum()) for _ in range(3000)]
        assert agrees(returns, policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None])[0])

    def test_blackjack(self) -> None:
        simulator = simulated("Blackjack-v1", 5, reward_low=-1, reward_high=1)
        assert (simulator.horizon, simulator.n_states, simulator.n_actions) == (5, 32 * 11 * 2 + 1, 2)
        assert (simulator.start, simulator.support) == (None, None)
        problem = simulator.problem(100)
        assert (problem.n_states, problem.start, problem.support, problem.episodes) == (705, None, None, 100)
        stick = np.zeros((5, simulator.n_states), dtype=np.int32)
        states, actions, rewards = simulator.play(stick, np.random.default_rng(0))
        assert states.shape == actions.shape == rewards.shape == (5,)
        assert {states.dtype, actions.dtype, rewards.dtype} == {np.dtype(np.int64)}
        assert (states[1:] == 704).all()
        player, dealer, ace = np.unravel_index(states[0], (32, 11, 2))
        assert 4 <= player <= 21
        assert 1 <= dealer <= 10
        assert ace in (0, 1)

    def test_same_seed_same_episode(self) -> None:
        simulator = simulated("Blackjack-v1", 4, reward_low=-1, reward_high=1)
        policy = np.random.default_rng(0).integers(2, size=(4, 705)).astype(np.int32)
        first, second = (
            [np.stack(simulator.play(policy, rng)) for _ in range(20)]
            for rng in (np.random.default_rng(5), np.random.default_rng(5))
        )
        assert np.array_equal(first, second)
        assert len({episode.tobytes() for episode in first}) > 10

    @pytest.mark.parametrize(
        ("space", "observations", "expected", "states"),
        [
            (spaces.Discrete(3, start=5), (5, 7, 6), [0, 2, 3], 4),
            (spaces.MultiDiscrete([2, 3]), tuple(map(np.array, ([1, 2], [0, 1], [1, 1]))), [5, 1, 6], 7),
            (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(4, start=-1)]), ((1, 2), (0, -1), (0, 0)), [7, 0, 8], 9),
        ],
    )
    def test_observations_are_numbered(
        self, space: spaces.Space[Any], observations: tuple[Any, ...], expected: list[int], states: int
    ) -> None:
        simulator = GymSimulator(Scripted(space, None, observations), 3, -1, 1)
        assert simulator.n_states == states
        played, _, rewards = simulator.play(np.zeros((3, states), dtype=np.int32), np.random.default_rng(0))
        assert played.tolist() == expected
        assert rewards[:2].tolist() == [1, 0]

    @pytest.mark.parametrize("truncates", [False, True])
    def test_an_episode_that_ends_by_itself_or_is_cut_off_stays_in_the_added_state(self, truncates: bool) -> None:
        env = Scripted(truncates=truncates)
        played, _, _ = GymSimulator(env, 5, -1, 1).play(np.zeros((5, 4), dtype=np.int32), np.random.default_rng(0))
        assert played.tolist() == [0, 1, 3, 3, 3]
        assert len(env.taken) == 2

    def test_actions_are_the_policys_and_shifted_to_the_space(self) -> None:
        env = Scripted(action_space=spaces.Discrete(3, start=10))
        policy = np.array([[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 2], [0, 0, 0, 1]])
        _, actions, _ = GymSimulator(env, 4, -1, 1).play(policy.astype(np.int32), np.random.default_rng(0))
        assert actions.tolist() == [2, 1, 2, 1]
        assert env.taken == [12, 11]

    def test_rewards_are_rounded_without_bias(self) -> None:
        simulator = GymSimulator(Scripted(rewards=(0.25, 0.5)), 3, -1, 1)
        rng, policy = np.random.default_rng(4), np.zeros((3, 4), dtype=np.int32)
        bits = np.stack([simulator.play(policy, rng)[2] for _ in range(4000)])
        for h, mean in enumerate([0.625, 0.75, 0.5]):
            assert agrees(list(bits[:, h]), mean)

    @pytest.mark.parametrize("reward", [1.5, -2.0, float("nan")])
    def test_reward_outside_the_range(self, reward: float) -> None:
        simulator = GymSimulator(Scripted(rewards=(reward, 0.0)), 2, -1, 1)
        with pytest.raises(InvalidInputError, match=rf"returned the reward {reward:g}, outside \[-1, 1\]"):
            simulator.play(np.zeros((2, 4), dtype=np.int32), np.random.default_rng(0))

    def test_observation_outside_its_space(self) -> None:
        simulator = GymSimulator(Scripted(observations=(0, 3, 0)), 2, -1, 1)
        with pytest.raises(InvalidInputError, match="returned the observation 3, outside its own space"):
            simulator.play(np.zeros((2, 4), dtype=np.int32), np.random.default_rng(0))

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (np.zeros((3, 4), dtype=np.int32), r"policy has shape \(3, 4\)"),
            (np.zeros((2, 4)), "expected \\(2, 4\\) of whole numbers"),
            (np.full((2, 4), 2), r"outside 0\.\.1"),
            (np.full((2, 4), -1), r"outside 0\.\.1"),
        ],
    )
    def test_policy_of_another_shape(self, policy: Any, message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            GymSimulator(Scripted(), 2, -1, 1).play(policy, np.random.default_rng(0))

    def test_range_must_be_given(self) -> None:
        with pytest.raises(
            InvalidInputError, match=r"Blackjack-v1 does not say what range .* reward_low=.* reward_high="
        ):
            simulated("Blackjack-v1", 3, reward_low=-1)
        with pytest.raises(InvalidInputError, match="reward_low is 'low'"):
            simulated("Blackjack-v1", 3, reward_low="low", reward_high=1)


class TestRefusals:
    def test_actions_that_are_not_discrete(self) -> None:
        with pytest.raises(InvalidInputError, match=r"actions MultiDiscrete\(\[2\]\). Supported are"):
            GymSimulator(Scripted(action_space=spaces.MultiDiscrete([2])), 2, -1, 1)

    @pytest.mark.parametrize("id", ["FrozenLakes-v1", "FrozenLake-v99", "nobody/FrozenLake-v1", "///"])
    def test_unknown_id(self, id: str) -> None:
        with pytest.raises(UnknownNameError, match=f"^Gymnasium has no environment '{id}'. .*'FrozenLake-v1'"):
            make("gymnasium", id=id, horizon=3)

    @pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
    def test_old_version(self) -> None:
        gymnasium.register("shufflerl-test/Aged-v1", entry_point=lambda **_: Scripted())
        try:
            with pytest.raises(UnknownNameError, match="Gymnasium has no environment 'shufflerl-test/Aged-v0'"):
                make("gymnasium", id="shufflerl-test/Aged-v0", horizon=3)
        finally:
            del gymnasium.registry["shufflerl-test/Aged-v1"]

    @pytest.mark.parametrize("options", ["is_slippery=false", "[1]", "{", None])
    def test_options_that_are_not_an_object(self, options: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"^options is .*expected a JSON object"):
            bridged("FrozenLake-v1", 3, options=options)

    @pytest.mark.parametrize("options", ['{"colour": 1}', '{"map_name": "9x9"}', '{"max_episode_steps": 3}'])
    def test_options_the_environment_does_not_have(self, options: str) -> None:
        with pytest.raises(InvalidInputError, match="Gymnasium cannot make 'FrozenLake-v1' with options"):
            bridged("FrozenLake-v1", 3, options=options)

    def test_without_gymnasium(self) -> None:
        program = """
import sys
sys.modules["gymnasium"] = None
from shufflerl.envs import ENVIRONMENTS, make
from shufflerl.errors import MissingExtraError
assert list(ENVIRONMENTS.parameters("gymnasium"))[:2] == ["id", "horizon"]
for attempt in (lambda: make("gymnasium", id="FrozenLake-v1", horizon=3), lambda: __import__("shufflerl.envs.gym")):
    try:
        attempt()
    except MissingExtraError as reason:
        assert "pip install 'shufflerl[gymnasium]'" in str(reason)
    else:
        raise SystemExit("nothing was raised")
"""
        assert issubclass(MissingExtraError, ImportError)
        subprocess.run([sys.executable, "-c", program], check=True)
