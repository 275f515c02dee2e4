"""The paper's theorem, tested where it bites: its printed constants, and as many users as that takes.

Counts of 1e17 users cost what counts of 100 do, so the literal algorithm can be run until it eliminates.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from shufflerl import envs, planning, privatizers
from shufflerl.arrays import FloatArray
from shufflerl.history import History
from shufflerl.learners.radius import PaperRadius
from shufflerl.learners.sdp_pe import SDPPE
from shufflerl.loop import learn
from shufflerl.mdp import MDP
from shufflerl.population import CountPopulation
from tests.support.examples import all_policies, random_mdp

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")]

# RiverSwim's 24 cells have 18 that can be reached; 4 policies tie for the optimum, 2^6 ways each to act elsewhere.
ONLY_OPTIMA = 2 + 6


def _riverswim() -> MDP:
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    return mdp


@cache
def _literal(episodes: int, epsilon: float | None, policies: str = "enumerated") -> tuple[History, SDPPE]:
    mdp = _riverswim()
    users, noise, own = np.random.SeedSequence(1).spawn(3)
    learner = SDPPE(mdp.problem(episodes), own, constants="paper", policies=policies)
    privatizer = (
        privatizers.make("none")
        if epsilon is None
        else privatizers.make("shuffle", learner, epsilon=epsilon, delta=1e-5, seed=noise)
    )
    return learn(learner, CountPopulation(mdp, users), privatizer), learner


def _best_left(learner: SDPPE) -> float:
    mdp = _riverswim()
    return learner.policies.best(mdp.transitions, mdp.rewards, mdp.start, np.random.default_rng(0))[1]


@pytest.mark.parametrize("policies", ["enumerated", "product"])
@pytest.mark.parametrize("epsilon", [None, 1.0])
@pytest.mark.parametrize("episodes", [10**5, 10**12, 10**15, 10**17])
def test_the_optimum_stays_and_switches_are_few(episodes: int, epsilon: float | None, policies: str) -> None:
    history, learner = _literal(episodes, epsilon, policies)
    assert _best_left(learner) == pytest.approx(_riverswim().optimal_value, abs=1e-12)
    assert history.users.sum() == episodes
    assert history.switches <= (6 + 2) * len(learner.stages)


def test_nothing_can_be_eliminated_at_the_papers_own_number_of_episodes() -> None:
    """Correction 10: at K = 20,000 the radius exceeds the range of values ten thousandfold."""
    history, learner = _literal(20_000, 1.0)
    assert learner.policies.log2_size == 24
    assert (learner.trace[-1].radius or 0.0) > 1e4 * 6
    assert history.total_regret > 0.8 * 20_000 * _riverswim().optimal_value
    assert isinstance(learner.radius, PaperRadius)
    assert learner.radius.infrequent.all()


def test_where_elimination_begins_and_ends() -> None:
    assert _literal(10**8, None)[1].policies.log2_size == 24
    assert _literal(10**11, None)[1].policies.log2_size < 24
    assert _literal(10**11, 1.0)[1].policies.log2_size == 24
    assert _literal(10**13, 1.0)[1].policies.log2_size < 24
    assert _literal(10**13, None)[1].policies.log2_size == pytest.approx(ONLY_OPTIMA)
    assert _literal(10**16, 1.0)[1].policies.log2_size == pytest.approx(ONLY_OPTIMA)


def test_regret_bends_and_the_cost_of_privacy_is_additive() -> None:
    """Once it is paid, ten or a hundred times as many episodes hardly add to it."""
    costs = [_literal(k, 1.0)[0].total_regret - _literal(k, None)[0].total_regret for k in (10**15, 10**16, 10**17)]
    assert costs[2] < 1.5 * costs[0]
    slope = math.log10(_literal(10**17, 1.0)[0].total_regret / _literal(10**14, 1.0)[0].total_regret) / 3
    assert slope < 0.2  # before the bend it is 1: every episode costs as much as the one before
    early = math.log10(_literal(10**11, 1.0)[0].total_regret / _literal(10**9, 1.0)[0].total_regret) / 2
    assert early == pytest.approx(1.0, abs=0.05)


def test_the_cost_of_privacy_is_linear_in_its_precision() -> None:
    """E is about proportional to 1/epsilon here, and so is the regret at the plateau, within one doubling of stages."""
    plateaus = {epsilon: _literal(10**17, epsilon)[0].total_regret for epsilon in (2.0, 1.0, 0.25)}
    assert 1.2 < plateaus[1.0] / plateaus[2.0] < 3.4
    assert 2.4 < plateaus[0.25] / plateaus[1.0] < 6.8


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_values_are_estimated_within_the_radius_and_survivors_within_four(epsilon: float | None) -> None:
    """Lemma "total accuracy error" and what follows, for all 2^18 policies that differ where one can get."""
    mdp = _riverswim()
    _, learner = _literal(10**15, epsilon)
    for record in learner.trace[-8:]:
        assert record.radius is not None
        assert abs(record.best_value - mdp.optimal_value) <= record.radius
    worst = mdp.optimal_value - _worst_left(learner, mdp)
    assert learner.radius.last is not None
    assert worst <= 4 * learner.radius.last


def _worst_left(learner: SDPPE, mdp: MDP) -> float:
    policy, _ = learner.policies.best(mdp.transitions, -mdp.rewards, mdp.start, np.random.default_rng(0))
    return float(planning.policy_values(mdp.transitions, mdp.rewards, mdp.start, policy[None])[0])


# The lemmas, on random MDPs, where their premise holds: one long stage.


class _WatchedRadius(PaperRadius):
    """Keeps what a stage knew when it eliminated."""

    refined: FloatArray
    means: FloatArray

    def eliminate(self, policies, release, users):  # type: ignore[no-untyped-def]
        counts = self._private_counts(release)
        self.refined, self.means = self._absorbing(counts), counts.reward_means
        return super().eliminate(policies, release, users)


@pytest.mark.parametrize("epsilon", [None, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_lemmas_on_random_mdps(seed: int, epsilon: float | None) -> None:
    """Crude transitions multiplicatively close, bad trajectories rare, values within the radius: all or fail.

    Each stage may fail with probability 9 * 0.05 by the paper's count; its bounds are so wide that none does.
    """
    mdp = random_mdp(seed, horizon=3, states=2, actions=2, start=0)
    users, noise, own = np.random.SeedSequence(seed).spawn(3)
    learner = SDPPE(mdp.problem(3 * 10**9), own, constants="paper", first=10**9)
    learner.radius.__class__ = _WatchedRadius
    privatizer = (
        privatizers.make("none")
        if epsilon is None
        else privatizers.make("shuffle", learner, epsilon=epsilon, delta=1e-10, seed=noise)
    )
    learn(learner, CountPopulation(mdp, users), privatizer)
    radius = learner.radius
    assert isinstance(radius, _WatchedRadius)
    assert radius.last is not None
    absorbing = np.where(radius.infrequent, 0.0, mdp.transitions)
    assert not radius.infrequent.all()
    slack = 1 / mdp.horizon
    assert (absorbing <= (1 + slack) * radius.crude).all()
    assert (absorbing >= (1 - slack) * radius.crude).all()

    policies = all_policies(mdp)
    escaped = 1 - planning.visit_probabilities(absorbing, mdp.start, policies)[:, -1].sum(axis=-1)
    bias = radius.last - radius.radius(0.0, 10**9)  # X^3 A H^5 E iota / L, H times what bad trajectories may have
    assert escaped.max() <= radius.c1 * bias / mdp.horizon

    true = planning.policy_values(mdp.transitions, mdp.rewards, mdp.start, policies)
    estimated = planning.policy_values(radius.refined, radius.means, mdp.start, policies)
    assert np.abs(true - estimated).max() <= 0.2 * radius.last  # with room: the paper's constants are far from tight
