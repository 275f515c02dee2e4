"""Policy search: the contract on a table and on vectors, what noisy counts tell, and what it learns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shufflerl import envs, learn, learners, privatizers
from shufflerl.counts import Release
from shufflerl.envs.players import ControlTask
from shufflerl.errors import InvalidInputError
from shufflerl.experiments.setting import Setting, run
from shufflerl.learners.base import Learner
from shufflerl.learners.policy_search import PolicySearch
from shufflerl.learners.policy_search.cma import CMAES
from shufflerl.learners.policy_search.constants import C
from shufflerl.learners.policy_search.estimates import ArmEstimates
from shufflerl.learners.policy_search.features import state_features
from shufflerl.learners.policy_search.window import ReturnWindow
from shufflerl.mdp import MDP, Problem
from shufflerl.noise import NoNoise, PoissonNoise
from shufflerl.population import CountPopulation, ReturnPopulation
from shufflerl.privatizers.none import NoPrivacy
from shufflerl.returns import ReturnProblem, ReturnQuery
from shufflerl.testing import LearnerContract


class TestLinear(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return PolicySearch(problem, seed)


class TestPerceptron(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return PolicySearch(problem, seed, family="mlp", hidden=3, first=60)


class _Cliff(ControlTask):
    """Quick to play: a return that is largest at parameters of one, whatever is observed."""

    def _play(self, family, policies, given, rng):  # type: ignore[no-untyped-def]
        distance = ((policies[given] - 1.0) ** 2).mean(axis=1)
        return 500 * np.exp(-distance / 2) * rng.uniform(0.9, 1.0, len(given))


@pytest.mark.parametrize("privatizer", ["none", "shuffle", "central", "local-sampled"])
def test_it_climbs_under_every_model_of_privacy(privatizer: str) -> None:
    game = _Cliff("CartPole-v1")
    learner = PolicySearch(game.problem(60_000), 0)
    budget = {} if privatizer == "none" else {"epsilon": 2.0, "delta": 1e-6, "seed": 0}
    serving = privatizers.make(privatizer, learner, **budget)  # type: ignore[arg-type]
    history = learn(learner, ReturnPopulation(game, 0), serving)
    assert history.users.sum() == 60_000
    assert history.reward[-1] / history.users[-1] > 400 > history.reward[:3].sum() / history.users[:3].sum()
    assert len(history.mixture(len(history) - 1).weights) == 1


def test_a_range_that_is_not_known_is_found_by_the_first_batches() -> None:
    game = _Cliff("CartPole-v1")
    game.low = game.high = None
    public = game.problem(1)
    problem = ReturnProblem(public.inputs, public.actions, public.horizon, 40_000)
    learner = PolicySearch(problem, 0, first=200)
    serving = privatizers.make("shuffle", learner, epsilon=2.0, delta=1e-6, seed=0)
    history = learn(learner, ReturnPopulation(game, 0), serving)
    assert history.reward[-1] / history.users[-1] > 400


def test_what_counts_tell_is_right_on_average_and_as_uncertain_as_they_say() -> None:
    """Five deviations of means of 4000 batches: by chance below 1e-5."""
    rng, expected, noise = np.random.default_rng(5), np.full(6, 15.0), 9.0
    chances = np.linspace(0.4, 0.6, 6)[:, None] * [0, 1] + np.linspace(0.6, 0.4, 6)[:, None] * [1, 0]
    told = []
    for _ in range(4000):
        arms = rng.multinomial(90, np.full(6, 1 / 6))
        counts = np.stack([rng.multinomial(users, law) for users, law in zip(arms, chances, strict=True)])
        told.append(ArmEstimates.of(counts + rng.normal(0, 3, counts.shape), expected, noise))
    estimates = np.array([one.arms for one in told])
    truth = chances[:, 1] - chances[:, 1].mean()
    stated = float(np.mean([one.variance for one in told]))
    assert np.abs(estimates.mean(axis=0) - truth).max() < 5 * np.sqrt(stated / 4000) + 0.1 * np.abs(truth).max()
    assert estimates.var(axis=0).mean() == pytest.approx(stated, rel=0.15)


def test_no_more_than_all_of_the_differences_is_the_arms_own() -> None:
    """Half of the arms return the least and half the most: all of the spread of users is that of arms."""
    counts = np.zeros((6, 4))
    counts[:3, 0] = counts[3:, -1] = 15.0
    assert ArmEstimates.of(counts, np.full(6, 15.0), 0.5).reliability == 1.0


def test_rare_bad_returns_count_in_full_where_the_estimate_is_unbiased() -> None:
    """Of 100 users of one arm five return the least, of the other none. Five deviations: by chance below 1e-6."""
    rng, expected, noise = np.random.default_rng(6), np.full(2, 100.0), 16.0
    laws = np.array([[0.05, 0.0, 0.45, 0.5], [0.0, 0.05, 0.45, 0.5]])
    told: dict[bool, list[ArmEstimates]] = {True: [], False: []}
    for _ in range(4000):
        counts = np.stack([rng.multinomial(100, law) for law in laws]) + rng.normal(0, 4, laws.shape)
        for unbiased, estimates in told.items():
            estimates.append(ArmEstimates.of(counts, expected, noise, unbiased))
    truth = 0.05 / 3
    fair, wary = (np.array([one.arms[1] - one.arms[0] for one in told[unbiased]]) for unbiased in (True, False))
    assert abs(fair.mean() - truth) < 5 * fair.std() / math.sqrt(4000)
    assert wary.mean() < 0.6 * truth
    assert wary.std() < fair.std()


def test_cma_es_finds_the_top_of_a_slanted_hill() -> None:
    rng, search = np.random.default_rng(2), CMAES(6, 12)
    slant, top = np.diag(10.0 ** np.arange(-1.5, 1.5, 0.5)), np.ones(6)
    for _ in range(400):
        draws = rng.standard_normal((12, 6))
        placed = search.place(draws)
        search.update(draws, -(((placed - top) @ slant) ** 2).sum(axis=1))
    np.testing.assert_allclose(search.mean, top, atol=1e-3)


def test_a_tabular_learner_says_what_to_do_about_vectors_and_bad_families_are_refused() -> None:
    problem = ControlTask("CartPole-v1").problem(100)
    with pytest.raises(InvalidInputError, match=r"observations here are vectors of 4 numbers; use the learner policy"):
        learners.make("optimistic", problem, 0)
    with pytest.raises(InvalidInputError, match="family is 'forest'; expected one of: linear, mlp"):
        PolicySearch(problem, 0, family="forest")
    with pytest.raises(InvalidInputError, match=r"parameters; expected at most 100,000. Use smaller layers"):
        PolicySearch(problem, 0, family="mlp", hidden=50_000)


def test_what_a_table_returns_at_most_may_be_stated() -> None:
    """A lake of 200 steps pays once: searches would have to find that out."""
    lake = envs.make("FrozenLake8x8-v1")
    assert isinstance(lake, MDP)
    problem = lake.problem(1_000)
    learner = PolicySearch(problem, 0, highest=1)
    learn(learner, CountPopulation(lake, 0), NoPrivacy(), batches=1)
    assert learner.progress.high == 1.0
    assert learner.parameters["highest"] == 1.0
    with pytest.raises(InvalidInputError, match=r"highest is 201; expected a finite number in \[0.0002, 200\]"):
        PolicySearch(problem, 0, highest=201)
    with pytest.raises(InvalidInputError, match=r"highest is for problems of states and actions; expected none"):
        PolicySearch(ControlTask("CartPole-v1").problem(100), 0, highest=1.0)


@pytest.mark.slow(2)
def test_cartpole_is_learned_under_the_noise_of_users() -> None:
    done = run(Setting("CartPole-v1", "policy-search", "shuffle", 12_000, epsilon=1.0, delta=1e-6), 0)
    assert done.final_return is not None
    assert done.final_return > 475
    assert done.certificate is not None
    assert done.certificate.changed_counters == 2


def test_without_noise_returns_are_told_finely() -> None:
    game = ControlTask("MountainCar-v0")
    learner, population = PolicySearch(game.problem(500), 0), ReturnPopulation(game, 0)
    learn(learner, population, NoPrivacy(), batches=1)
    batch = learner.next_batch()
    assert batch is not None
    assert isinstance(batch.query, ReturnQuery)
    assert len(batch.query.points) == C.fine_points
    assert isinstance(envs.make("MountainCar-v0"), ControlTask)


def test_the_window_closes_on_the_lowest_return_and_opens_again_when_better_ones_are_found() -> None:
    """Where it was kept symmetric about the mean it could not open again."""
    low, high = -200.0, 0.0

    def adapt(times: int, shares: list[float], mean: float) -> None:
        nonlocal low, high
        for _ in range(times):
            low, high = ReturnWindow(low, high, -200.0, 0.0, 0.5).adapted(np.array(shares), mean, exact=False)

    adapt(60, [1.0, 0.0, 0.0, 0.0], 0.1)
    assert (low, high) == pytest.approx((-200.0, -199.5))
    adapt(30, [0.9, 0.0, 0.0, 0.1], 0.5)
    assert low == -200
    assert high > -199
    adapt(30, [0.0, 0.0, 0.0, 1.0], 1.0)
    assert high == 0


def test_one_policy_that_stands_out_of_equals_is_followed_alone() -> None:
    rng, search = np.random.default_rng(3), CMAES(6, 12)
    draws = rng.standard_normal((12, 6))
    search.update(draws, np.array([0.0] * 7 + [1.0] + [0.0] * 4))
    np.testing.assert_allclose(search.mean, draws[7])
    search.update(draws, np.zeros(12))
    assert search.updates == 1


def test_users_are_kept_for_the_check_and_what_it_chose() -> None:
    game = ControlTask("MountainCar-v0")
    learner, population = PolicySearch(game.problem(20_000), 1), ReturnPopulation(game, 0)
    serving = privatizers.make("shuffle", learner, epsilon=1.0, delta=1e-6, seed=0)
    phases: dict[str, int] = {}
    while (batch := learner.next_batch()) is not None:
        phases.setdefault(learner.progress.phase, learner.episodes_left)
        learner.observe(serving.release(population.play(batch)))
    assert 2_000 < phases["check"] < 3_000
    assert 0 < phases["commit"] < phases["check"] / 4


def test_an_early_check_asks_many_users_even_where_no_noise_does() -> None:
    """Returns differ by themselves, and what is chosen by a handful of users is chosen by chance."""
    learner = PolicySearch(ControlTask("CartPole-v1").problem(20_000), 0)
    learner.expect(NoNoise())
    learner.progress.value = 500.0
    learner.conclude(15_000)
    assert learner.progress.phase == "check"
    assert 50 * len(learner.candidates) <= learner.progress.users <= 1_000


def test_a_check_takes_a_tenth_of_its_search_and_four_of_the_smallest_batches_at_least() -> None:
    """What is compared is good, so that it costs little to tell it apart; at last half of all users left do."""
    learner = PolicySearch(ControlTask("CartPole-v1").problem(50_000), 0)
    learner.expect(PoissonNoise(4.0))
    progress = learner.progress

    def asked(searched: float, left: int) -> float:
        progress.phase, progress.value, progress.track = "search", 500.0, [[searched, 500.0]]
        learner.conclude(left)
        return progress.users

    assert 4 * progress.base < 1_000
    assert asked(20_000, 20_000) == pytest.approx(2_000)
    assert asked(1_000, 40_000) == 4 * progress.base
    assert asked(20_000, 7_000) == 3_500


@pytest.mark.parametrize(
    ("size", "left", "value", "phase"),
    [
        (500_000, 330_000, 100.0, "search"),  # less than 35% of all users are spent
        (500_000, 320_000, 100.0, "commit"),
        (50_000, 20_000, 100.0, "search"),  # or fewer than two hundred of the smallest batches
        (50_000, 14_000, 100.0, "commit"),  # unless too few are left for another and its check
        (50_000, 40_000, 499.0, "commit"),  # or nothing is left to gain
    ],
)
def test_another_search_begins_while_few_users_are_spent(size: int, left: int, value: float, phase: str) -> None:
    learner = PolicySearch(ControlTask("CartPole-v1").problem(size), 0)
    learner.expect(PoissonNoise(16.0))
    assert 30_000 < 200 * learner.progress.base < 50_000
    learner.progress.value = value
    learner.commit_or_search(left)
    assert learner.progress.phase == phase


def test_one_of_two_averaged_policies_goes_back_further() -> None:
    game = _Cliff("CartPole-v1")
    learner, population = PolicySearch(game.problem(30_000), 0), ReturnPopulation(game, 0)
    serving = privatizers.make("shuffle", learner, epsilon=4.0, delta=1e-6, seed=0)
    while learner.search.updates < 8:
        batch = learner.next_batch()
        assert batch is not None
        learner.observe(serving.release(population.play(batch)))
    nearer, further = np.linalg.norm(learner.search.mean - learner.averages, axis=1)
    assert 0 < nearer < 0.8 * further


def test_it_is_saved_and_restored_exactly_through_checks_and_searches_anew() -> None:
    game = _Cliff("CartPole-v1")
    learner, population = PolicySearch(game.problem(30_000), 0), ReturnPopulation(game, 0)
    serving = privatizers.make("shuffle", learner, epsilon=2.0, delta=1e-6, seed=0)
    phases = ["search"]
    while (batch := learner.next_batch()) is not None:
        restored = PolicySearch(game.problem(30_000), 7)
        restored.restore(learner.save())
        assert restored.save() == learner.save()
        learner, phases = restored, [*phases, restored.progress.phase]
        learner.observe(serving.release(population.play(batch)))
        if len(phases) == 15:
            learner.progress.risen, learner.progress.highest = True, 500.0  # so that nothing better is found
            learner.progress.waited = C.patience
    changes = [phase for before, phase in itertools.pairwise(phases) if phase != before]
    assert changes[:2] == ["check", "search"]
    assert changes[-1] == "commit"


def test_the_expected_noise_sizes_the_first_batch_and_without_any_users_play_policies_of_their_own() -> None:
    game = ControlTask("CartPole-v1")
    learner = PolicySearch(game.problem(500), 0)
    learner.expect(NoNoise())
    batch = learner.next_batch()
    assert batch is not None
    assert isinstance(batch.query, ReturnQuery)
    assert (batch.users, batch.query.policies) == (8, 128)  # as many users as `cma` has policies
    noisy = PolicySearch(game.problem(20_000), 0)
    serving = privatizers.make("shuffle", noisy, epsilon=1.0, delta=1e-6, seed=0)
    noise = serving.expected_noise(noisy.widest_query)
    assert noise is not None
    noisy.expect(noise)
    first = noisy.next_batch()
    assert first is not None
    assert first.users == noisy.progress.base > 200


@pytest.mark.parametrize(("hidden", "paired"), [(None, True), (16, False)])
def test_policies_lie_in_pairs_around_the_mean_where_there_are_few_parameters(hidden: int | None, paired: bool) -> None:
    family = {} if hidden is None else {"family": "mlp", "hidden": hidden}
    learner = PolicySearch(ControlTask("CartPole-v1").problem(20_000), 0, **family)  # type: ignore[arg-type]
    learner.expect(PoissonNoise(10.0))
    batch = learner.next_batch()
    assert batch is not None
    assert len(batch.mixture.weights) == C.arms
    assert (np.abs(batch.mixture.policies.mean(axis=0)).max() < 1e-6) == paired


def test_a_search_whose_returns_have_fallen_and_never_risen_begins_anew() -> None:
    learner = PolicySearch(ControlTask("CartPole-v1").problem(20_000), 0)
    learner.expect(PoissonNoise(10.0))
    learner.search.mean = np.ones(learner.network.size)
    progress = learner.progress
    progress.value, progress.highest, progress.error, progress.waited = 40.0, 60.0, 5.0, C.hopeless
    learner.conclude(15_000)
    assert learner.search.mean.all()
    progress.waited += 1
    learner.conclude(15_000)
    assert not learner.search.mean.any()
    assert progress.phase == "search"


@pytest.mark.parametrize(
    ("later", "left", "chosen", "noise", "phase"),
    [
        (204.0, 15_000, 0, 10.0, "check"),  # of a rise from 100 to 204 the second half brought 4
        (204.0, 9_000, 0, 10.0, "search"),  # too late for another search from the start
        (204.0, 9_000, 1, 10.0, "check"),  # this is another already
        (230.0, 15_000, 0, 10.0, "search"),  # it still rises
        (204.0, 15_000, 0, 0.0, "search"),  # without noise batches are small, and a rise takes many
    ],
)
def test_a_search_that_hardly_rises_any_more_is_checked(
    later: float, left: int, chosen: int, noise: float, phase: str
) -> None:
    learner = PolicySearch(ControlTask("CartPole-v1").problem(20_000), 0)
    learner.expect(PoissonNoise(noise) if noise else NoNoise())
    progress = learner.progress
    learner.champion = np.ones((chosen, learner.network.size))
    progress.risen, progress.lowest, progress.value, progress.stalled = True, 100.0, later, True
    steady = [200.0] * C.min_track
    progress.track = [[200.0 * (i + 1), value] for i, value in enumerate([*steady, later])]
    progress.highest = later
    learner.conclude(left)
    assert progress.phase == phase


def test_batches_without_noise_are_surer_than_those_with_it() -> None:
    """Policies differ by a tenth of the window, and half of all users return the least, half the most."""
    sizes = []
    for noise in (NoNoise(), PoissonNoise(0.01)):
        learner = PolicySearch(ControlTask("MountainCar-v0").problem(10**6), 0)
        learner.expect(noise)
        learner.progress.stalled, learner.progress.signal, learner.progress.users = True, 25.0**2, 10.0**4
        batch = learner.next_batch()
        assert batch is not None
        assert isinstance(batch.query, ReturnQuery)
        counts = np.zeros((C.arms, len(batch.query.points)))
        counts[:, [0, -1]] = batch.users / C.arms / 2
        learner.observe(Release(batch, counts.ravel(), noise, noise.variance))
        sizes.append(learner.progress.users)
    assert sizes[0] > 2.5 * sizes[1] > 0


def test_a_check_asks_for_the_returns_of_the_one_chosen_before_too() -> None:
    """Where a later search had found nothing, all returns of the better one were above its window."""
    learner = PolicySearch(ControlTask("MountainCar-v0").problem(20_000), 0)
    learner.expect(PoissonNoise(10.0))
    progress = learner.progress
    learner.champion, progress.checked = np.ones((1, learner.network.size)), (-180.0, -90.0)
    progress.low, progress.high, progress.value = -200.0, -199.5, -200.0
    learner.conclude(1_000)
    assert progress.phase == "check"
    assert (progress.low, progress.high) == (-200.0, -90.0)
    np.testing.assert_array_equal(learner.candidates[0], learner.champion[0])


def test_states_speak_for_those_that_they_lead_to_where_that_is_known() -> None:
    support = np.zeros((1, 5, 2, 5), dtype=bool)
    for x in range(5):
        support[0, x, 0, max(x - 1, 0)] = support[0, x, 1, min(x + 1, 4)] = True
    chain = state_features(Problem(2, 5, 2, 10, support=support))
    assert (np.diff(chain[0]) < 0).all()
    np.testing.assert_allclose((chain**2).sum(axis=1).mean(), 1.0)
    np.testing.assert_array_equal(state_features(Problem(2, 5, 2, 10)), np.eye(5))


@pytest.mark.slow(3)
def test_a_large_lake_is_crossed_under_the_noise_of_servers() -> None:
    """Without neighbours no policy of 195 logits is found that ever arrives."""
    noise = {"noise": "servers"}
    setting = Setting("FrozenLake8x8-v1", "policy-search", "shuffle", 60_000, 1.0, 1e-6, privatizer_parameters=noise)
    done = run(setting, 1003)
    assert done.history.reward[-1] / done.history.users[-1] > 0.6
