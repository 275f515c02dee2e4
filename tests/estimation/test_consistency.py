"""Post-processing of a release: visits from both families, the precision E, and the paper's private counts.

Every statistical test here fails by chance with probability below 1e-4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse, stats

from shufflerl import learners
from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import Batch, CountQuery, Counts, Release
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import InvalidInputError
from shufflerl.estimation import PrivateCounts, consistency, consistent, precision, visits
from shufflerl.estimation.consistency import nearest, raised
from shufflerl.estimation.rows import Terms, chernoff, joint_bound, successors, sums, tail, visit_terms
from shufflerl.mdp import MDP
from shufflerl.noise import (
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoiseSum,
    NoNoise,
    PoissonNoise,
    TruncatedLaplace,
    Whole,
)
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian
from shufflerl.privatizers.base import Workload
from shufflerl.privatizers.local import LocalSampled
from tests.support.examples import mdps, random_mdp, random_mixture

LEVEL = 1e-4
FAILURE = 0.05
RIVER = riverswim(np.random.default_rng(0))


def batch_of(mdp: MDP, transition_steps: range | list[int], reward_steps: range | list[int], users: int = 300) -> Batch:
    query = CountQuery(mdp.problem(users), transition_steps, reward_steps)
    return Batch(0, users, random_mixture(mdp, 4, seed=3), query)


def released(counts: Counts, noise: Noise, rng: np.random.Generator) -> Release:
    values = counts.values + noise.sample(rng, counts.batch.query.size)
    return Release(counts.batch, values, noise, noise.variance)


QUERIES = {
    "everything": batch_of(RIVER, range(5), range(6)),
    "known support": batch_of(random_mdp(8, horizon=4, states=4, sparse=True), range(3), range(4)),
    "one crude layer": batch_of(RIVER, [2], []),
    "families at different steps": batch_of(RIVER, [0, 2], [1, 2]),
    "rewards only": batch_of(RIVER, [], [0, 5]),
}


# --- Visits ----------------------------------------------------------------------------------------------------------


def test_exact_counts_give_exact_visits() -> None:
    for batch in QUERIES.values():
        counts = CountPopulation(RIVER if batch.table_query.horizon == 6 else random_mdp(8, 4, 4, sparse=True), 1).play(
            batch
        )
        estimate = visits(released(counts, NoNoise(), np.random.default_rng(0))).estimate
        transitions, rewards = batch.table_query.scatter(counts.values.astype(float))
        for step in range(batch.table_query.horizon):
            if step in batch.table_query.transition_steps:
                np.testing.assert_array_equal(estimate[step], transitions[step].sum(axis=-1))
            elif step in batch.table_query.reward_steps:
                np.testing.assert_array_equal(estimate[step], rewards[step].sum(axis=-1))
            else:
                assert np.isnan(estimate[step]).all()


@pytest.mark.parametrize("batch", QUERIES.values(), ids=QUERIES)
def test_visits_are_unbiased_with_the_stated_variance(batch: Batch) -> None:
    law, draws = PoissonNoise(33.3), 4000
    rng = np.random.default_rng(5)
    nobody = Counts(batch, np.zeros(batch.query.size, dtype=np.int64))
    found = [visits(released(nobody, law, rng)) for _ in range(draws)]
    variance = found[0].variance
    asked = ~np.isnan(variance)
    steps = {*batch.table_query.transition_steps, *batch.table_query.reward_steps}
    assert set(np.flatnonzero(asked.any(axis=(1, 2)))) == steps
    errors = np.stack([one.estimate[asked] for one in found])
    assert not np.isnan(errors).any()
    bar = stats.norm.isf(LEVEL / 4 / errors.shape[1])
    assert (np.abs(errors.mean(axis=0)) <= bar * np.sqrt(variance[asked] / draws)).all()
    # The variance of a mean of squares of nearly normal errors, a tenth more for their heavier tails.
    assert (np.abs((errors**2).mean(axis=0) / variance[asked] - 1) <= 1.1 * bar * math.sqrt(2 / draws)).all()


def test_the_weights_are_the_best() -> None:
    """Inverse-variance weights of D counters and two counters; the variance is their sum's inverse."""
    batch = QUERIES["known support"]
    noise = GaussianNoise(3.0)
    rng = np.random.default_rng(2)
    release = Release(batch, rng.normal(size=batch.query.size), noise, noise.variance)
    transitions, rewards = release.tables
    found, counted = visits(release), successors(batch.table_query)
    assert len(np.unique(counted[:-1])) > 2
    np.testing.assert_array_equal(counted[-1], 0)
    for h, x, a in np.ndindex(3, 4, 2):
        weights = np.array([1 / (9 * counted[h, x, a]), 1 / (9 * 2)])
        both = np.array([transitions[h, x, a].sum(), rewards[h, x, a].sum()])
        assert found.estimate[h, x, a] == pytest.approx(weights @ both / weights.sum(), rel=1e-12, abs=1e-12)
        assert found.variance[h, x, a] == pytest.approx(1 / weights.sum(), rel=1e-12)
    np.testing.assert_array_equal(found.variance[-1], 2 * 9)


# --- Tails and precision ---------------------------------------------------------------------------------------------

LATTICES = [PoissonNoise(0.4), PoissonNoise(21.7), BinomialNoise(60, 0.5), BinomialNoise(400, 0.02)]


def atoms(law: PoissonNoise | BinomialNoise, copies: int) -> tuple[FloatArray, FloatArray]:
    """The law of the sum of copies by the textbook: values and masses down to 1e-40."""
    counts = np.arange(copies * law.mean + 40 * math.sqrt(copies * law.variance) + 60)
    if isinstance(law, PoissonNoise):
        masses = stats.poisson.pmf(counts, copies * law.mean)
    else:
        masses = stats.binom.pmf(counts, copies * law.trials, law.probability)
    return counts - copies * law.mean, masses


def exact_tail(law: PoissonNoise | BinomialNoise, terms: Terms, distance: float) -> float:
    """P(|sum| > distance) by summing over all pairs of outcomes."""
    errors, masses = np.zeros(1), np.ones(1)
    for copies, weight in terms:
        values, chances = atoms(law, copies)
        errors = (errors[:, None] + weight * values).ravel()
        masses = (masses[:, None] * chances).ravel()
    return math.fsum(masses[np.abs(errors) > distance * (1 + 1e-12)])


@pytest.mark.parametrize("law", LATTICES, ids=repr)
@pytest.mark.parametrize("terms", [((1, 1.0),), visit_terms(4, rewards=True), visit_terms(3, rewards=False)], ids=str)
def test_tails_are_never_too_small_and_nearly_exact(law: PoissonNoise | BinomialNoise, terms: Terms) -> None:
    sd = law.sd * math.sqrt(sum(copies * weight**2 for copies, weight in terms))
    for deviations in (0.5, 1.7, 3.1, 4.6, 7.0, 11.0):
        distance = deviations * sd
        exact = exact_tail(law, terms, distance)
        assert exact <= tail(law, terms, distance) * (1 + 1e-9)
        assert exact <= chernoff(law, terms, distance) * (1 + 1e-9)
        if exact > 1e-6:
            # No more than what lies beyond a distance one cell shorter.
            assert tail(law, terms, distance) <= exact_tail(law, terms, distance - 0.03 * sd) + 2e-9


@pytest.mark.parametrize(
    "law",
    [TruncatedLaplace(2.0, 60), DiscreteLaplace(0.4), NoiseSum((PoissonNoise(7.3), DiscreteLaplace(1.5)))],
    ids=repr,
)
@pytest.mark.parametrize("terms", [((1, 1.0),), visit_terms(4, rewards=True), visit_terms(3, rewards=False)], ids=str)
def test_tails_of_servers_noise_are_never_too_small(law: Whole, terms: Terms) -> None:
    """Each family's sum is a convolution; at a given tail Chernoff's distance is at most a third too long."""
    sd = law.sd * math.sqrt(sum(copies * weight**2 for copies, weight in terms))
    errors, masses = np.zeros(1), np.ones(1)
    for copies, weight in terms:
        values = np.arange(-30 * law.sd * math.sqrt(copies), 30 * law.sd * math.sqrt(copies))
        values = np.floor(values) + law.repeated(copies).mean % 1
        errors = (errors[:, None] + weight * values).ravel()
        masses = (masses[:, None] * np.diff(law.repeated(copies).cdf(values + 1e-6), prepend=0.0)).ravel()

    def exact(distance: float) -> float:
        return math.fsum(masses[np.abs(errors) > distance * (1 + 1e-12)])

    for deviations in (0.5, 1.7, 3.1, 4.6, 7.0):
        assert exact(deviations * sd) <= tail(law, terms, deviations * sd) * (1 + 1e-9) + 1e-15
    bound = joint_bound(law, {terms: 1}, 1e-6)
    assert exact(bound) <= 1e-6 < exact(bound / 1.34 - 2)


def test_the_sum_of_poisson_noises_is_one() -> None:
    wanted = {visit_terms(4, rewards=True): 40}
    assert joint_bound(NoiseSum((PoissonNoise(3.0), PoissonNoise(4.5))), wanted, FAILURE) == joint_bound(
        PoissonNoise(7.5), wanted, FAILURE
    )


def test_chernoff_takes_over_where_distribution_functions_are_lost_in_rounding() -> None:
    law, terms = PoissonNoise(300.0), visit_terms(4, rewards=True)
    distance = joint_bound(law, {terms: 1}, 1e-40)
    assert 0 < tail(law, terms, distance) <= 1e-40
    # The normal answer, and a Poisson law's heavier tail above it.
    normal = GaussianNoise(law.sd * math.sqrt(4 / 3)).bound(1e-40)
    assert normal < distance < 1.15 * normal


@pytest.mark.parametrize("law", [PoissonNoise(1e17), BinomialNoise(10**18, 0.5), BinomialNoise(10**17, 1e-3)], ids=repr)
def test_huge_laws_meet_their_gaussian_limit(law: Noise) -> None:
    # Beyond 1e18 trials there is no distribution function of the sum, and Chernoff's bound alone is a sixth wider.
    slack = 0.2 if law == BinomialNoise(10**18, 0.5) else 0.005
    wanted = {visit_terms(4, rewards=True): 40}
    gaussian = joint_bound(GaussianNoise(law.sd), wanted, FAILURE)
    assert gaussian <= joint_bound(law, wanted, FAILURE) * (1 + 1e-6) <= gaussian * (1 + slack)


def test_gaussian_bound_is_exact() -> None:
    law = GaussianNoise(2.0)
    sd = math.sqrt(2 * 4 / (4 + 2)) * law.sd
    assert tail(law, visit_terms(4, rewards=True), 3 * sd) == pytest.approx(2 * stats.norm.sf(3), rel=1e-12)
    bound = joint_bound(law, {visit_terms(4, rewards=True): 1}, 0.01)
    assert GaussianNoise(sd).bound(0.01) <= bound <= GaussianNoise(sd).bound(0.01) * (1 + 2e-4)


@pytest.mark.parametrize("batch", QUERIES.values(), ids=QUERIES)
def test_precision_speaks_of_every_counter_and_every_estimate(batch: Batch) -> None:
    query = batch.table_query
    estimates = len({*query.transition_steps, *query.reward_steps}) * query.n_states * query.n_actions
    assert sum(sums(query).values()) == query.size + estimates
    variances = visits(Release(batch, np.zeros(query.size), GaussianNoise(1.0), 1.0)).variance
    found = variances[~np.isnan(variances)]
    stated = [[sum(copies * weight**2 for copies, weight in terms)] * number for terms, number in sums(query).items()]
    everything = np.sort(np.concatenate([np.ones(query.size), found]))
    np.testing.assert_allclose(np.sort(np.concatenate(stated)), everything, rtol=1e-12)


def test_precision_falls_with_failure_and_grows_with_noise() -> None:
    query = QUERIES["everything"].table_query
    values = [precision(PoissonNoise(50.0), query, failure) for failure in (0.9, 0.1, 1e-3, 1e-9, 1e-12, 1e-30)]
    assert values == sorted(values)
    noises = [precision(PoissonNoise(mean), query, FAILURE) for mean in (0.01, 1.0, 30.0, 9e4, 1.1e5, 1e12)]
    assert noises == sorted(noises)


def test_precision_is_at_least_one_without_privacy() -> None:
    for batch in QUERIES.values():
        assert precision(NoNoise(), batch.table_query, FAILURE) == 1.0
    assert precision(GaussianNoise(1e-6), QUERIES["everything"].table_query, FAILURE) == 1.0


@pytest.mark.parametrize("failure", [0.0, 1.0, -0.1, math.nan, "often"])
def test_bad_failures_are_refused(failure: float) -> None:
    with pytest.raises(InvalidInputError, match="failure"):
        precision(NoNoise(), QUERIES["everything"].table_query, failure)


# --- The paper's program ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Programs:
    """Many instances of the paper's program of one slack: rows of noisy counts, possible outcomes and totals."""

    noisy: FloatArray
    possible: BoolArray
    totals: FloatArray
    slack: float

    def solved_by_highs(self, totals: FloatArray) -> tuple[bool, FloatArray]:
        """Optimal t of every row as one block-diagonal linear program; False if some row has no solution."""
        rows, states = self.noisy.shape
        cells, taking = rows * states, np.flatnonzero(self.possible.ravel())
        each = sparse.eye_array(cells, format="csr")[taking]
        owner = sparse.csr_array(
            (np.ones(len(taking)), (np.arange(len(taking)), taking // states)), shape=(len(taking), rows)
        )
        add = sparse.kron(sparse.eye_array(rows), np.ones((1, states)))
        none = sparse.csr_array((rows, rows))
        y = self.noisy.ravel()[taking]
        answer = optimize.linprog(
            np.concatenate([np.zeros(cells), np.ones(rows)]),
            A_ub=sparse.block_array([[each, -owner], [-each, -owner], [add, none], [-add, none]], format="csr"),
            b_ub=np.concatenate([y, -y, totals + self.slack, self.slack - totals]),
            bounds=[(0, None if possible else 0) for possible in self.possible.ravel()] + [(0, None)] * rows,
            method="highs",
        )
        return answer.status == 0, answer.x[cells:] if answer.status == 0 else np.empty(0)

    def violations(self, cells: FloatArray, t: FloatArray) -> set[str]:
        """Which demands of the program, its totals raised where they must be, an answer fails."""
        tiny = 1e-9 * (1 + np.abs(self.noisy).max() + np.abs(self.totals).max())
        totals = np.maximum(self.totals, -self.slack)
        feasible, best = self.solved_by_highs(totals)
        assert feasible
        failed = {
            "negative": (cells < 0).any(),
            "outside the support": (cells[~self.possible] != 0).any(),
            "further than t": (np.where(self.possible, np.abs(cells - self.noisy), 0).max(axis=-1) > t + tiny).any(),
            "total": (np.abs(cells.sum(axis=-1) - totals) > self.slack + tiny).any(),
            "not optimal": (np.abs(t - best) > 1e-6 * (1 + best)).any(),
        }
        return {name for name, wrong in failed.items() if wrong}


def random_programs(seed: int, rows: int, states: int) -> Programs:
    """All regimes: consistent or not, ties, every sign, totals that no counts can meet."""
    rng = np.random.default_rng(seed)
    scale = 10 ** rng.uniform(-1, 1, size=(rows, 1))
    noisy = scale * rng.normal(rng.uniform(-1, 2, size=(rows, 1)), 1, size=(rows, states))
    noisy[::5] = np.rint(noisy[::5])
    possible = rng.random(noisy.shape) < 0.7
    possible[np.arange(rows), rng.integers(states, size=rows)] = True
    totals = np.where(possible, noisy, 0).sum(axis=-1) + rng.normal(size=rows) * 10 ** rng.uniform(-1, 1.5, size=rows)
    return Programs(noisy, possible, totals, float(10 ** rng.uniform(-1, 1)))


@pytest.mark.parametrize("states", [1, 2, 3, 4, 6, 12])
def test_closed_form_equals_a_linear_program_solver(states: int) -> None:
    impossible = 0
    for seed in range(3):
        programs = random_programs(100 * states + seed, 500, states)
        cells, t = nearest(programs.noisy, programs.possible, programs.totals, programs.slack)
        assert not programs.violations(cells, t)
        impossible += int((programs.totals < -programs.slack).sum())
    assert impossible > 50, "the infeasible case must be among the cases"


def test_totals_that_no_counts_can_meet() -> None:
    programs = random_programs(1, 300, 4)
    below = programs.totals < -programs.slack
    only = Programs(programs.noisy[below], programs.possible[below], programs.totals[below], programs.slack)
    assert not only.solved_by_highs(only.totals)[0], "the paper's program has no solution here"
    cells, t = nearest(only.noisy, only.possible, only.totals, only.slack)
    np.testing.assert_array_equal(cells, 0.0)
    np.testing.assert_allclose(t, np.where(only.possible, np.abs(only.noisy), 0).max(axis=-1), rtol=1e-12)
    np.testing.assert_array_equal(raised(only.totals, only.slack), -only.slack)


def test_a_forgotten_clamp_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "raised", lambda totals, slack: totals)
    programs = random_programs(1, 300, 4)
    assert "not optimal" in programs.violations(
        *nearest(programs.noisy, programs.possible, programs.totals, programs.slack)
    )


values = st.floats(-100, 100, allow_subnormal=False).map(lambda value: round(value, 3))


@st.composite
def rows(draw: st.DrawFn) -> tuple[FloatArray, BoolArray, FloatArray, float]:
    states = draw(st.integers(1, 5))
    noisy = np.array([draw(st.lists(values, min_size=states, max_size=states))])
    possible = np.array([draw(st.lists(st.booleans(), min_size=states, max_size=states))])
    possible[0, draw(st.integers(0, states - 1))] = True
    return noisy, possible, np.array([draw(values)]), draw(st.floats(0.01, 50))


@given(rows())
def test_the_minimiser_is_feasible_and_its_sum_the_nearest(
    row: tuple[FloatArray, BoolArray, FloatArray, float],
) -> None:
    noisy, possible, totals, slack = row
    (cells,), (t,) = nearest(noisy, possible, totals, slack)
    y, n, total = noisy[possible], cells[possible[0]], max(float(totals[0]), -slack)
    lowest, highest = np.maximum(y - t, 0), y + t
    assert (n >= 0).all()
    assert (n >= lowest - 1e-9).all()
    assert (n <= highest + 1e-9).all()
    assert abs(n.sum() - total) <= slack + 1e-9
    # Minimisers sum to anything between the ends that lies within the slack; ours to the nearest to the total.
    assert n.sum() == pytest.approx(np.clip(total, lowest.sum(), highest.sum()), abs=1e-9)
    # Any smaller t misses: some y stays below zero, or the sums it allows do not meet the slack.
    if t > 1e-6:
        less = t - 1e-6
        sums_of_less = np.maximum(y - less, 0).sum(), (y + less).sum()
        assert (y + less).min() < 0 or sums_of_less[0] > total + slack or sums_of_less[1] < total - slack


@given(rows(), st.permutations(range(5)), st.floats(0.1, 50))
def test_the_program_knows_no_order_and_no_unit(
    row: tuple[FloatArray, BoolArray, FloatArray, float], places: list[int], unit: float
) -> None:
    noisy, possible, totals, slack = row
    order = [place for place in places if place < noisy.shape[1]]
    cells, t = nearest(noisy, possible, totals, slack)
    moved, t_moved = nearest(unit * noisy[:, order], possible[:, order], unit * totals, unit * slack)
    np.testing.assert_allclose(moved, unit * cells[:, order], rtol=1e-9, atol=1e-9 * unit)
    np.testing.assert_allclose(t_moved, unit * t, rtol=1e-9, atol=1e-9 * unit)


@given(rows())
def test_consistent_counts_are_left_alone(row: tuple[FloatArray, BoolArray, FloatArray, float]) -> None:
    noisy, possible, _, slack = row
    fine = np.where(possible, np.abs(noisy), 0.0)
    cells, t = nearest(fine, possible, fine.sum(axis=-1) + 0.9 * slack, slack)
    np.testing.assert_array_equal(cells, fine)
    assert (t == 0).all()


# --- Private counts --------------------------------------------------------------------------------------------------


def shortcomings(counts: Counts, private: PrivateCounts) -> set[str]:
    """What of the paper's Assumption 1 private counts do not satisfy, over all (h, x, a, x') asked."""
    query, limit = private.query, private.precision * (1 + 1e-12)
    transitions, rewards = query.scatter(counts.values.astype(np.float64))
    moves, pays = list(query.transition_steps), list(query.reward_steps)
    true = np.full(private.visits.shape, np.nan)
    true[pays] = rewards[pays].sum(axis=-1)
    true[moves] = transitions[moves].sum(axis=-1)
    steps = sorted({*moves, *pays})
    visited, found = true[steps], private.visits[steps]
    possible = np.ones(transitions.shape, dtype=np.bool_) if query.support is None else query.support
    failed = {
        "visits off by more than E": np.abs(found - visited).max() > limit,
        "visits underestimated": (found < visited - 1e-9).any(),
        "visits not positive": (found <= 0).any(),
        "transitions off by more than E": np.abs(private.transitions - transitions)[moves].max(initial=0) > limit,
        "transitions not positive": (private.transitions[moves][possible[moves]] <= 0).any(),
        "transitions do not add up": not np.array_equal(private.transitions[moves].sum(axis=-1), private.visits[moves]),
        "rewards off by more than E": np.abs(private.rewards - rewards[..., 1])[pays].max(initial=0) > limit,
    }
    return {name for name, wrong in failed.items() if wrong}


def beyond(counts: Counts, release: Release, limit: float) -> bool:
    """Whether some counter or some estimate of N is off by more than the limit."""
    off = Release(counts.batch, release.values - counts.values, release.noise, release.added_variance)
    return bool(max(np.abs(off.values).max(), np.nanmax(np.abs(visits(off).estimate))) > limit)


def runs(batch: Batch, noise: Noise, number: int, mdp: MDP = RIVER) -> Iterator[tuple[Counts, Release]]:
    population, rng = CountPopulation(mdp, 11), np.random.default_rng(12)
    for _ in range(number):
        counts = population.play(batch)
        yield counts, released(counts, noise, rng)


def at_most(failures: int, number: int, rate: float) -> bool:
    return bool(stats.binomtest(failures, number, rate, alternative="greater").pvalue > LEVEL / 10)


FULL = QUERIES["everything"]
BUDGET = Budget(1.0, 1e-5)
LAWS: dict[str, Noise] = {
    "Poisson at epsilon 1": calibrate(BUDGET, FULL.table_query.changed_counters),
    "Gaussian at epsilon 1": calibrate_gaussian(BUDGET, FULL.table_query.changed_counters),
    "fair binomial": BinomialNoise(1200, 0.5),
    "rare binomial": BinomialNoise(3000, 0.003),
}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_assumption_1_holds_at_its_rate(law: Noise) -> None:
    """The event that E is made for fails at about the stated rate, and wherever it holds, so does Assumption 1."""
    number, limit = 2000, precision(law, FULL.table_query, FAILURE)
    outside, failed = 0, 0
    for counts, release in runs(FULL, law, number):
        missed = beyond(counts, release, limit / 4)
        wrong = shortcomings(counts, consistent(release, limit))
        assert missed or not wrong
        assert not wrong & {"visits not positive", "transitions not positive", "transitions do not add up"}
        outside += missed
        failed += bool(wrong)
    assert at_most(outside, number, FAILURE)
    assert at_most(failed, number, FAILURE)
    # Not loose either: more than a third of the failures that the union bound allows do happen.
    assert stats.binomtest(outside, number, FAILURE / 3, alternative="less").pvalue > LEVEL / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["known support", "one crude layer", "families at different steps", "rewards only"])
def test_assumption_1_holds_for_every_query(name: str) -> None:
    batch, number = QUERIES[name], 600
    mdp = random_mdp(8, horizon=4, states=4, sparse=True) if name == "known support" else RIVER
    law = calibrate(BUDGET, batch.query.changed_counters)
    limit = precision(law, batch.table_query, FAILURE)
    outside = 0
    for counts, release in runs(batch, law, number, mdp):
        missed = beyond(counts, release, limit / 4)
        assert missed or not shortcomings(counts, consistent(release, limit))
        outside += missed
    assert at_most(outside, number, FAILURE)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_smaller_precision_fails(law: Noise) -> None:
    """At E/2 the noise is out of bounds nearly always, and Assumption 1 fails in more than the stated share of runs."""
    number, half = 500, precision(law, FULL.table_query, FAILURE) / 2
    outside = sum(beyond(counts, release, half / 4) for counts, release in runs(FULL, law, number))
    wrong = sum(bool(shortcomings(counts, consistent(release, half))) for counts, release in runs(FULL, law, number))
    assert outside > 0.98 * number
    assert not at_most(wrong, number, 2 * FAILURE)


def without_the_half(private: PrivateCounts) -> PrivateCounts:
    counted = np.maximum(successors(private.query), 1)[:-1, ..., None]
    return dataclasses.replace(
        private,
        transitions=private.transitions - private.precision / 2 / counted,
        visits=private.visits - private.precision / 2,
    )


def with_shares_of_all_states(private: PrivateCounts) -> PrivateCounts:
    """E/(2X) to each cell, whatever the support."""
    counted = np.maximum(successors(private.query), 1)[:-1, ..., None]
    extra = private.precision / 2 * (1 / private.query.n_states - 1 / counted)
    return dataclasses.replace(private, transitions=np.where(private.transitions > 0, private.transitions + extra, 0))


def test_planted_faults_are_caught() -> None:
    batch = QUERIES["known support"]
    law = calibrate(BUDGET, batch.query.changed_counters)
    limit, number = precision(law, batch.table_query, FAILURE), 100
    seen: dict[str, int] = {}
    for counts, release in runs(batch, law, number, random_mdp(8, horizon=4, states=4, sparse=True)):
        private = consistent(release, limit)
        for fault in shortcomings(counts, without_the_half(private)) | shortcomings(
            counts, with_shares_of_all_states(private)
        ):
            seen[fault] = seen.get(fault, 0) + 1
    assert seen["visits underestimated"] > 0.9 * number
    assert seen["transitions do not add up"] == number


def test_without_privacy_counts_are_exact_up_to_the_added_half() -> None:
    for counts, release in runs(FULL, NoNoise(), 20):
        private = consistent(release, precision(NoNoise(), FULL.table_query, FAILURE))
        assert not shortcomings(counts, private)
        transitions, rewards = FULL.table_query.scatter(counts.values.astype(np.float64))
        np.testing.assert_allclose(private.visits, rewards.sum(axis=-1) + 0.5, rtol=1e-12)
        np.testing.assert_allclose(private.transitions, transitions + 0.5 / 4, rtol=1e-12)
        np.testing.assert_array_equal(private.rewards, rewards[..., 1])


def test_unary_reports_are_covered_although_their_counters_are_not_independent() -> None:
    learner = learners.make("ucbvi", RIVER.problem(300), 1)
    population, outside = CountPopulation(RIVER, 4), 0
    privatizer = LocalSampled(Budget(2.0, 1e-5), Workload.of(learner, 6))
    worst = max(sum(copies * weight for copies, weight in terms) for terms in sums(FULL.table_query))
    for index in range(100):
        counts = population.play(dataclasses.replace(FULL, index=index))
        release = privatizer.release(counts)
        limit = precision(release.noise, FULL.table_query, FAILURE)
        assert limit / 4 >= worst * release.noise.bound(FAILURE / FULL.table_query.size)
        assert not shortcomings(counts, consistent(release, limit))
        outside += beyond(counts, release, limit / 4)
    assert at_most(outside, 100, FAILURE)


@settings(deadline=None, max_examples=40)
@given(mdp=mdps, seed=st.integers(0, 2**32 - 1), scale=st.floats(0.1, 1e6), limit=st.floats(0.01, 1e6), data=st.data())
def test_private_counts_of_any_release(mdp: MDP, seed: int, scale: float, limit: float, data: st.DataObject) -> None:
    """However wrong the release or the precision: positive, adding up, distributions; nan exactly where not asked."""
    moves = [h for h in range(mdp.horizon - 1) if data.draw(st.booleans())]
    pays = [h for h in range(mdp.horizon) if data.draw(st.booleans()) or (h == 0 and not moves)]
    batch = batch_of(mdp, moves, pays)
    drawn = np.random.default_rng(seed).normal(0, scale, batch.query.size)
    private = consistent(Release(batch, drawn, GaussianNoise(scale), scale**2), limit)
    assert (private.transition_steps, private.reward_steps) == (tuple(moves), tuple(pays))
    for h in range(mdp.horizon):
        assert np.isnan(private.visits[h]).all() if h not in {*moves, *pays} else (private.visits[h] > 0).all()
        assert np.isnan(private.rewards[h]).all() if h not in pays else not np.isnan(private.rewards[h]).any()
    for h in range(mdp.horizon - 1):
        possible = np.ones_like(mdp.transitions[h], dtype=np.bool_) if mdp.support is None else mdp.support[h]
        if h in moves:
            np.testing.assert_array_equal(private.transitions[h] > 0, possible)
            np.testing.assert_allclose(private.transition_probabilities[h].sum(axis=-1), 1.0, rtol=1e-12)
            assert (private.visits[h] >= limit / 2 * (1 - 1e-12)).all()
        else:
            assert np.isnan(private.transitions[h]).all()
            assert np.isnan(private.transition_probabilities[h]).all()
    np.testing.assert_array_equal(private.reward_means, private.rewards / private.visits)


def test_steps_without_transitions_count_by_rewards() -> None:
    batch = QUERIES["rewards only"]
    drawn = np.random.default_rng(1).normal(0, 20, batch.query.size)
    private = consistent(Release(batch, drawn, GaussianNoise(20.0), 400.0), 8.0)
    totals = batch.table_query.scatter(drawn)[1].sum(axis=-1)[[0, 5]]
    assert (totals < 0).any()
    np.testing.assert_array_equal(private.visits[[0, 5]], np.maximum(totals, 0) + 4)
    assert private.transitions.shape == (5, 4, 2, 4)


def test_private_counts_cannot_be_changed() -> None:
    private = consistent(next(runs(FULL, GaussianNoise(1.0), 1))[1], 20.0)
    for table in (private.transitions, private.visits, private.rewards, private.reward_means):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0.0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_bad_precisions_are_refused(limit: float) -> None:
    with pytest.raises(InvalidInputError, match="precision"):
        consistent(next(runs(FULL, NoNoise(), 1))[1], limit)
