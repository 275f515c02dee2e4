"""What the paper prints, number by number: thresholds, margins, mixtures and ties, each at its very boundary."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from shufflerl import coverage, policy_sets, privatizers
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.counts import Batch, CountQuery, Release
from shufflerl.coverage import Design, coverage_design
from shufflerl.estimation import precision
from shufflerl.estimation.model import Model
from shufflerl.learners import sdp_pe
from shufflerl.learners.radius import PaperRadius
from shufflerl.learners.radius_kernels import bounded_plan
from shufflerl.learners.sdp_pe import SDPPE
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Mixture, Problem
from shufflerl.noise import GaussianNoise
from shufflerl.planning import occupancy, visit_probabilities
from shufflerl.policy_sets.base import PolicySet, Search
from shufflerl.population import CountPopulation
from tests.policy_sets.test_policy_sets import everything, taken
from tests.support.examples import all_policies, random_mdp

NOISE, FAILURE = GaussianNoise(10.0), 0.05


def _release_precision(query: CountQuery, stages: int) -> float:
    """E of one release, when all releases of the run (H in each stage) are to hold together."""
    return precision(NOISE, query, FAILURE / (stages * query.horizon))


def test_tuples_are_infrequent_up_to_c1_e_h2_iota() -> None:
    """Algorithm 2: at most C_1 E H^2 iota private counts, C_1 = 6, iota = log(2 H A K / delta)."""
    horizon, states, actions, episodes = 3, 2, 2, 10**6
    learner = SDPPE(Problem(horizon, states, actions, episodes, np.eye(states)[0]), 0, constants="paper")
    assert isinstance(learner.radius, PaperRadius)
    frequent = np.random.default_rng(0).random((horizon - 1, states, actions, states)) < 0.5
    for step in range(horizon - 1):
        batch = learner.next_batch()
        assert batch is not None
        assert batch.table_query.transition_steps == (step,)
        e = _release_precision(batch.table_query, len(learner.stages))
        threshold = 6 * e * horizon**2 * math.log(2 * horizon * actions * episodes / FAILURE)
        private = threshold * np.where(frequent[step], 1 + 1e-6, 1 - 1e-6)
        noisy = private - e / (2 * states)  # what making the counts positive adds to each
        learner.observe(Release(batch, noisy.ravel(), NOISE, NOISE.variance))
        assert (learner.radius.infrequent[step] == ~frequent[step]).all()
        expected = np.where(frequent[step], private / private.sum(axis=-1, keepdims=True), 0.0)
        np.testing.assert_allclose(learner.radius.crude[step], expected, rtol=1e-9)


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_policies_go_at_twice_the_radius(kind: str) -> None:
    """Algorithm 1: 2 C (sqrt(X A H^3 iota / L) + X^3 A H^5 E iota / L), C = 1, where the values are known."""
    horizon, states, actions, length = 2, 2, 6, 10**9
    problem = Problem(horizon, states, actions, 10**10, np.eye(states)[0])
    learner = SDPPE(problem, 0, constants="paper", policies=kind)
    radius, query = learner.radius, CountQuery.everything(problem)
    assert isinstance(radius, PaperRadius)
    radius.infrequent[:] = False
    iota = math.log(2 * horizon * actions * problem.episodes / FAILURE)
    privacy = states**3 * actions * horizon**5 * _release_precision(query, len(learner.stages)) * iota / length
    xi = math.sqrt(states * actions * horizon**3 * iota / length) + privacy
    assert 0.1 < privacy / xi < 0.9  # both terms matter

    # Every cell is visited so often that the noise allowed for is nothing; all that matters is the first action.
    visits, worse = 1e15, np.array([0.0, 1.01, 1.5, 1.999, 2.001, 3.0])
    rewards = np.full((horizon, states, actions), 0.5)
    rewards[0, 0] -= worse * xi
    moves = np.full((horizon - 1, states, actions, states), visits / states)
    values = query.gather(moves, visits * np.stack([1 - rewards, rewards], axis=-1))
    batch = Batch(0, 3 * length, Mixture.single(np.zeros((horizon, states), dtype=int)), query)
    left, best = radius.eliminate(learner.policies, Release(batch, values, NOISE, NOISE.variance), batch.users)
    assert radius.last == pytest.approx(xi, rel=1e-12)
    assert best == pytest.approx(1.0, abs=1e-6)
    policies = np.zeros((actions, horizon, states), dtype=np.int32)
    policies[:, 0, 0] = np.arange(actions)
    assert (left.contains(policies) == (worse < 2)).all()


def _weights(*parts: tuple[float, Mixture]) -> dict[bytes, float]:
    """How likely each policy is, whatever the order and however often it is listed."""
    found: defaultdict[bytes, float] = defaultdict(float)
    for share, mixture in parts:
        for policy, weight in zip(mixture.policies, mixture.weights, strict=True):
            found[policy.tobytes()] += share * float(weight)
    return dict(found)


def _worst_coverage(deployed: Mixture, inside: PolicyArray, model: FloatArray, mdp: MDP) -> tuple[float, int]:
    """The largest sum of d^policy / d^deployed over the policies inside, and over how many triples: by listing."""
    chances = taken(visit_probabilities(model, mdp.start, inside), inside, mdp.n_actions)
    reachable = (chances > 0).any(axis=0)
    with np.errstate(divide="ignore"):
        inverse = 1 / occupancy(model, mdp.start, deployed, mdp.n_actions)[reachable]
    return float((chances[:, reachable] * inverse).sum(axis=1).max()), int(reachable.sum())


Fine = tuple[SDPPE, Batch, Design, list[tuple[int, PolicyArray]]]


def _fine_batches(monkeypatch: pytest.MonkeyPatch, mdp: MDP, episodes: int, **options: Any) -> Iterator[Fine]:
    """The batches that deploy a design, with it and their stage's policy covers by step, before they are answered."""
    designs: list[Design] = []
    explored: list[tuple[int, PolicyArray]] = []
    policy_cover = PolicySet.policy_cover

    def design(*args: Any, **kwargs: Any) -> Design:
        designs.append(coverage_design(*args, **kwargs))
        return designs[-1]

    def explore(self: PolicySet, model: FloatArray, start: FloatArray, step: int, rng: np.random.Generator) -> Any:
        policies, reach = policy_cover(self, model, start, step, rng)
        explored.append((step, policies))
        return policies, reach

    monkeypatch.setattr(sdp_pe, "coverage_design", design)
    monkeypatch.setattr(PolicySet, "policy_cover", explore)
    learner = SDPPE(mdp.problem(episodes), 0, **options)
    population, privatizer = CountPopulation(mdp, 0), privatizers.make("none")
    while (batch := learner.next_batch()) is not None:
        if designs:
            yield learner, batch, designs.pop(), explored.copy()
            explored.clear()
        learner.observe(privatizer.release(population.play(batch)))


@pytest.mark.parametrize("kind", policy_sets.KINDS)
def test_fine_exploration_is_half_the_design_and_half_all_explorers(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Algorithm 3, line 2, with Algorithm 2's uniform mixture over all (h, x, a); the design covers (correction 6)."""
    mdp = random_mdp(3, horizon=3, states=3, actions=2, start=0)
    everyone, most = all_policies(mdp), 0
    for learner, batch, design, explored in _fine_batches(monkeypatch, mdp, 10**9, constants="paper", policies=kind):
        assert [(step, len(policies)) for step, policies in explored] == [(0, 6), (1, 6), (2, 6)]
        auxiliary = Mixture(np.concatenate([policies for _, policies in explored]), np.full(18, 1 / 18))
        assert len(batch.mixture.weights) == len(design.mixture.weights) + 18
        assert _weights((1.0, batch.mixture)) == pytest.approx(_weights((0.5, design.mixture), (0.5, auxiliary)))
        inside, model = everyone[learner.policies.contains(everyone)], learner.radius.exploration_model
        worst, triples = _worst_coverage(design.mixture, inside, model, mdp)
        assert worst <= 1.05 * triples + 1e-9
        most = max(most, triples)
    assert most == 2 + 6 + 6  # all that can be reached from the only first state


def test_the_practical_fine_batch_deploys_the_whole_design(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correction 6: a mixture covers what none of its policies does alone."""
    mdp = random_mdp(3, horizon=3, states=3, actions=2, start=0)
    everyone, several = all_policies(mdp), 0
    for learner, batch, design, _ in _fine_batches(monkeypatch, mdp, 20_000):
        deployed, wanted = _weights((1.0, batch.mixture)), _weights((1.0, design.mixture))
        shares = np.array([deployed.get(policy, 0.0) / weight for policy, weight in wanted.items()])
        share = float(shares.min())
        assert share > 0
        # Besides the design there are the incumbent and the optimistic policy; they may be in it too.
        assert (~np.isclose(shares, share)).sum() + len(deployed.keys() - wanted.keys()) <= 2
        inside, model = everyone[learner.policies.contains(everyone)], learner.radius.exploration_model
        worst, triples = _worst_coverage(batch.mixture, inside, model, mdp)
        assert worst <= 1.05 * triples / share + 1e-9
        several += len(wanted) > 1
    assert several >= 3


@pytest.mark.parametrize("kind", policy_sets.KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_asked_of_what_no_policy_reaches(monkeypatch: pytest.MonkeyPatch, kind: str, seed: int) -> None:
    """Correction 6, 0/0 = 0: absorbed cells, and later those that only eliminated policies reach, are masked."""
    shape, rng = (4, 3, 2), np.random.default_rng(seed)
    mdp = random_mdp(seed, *shape, start=0)
    model = np.where(rng.random(mdp.transitions.shape) < 0.4, mdp.transitions, 0.0)
    model[:, :, :, 2] *= [0.0, 1.0]  # the last state is reached by the second action only, which is to be given up
    asked: list[FloatArray] = []
    search = PolicySet.search

    def spy(self: PolicySet, transitions: FloatArray, start: FloatArray) -> Search:
        found = search(self, transitions, start)

        def searched(objective: FloatArray, rng: np.random.Generator) -> tuple[PolicyArray, float]:
            asked.append(objective.copy())
            return found(objective, rng)

        return searched

    monkeypatch.setattr(PolicySet, "search", spy)
    found, policies = policy_sets.make(kind, *shape, mdp.start), everything(shape)
    for _ in range(2):
        inside = policies[found.contains(policies)]
        chances = taken(visit_probabilities(model, mdp.start, inside), inside, shape[2])
        reachable = (chances > 0).any(axis=0)
        asked.clear()
        design = coverage.coverage_design(found, model, mdp.start, rng)
        assert design.triples == reachable.sum() < reachable.size
        assert _worst_coverage(design.mixture, inside, model, mdp)[0] <= 1.05 * design.triples + 1e-9
        assert all((objective[~reachable] == 0).all() for objective in asked)
        assert (asked[-1][reachable] >= 1 - 1e-9).all()  # 1/d, of all that count
        found = found.eliminate(model, np.broadcast_to([1.0, 0.0], shape), mdp.start, 0.5)
    assert len(inside) < len(policies)


@pytest.mark.parametrize("deviations", [-1.0, 0.0, 0.25])
def test_ties_of_bounded_plans_are_broken_evenly(deviations: float) -> None:
    """Correction 9: all 81 policies are equally likely; a right kernel fails with probability 1e-6 per case."""
    shape = (2, 2, 3)
    model = Model(
        transitions=np.zeros((1, 2, 3, 2)),
        rewards=np.zeros(shape),
        known=np.zeros(shape, dtype=bool),
        inverse_ess=np.ones(shape),
        noise_variance=np.ones(shape),
    )
    drawn = np.zeros(81)
    for seed in range(8100):
        policy = bounded_plan(np.random.default_rng(seed), np.ones(shape, dtype=bool), deviations, model).policy
        drawn[np.ravel_multi_index(tuple(policy.ravel()), (3,) * 4)] += 1
    assert chisquare(drawn).pvalue > 1e-6


@pytest.mark.slow
def test_a_last_stage_that_commits_judges_nothing() -> None:
    """Two roads, the second better by 0.005: committing to one says nothing of the other, which must stay."""
    transitions = np.zeros((1, 3, 2, 3))
    transitions[0, :, 0, 1] = transitions[0, :, 1, 2] = 1.0
    rewards = np.zeros((2, 3, 2))
    rewards[1, 1], rewards[1, 2] = 0.5, 0.505
    mdp = MDP(transitions, rewards, np.eye(3)[0])
    for seed in range(10):
        users, noise, own = np.random.SeedSequence(seed).spawn(3)
        learner = SDPPE(mdp.problem(10**10), own, constants="paper", last_stage="commit")
        privatizer = privatizers.make("shuffle", learner, epsilon=1.0, delta=1e-12, seed=noise)
        learn(learner, CountPopulation(mdp, users), privatizer)
        value = learner.policies.best(mdp.transitions, mdp.rewards, mdp.start, np.random.default_rng(0))[1]
        assert value == pytest.approx(mdp.optimal_value)
        assert learner.trace[-1].eliminated == 0


@pytest.mark.parametrize("constants", sorted(sdp_pe.PRESETS))
@pytest.mark.parametrize("base", [1e308, sys.float_info.max])
@pytest.mark.parametrize("episodes", [1000, 10**18])
def test_stages_that_grow_beyond_all_bounds_are_the_last(constants: str, base: float, episodes: int) -> None:
    learner = SDPPE(random_mdp(0, start=0).problem(episodes), 0, constants=constants, policies="product", base=base)
    first = int(sdp_pe.PRESETS[constants]["first"])
    assert learner.stages == [3 * first, episodes - 3 * first]
