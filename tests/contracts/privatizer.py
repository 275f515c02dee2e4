"""What every privatizer must do: subclass, set `make`, and pytest runs the suite.

Statistical tests have fixed seeds and would fail by chance, over all seeds, with probability below 1e-4 each.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import Batch, CountQuery, Counts, Release
from shufflerl.errors import ContractError, InvalidInputError
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.population import CountPopulation
from shufflerl.privatizers.base import BudgetedPrivatizer, Privatizer
from tests.support.examples import full_batch, random_mdp, random_mixture

LEVEL = 1e-4
USERS = 60
MDP_ = random_mdp(31, horizon=2, states=2, actions=2, start=0)


def learner(batches_observed: int = 0) -> Learner:
    """Asks for more batches than any test releases, and reads each release by itself."""
    fixture = UCBVI(MDP_.problem(USERS * 500), 0, batch=USERS)
    fixture.reads_running_sums = False  # type: ignore[misc]
    fixture.batches_observed = batches_observed
    return fixture


@cache
def _played(index: int) -> Counts:
    batch = full_batch(MDP_, USERS, random_mixture(MDP_, 2, 1), index)
    return Counts(batch, CountPopulation(MDP_, 5).play(batch).values)


@cache
def _released(suite: type[PrivatizerContract], count: int) -> list[Release]:
    privatizer = suite().make(seed=3)
    return [privatizer.release(_played(index)) for index in range(count)]


class PrivatizerContract:
    """The suite. A privatizer whose noise depends on the counts says so and is held to its bounds."""

    depends_on_counts = False

    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        """For the suite's learner unless another is to be served."""
        raise NotImplementedError

    def _counts(self, index: int = 0) -> Counts:
        return _played(index)

    def _releases(self, count: int) -> tuple[list[Release], IntArray]:
        return _released(type(self), count), self._counts().values  # type: ignore[arg-type]  # types can be hashed

    def _errors(self, count: int) -> tuple[list[Release], FloatArray]:
        releases, truth = self._releases(count)
        return releases, np.stack([release.values for release in releases]) - truth

    def test_it_is_unbiased(self) -> None:
        releases, errors = self._errors(400)
        deviation = releases[0].noise.sd / np.sqrt(errors.size)
        assert abs(errors.mean()) <= 4.5 * deviation  # 4.5 deviations: by chance 7e-6
        per_counter = errors.mean(axis=0)
        assert (np.abs(per_counter) <= 6 * releases[0].noise.sd / np.sqrt(len(errors))).all()

    def test_the_declared_law_is_the_law(self) -> None:
        """Chi-square in twenty cells of equal declared probability, all counters pooled."""
        releases, errors = self._errors(400)
        noise, truth = releases[0].noise, self._counts().values
        if noise.variance == 0:
            assert not errors.any()
            return
        if self.depends_on_counts:
            errors = errors[:, truth == 0]  # its law is exact where nobody was; the bounds below cover the rest
            assert errors.size > 1000
        values, seen = np.unique(errors, return_counts=True)
        edges = _quantiles(noise.cdf(values), cells=20)
        expected = np.diff(np.concatenate([[0.0], noise.cdf(values[edges]), [1.0]])) * errors.size
        observed = np.add.reduceat(seen, np.concatenate([[0], edges + 1]))
        assert stats.chisquare(observed, expected).pvalue > LEVEL

    def test_noise_is_independent_between_counters_and_batches(self) -> None:
        _, errors = self._errors(400)
        if not errors.any() or self.depends_on_counts:
            return
        scores = errors / errors.std()
        across = np.corrcoef(scores, rowvar=False)[np.triu_indices(errors.shape[1], 1)]
        along = (scores[1:] * scores[:-1]).mean(axis=0)
        for correlations in (across, along):
            limit = stats.norm.isf(LEVEL / 2 / len(correlations)) / np.sqrt(len(errors))
            assert np.abs(correlations).max() < 1.1 * limit

    def test_the_declared_variance_is_not_exceeded(self) -> None:
        releases, errors = self._errors(400)
        worst = (errors**2).mean(axis=0).max()
        assert worst <= releases[0].noise.variance * (1 + 6 * np.sqrt(2 / len(errors)))

    @pytest.mark.parametrize("failure", [0.5, 0.05])
    def test_the_error_bound_holds_at_its_rate(self, failure: float) -> None:
        releases, errors = self._errors(400)
        beyond = int((np.abs(errors) > releases[0].noise.bound(failure)).sum())
        assert stats.binomtest(beyond, errors.size, failure, alternative="greater").pvalue > LEVEL

    @pytest.mark.slow
    def test_added_variances_make_up_that_of_the_sum(self) -> None:
        """Over 300 runs of 12 batches; a chi-square interval at the suite's level."""
        sums = []
        for seed in range(300):
            privatizer = self.make(seed=seed)
            releases = [privatizer.release(self._counts(index)) for index in range(12)]
            sums.append(sum(release.values for release in releases) - 12 * self._counts().values)
        spread, freedom = np.square(sums).mean(), np.size(sums)
        declared = sum(release.added_variance for release in releases)
        if self.depends_on_counts:
            assert spread <= declared
            return
        low, high = stats.chi2.interval(1 - LEVEL, freedom) / np.array(freedom)
        assert low * declared <= spread <= high * declared

    def test_same_seed_same_release(self) -> None:
        first, again, other = (self.make(seed=seed).release(self._counts()).values for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert np.array_equal(first, other) == (not (first - self._counts().values).any())

    def test_a_budget_is_spent_on_a_batch_once_and_in_order(self) -> None:
        privatizer = self.make()
        if not isinstance(privatizer, BudgetedPrivatizer):
            return
        privatizer.release(self._counts())
        query = CountQuery.everything(MDP_.problem(1))
        for wrong in (0, 2):
            with pytest.raises(ContractError, match=f"Batch {wrong} .* batch 1 comes next"):
                privatizer.release(self._counts(wrong))
            if privatizer.draws_ahead:
                with pytest.raises(ContractError, match=f"Batch {wrong} .* batch 1 comes next"):
                    privatizer.noise_of_episodes(query, range(wrong, wrong + 3))
        assert privatizer.ledger.releases == ["batch 0"]

    def test_a_fresh_one_serves_a_restored_learner_from_where_it_is(self) -> None:
        privatizer = self.make(serves=learner(batches_observed=5))
        release = privatizer.release(self._counts(5))
        assert release.added_variance == release.noise.variance == self._releases(1)[0][0].noise.variance
        if isinstance(privatizer, BudgetedPrivatizer):
            assert privatizer.ledger.releases == ["batch 5"]

    def test_the_budget_is_recorded_before_anything_is_drawn(self) -> None:
        """A ledger that cannot be written stops the release before a random number is used."""
        privatizer = self.make()
        if not isinstance(privatizer, BudgetedPrivatizer):
            return
        before = privatizer.rng.bit_generator.state
        full = mock.patch.object(privatizer.ledger, "record_all", side_effect=OSError("disk full"))
        with full, pytest.raises(OSError, match="disk full"):
            privatizer.release(self._counts())
        assert privatizer.rng.bit_generator.state == before
        assert privatizer.ledger.releases == []
        privatizer.release(self._counts())
        assert privatizer.ledger.releases == ["batch 0"]
        assert 0 < privatizer.ledger.spent <= privatizer.mechanism.budget.epsilon * (1 + 1e-9)

    def test_noise_drawn_ahead_is_the_noise_of_the_releases(self) -> None:
        if not self.make().draws_ahead:
            return
        query = CountQuery.everything(MDP_.problem(1))
        ahead, added = self.make(seed=4).noise_of_episodes(query, range(7))
        privatizer = self.make(seed=4)
        users = CountPopulation(MDP_, 1)
        counts = [users.play(full_batch(MDP_, 1, index=i)) for i in range(7)]
        releases = [privatizer.release(one) for one in counts]
        noise = np.stack([release.values - one.values for release, one in zip(releases, counts, strict=True)])
        if len(added):
            np.testing.assert_allclose(noise, ahead, rtol=0, atol=1e-9)  # 1 + x - 1 is x only up to rounding
            np.testing.assert_array_equal(added, [release.added_variance for release in releases])
        else:
            assert not noise.any()

    def test_counts_that_cannot_be_are_refused_before_anything_is_charged(self) -> None:
        privatizer, good = self.make(), self._counts()
        if not isinstance(privatizer, BudgetedPrivatizer):
            return
        twice = good.values.copy()
        twice[good.values.argmax()] += 1
        negative = good.values.copy()
        negative[:2] += (-100, 100)
        for values in (twice, negative, good.values[:-1], good.values.astype(float)):
            with pytest.raises(InvalidInputError, match="not the counts of 60 users"):
                privatizer.release(Counts(good.batch, values))
        assert privatizer.ledger.releases == []
        privatizer.release(good)

    def test_the_last_bits_of_a_release_tell_nothing_of_the_count(self) -> None:
        """A count moved by one moves every release by exactly one: no value betrays what was added to it."""
        if self.depends_on_counts:
            return
        good = self._counts()
        moved = good.values.copy()
        first = good.batch.query.groups == 0
        here, there = np.flatnonzero(first)[[0, -1]]
        moved[[here, there]] += (1, -1) if moved[there] else (-1, 1)
        pairs = [
            (self.make(seed=s).release(good), self.make(seed=s).release(Counts(good.batch, moved))) for s in range(50)
        ]
        for before, after in pairs:
            np.testing.assert_array_equal(after.values - before.values, moved - good.values)

    def test_nothing_but_the_values_depends_on_the_counts(self) -> None:
        """Over several batches, of one user and of many, whatever these did: a release says the same of all.

        All users are at one counter of each family and step, every one in its turn, or as evenly spread as can be.
        """
        for users in (1, 20_000):
            batches = [full_batch(MDP_, users, index=index) for index in range(3)]
            told = [
                told_beside_values(self.make(seed=7), [_shared_out(batch, shares) for batch in batches])
                for shares in (*np.eye(8), np.full(8, 1 / 8))
            ]
            assert all(one == told[0] for one in told)

    def test_the_certificate_states_the_budget(self) -> None:
        privatizer = self.make()
        certificate = privatizer.certificate(CountQuery.everything(MDP_.problem(1)))
        if not isinstance(privatizer, BudgetedPrivatizer):
            assert certificate is None
            return
        assert certificate is not None
        assert 0 < certificate.epsilon <= privatizer.mechanism.budget.epsilon * (1 + 1e-9)
        assert certificate.delta == privatizer.mechanism.budget.delta


def told_beside_values(privatizer: Privatizer, batches: list[Counts]) -> list[object]:
    """All that releases of these batches say but their values, and what is written down of them."""
    said: list[object] = []
    for counts in batches:
        release = privatizer.release(counts)
        said.append({name: value for name, value in vars(release).items() if name != "values"})
        said.append((release.values.dtype, release.values.shape))
    if isinstance(privatizer, BudgetedPrivatizer):
        said.append(privatizer.ledger.releases)
    return said


def _shared_out(batch: Batch, shares: FloatArray) -> Counts:
    """So many of the users at each counter of every family and step, which have eight each."""
    ends = np.rint(np.cumsum(shares) * batch.users).astype(np.int64)
    return Counts(batch, np.tile(np.diff(ends, prepend=0), batch.query.touched_counters))


def _quantiles(cumulative: FloatArray, cells: int) -> IntArray:
    """Indices that cut the values into cells of about equal declared probability."""
    cuts = np.searchsorted(cumulative, np.arange(1, cells) / cells)
    return np.unique(cuts[cuts < len(cumulative) - 1])
