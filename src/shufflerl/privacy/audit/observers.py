"""What one observer can tell, held against the claim and the declared law of the noise that protects from it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.noise import BinomialNoise, PoissonNoise
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit.bench import Law, Played, named
from shufflerl.privacy.audit.report import Finding, judged
from shufflerl.privacy.audit.statistics import (
    bonferroni,
    fit,
    gaussian_epsilon,
    highest_rate,
    lowest_epsilon,
    lowest_mu,
    outcomes,
    refutable_by_response,
    refutable_epsilon,
    scores_fit,
    spread_fit,
    two_sided,
)
from shufflerl.privacy.loss import privacy_loss

#: Tests of an observer with a random outcome.
RANDOM_TESTS = 6
# Thresholds of an observer, in deviations beyond the middle.
_THREE, _FIVE = (-1.5, 0.0, 1.5), (-1.5, -0.75, 0.0, 0.75, 1.5)


@dataclass(frozen=True, eq=False)
class Observer:
    """An observer of what was played; see `bench.Session`."""

    played: Played
    name: str

    @property
    def law(self) -> Law:
        """The law of the noise that protects from it."""
        return self.played.session.laws[self.name]

    @property
    def noise(self) -> FloatArray:
        """That noise, [batch, counter]."""
        return self.played.noise(self.name)

    def tests(self, budget: Budget, level: float) -> tuple[float, list[Finding]]:
        """A lower bound on epsilon, and what every test finds."""
        bound, epsilon = self._epsilon(budget, level)
        return bound, [
            epsilon,
            self._curve(budget, level),
            self._noise_law(level),
            self._independence(level),
            self._unbiasedness(level),
            self._freshness(level),
        ]

    def error_rates(self, quantile: float) -> tuple[int, int]:
        """How often an observer errs who calls the replaced user by a fixed threshold, on either batch.

        The observer knows the others and adds up the counters in the direction of the change: this sum is about 0 on
        the first batch and the number of changed counters on the second. The threshold lies `quantile` deviations
        beyond the middle, between two values the sum can take.
        """
        bench, sees = self.played.bench, self.played.seen[self.name]
        sums = (sees - self.played.true[:, :1]) @ bench.direction
        threshold = math.floor(bench.changed / 2 + quantile * math.sqrt(bench.changed) * self.law.sd) + 0.5
        return int((sums[:, 0] > threshold).sum()), int((sums[:, 1] < threshold).sum())

    @property
    def _bell_shaped(self) -> bool:
        """Whether at the observer's threshold the claimed noise shows no more than a Gaussian mechanism's mu.

        It is so of Poisson noise (`privacy/audit/test_users.py`); Laplace noise shows more there.
        """
        return isinstance(self.law, PoissonNoise | BinomialNoise)

    def refutable_epsilon(self, budget: Budget, level: float) -> float:
        """See `AuditReport`."""
        samples = len(self.played.kinds)
        if self._bell_shaped:
            return refutable_epsilon(samples, budget, level)
        return refutable_by_response(samples, budget, level / len(_FIVE))

    def _epsilon(self, budget: Budget, level: float) -> tuple[float, Finding]:
        """A lower bound on epsilon: what must be spent to let an observer err so rarely."""
        samples = len(self.played.kinds)
        if self._bell_shaped:
            mu = lowest_mu(*self.error_rates(0.0), samples=samples, level=level)
            bound, how = gaussian_epsilon(mu, budget.delta), f"mu above {mu:.3g} (Clopper-Pearson, Gaussian DP)"
        else:
            errors = [self.error_rates(quantile) for quantile in _FIVE]
            least = functools.partial(lowest_epsilon, samples=samples, delta=budget.delta, level=level / len(_FIVE))
            bound = max(least(*some) for some in errors)
            how = "whatever the law (Clopper-Pearson)"
        return bound, Finding(
            named("epsilon", self.name),
            bound <= budget.epsilon,
            None,
            f"An observer's errors put epsilon above {bound:.3g} with confidence 1 - {level:.2g}, {how}; claimed is "
            f"{budget.epsilon:g}.",
        )

    def _curve(self, budget: Budget, level: float) -> Finding:
        """Hold the error rates against every (epsilon, delta) the claimed noise has: true whatever is drawn.

        Privacy at (e, d) means 1 - misses <= exp(e) * false_alarms + d for every test, and likewise with the two
        swapped.
        """
        changed, samples = self.played.bench.changed, len(self.played.kinds)
        claimed = privacy_loss(self.played.session.claimed(budget, changed)[self.name], changed)
        grid = np.linspace(0.0, 2 * budget.epsilon, 41)
        deltas = np.array([claimed.delta(epsilon) for epsilon in grid])
        excess = -math.inf
        for quantile in _THREE:
            rates = [highest_rate(n, samples, level / 2 / len(_THREE)) for n in self.error_rates(quantile)]
            for one, other in (rates, reversed(rates)):
                excess = max(excess, float((1 - one - np.exp(grid) * other - deltas).max()))
        return Finding(
            named("privacy curve", self.name),
            excess <= 0,
            None,
            f"At three thresholds an observer's success is {abs(excess):.3g} "
            f"{'above what a' if excess > 0 else 'below what every'} claimed (epsilon, delta) allows, with confidence "
            f"1 - {level:.2g}.",
        )

    def _noise_law(self, level: float) -> Finding:
        """All counters together, and each by itself: the mean of its noise, and how often it is near that."""
        noise, law = self.noise, self.law
        means = noise.mean(axis=0) * math.sqrt(len(noise)) / law.sd
        middle = max(law.sd, 1.0) / 2  # so wide that there is a count within
        chance = float(np.diff(law.cdf([-middle, middle]))[0])
        near = ((noise > -middle) & (noise <= middle)).mean(axis=0)
        shares = (near - chance) * math.sqrt(len(noise) / (chance * (1 - chance)))
        p_value = bonferroni(fit(noise, law), scores_fit(means), scores_fit(shares))
        return judged(named("noise law", self.name), p_value, level, f"Noise on a counter is {law}, as declared")

    def _independence(self, level: float) -> Finding:
        """Shared noise would widen the sums of counters, a fixed total narrow them."""
        p_values = []
        for some in (self.noise, self.noise[:, ::2]):
            sums, counters = some.sum(axis=1), some.shape[1]
            p_values += [fit(sums, self.law.repeated(counters)), *spread_fit(sums, self.law, counters)]
        statement = "Noise on different counters is independent"
        return judged(named("independence", self.name), bonferroni(*p_values), level, statement)

    def _unbiasedness(self, level: float) -> Finding:
        """Of the counters each user touched: one counted twice would raise those."""
        noise, bench = self.noise, self.played.bench
        users = self.played.kinds.reshape(len(noise), -1).T
        scores = np.array([(noise * bench.counts[kinds]).sum() for kinds in users])
        scores /= math.sqrt(len(noise) * bench.query.touched_counters) * self.law.sd
        p_value = bonferroni(*(two_sided(score) for score in scores))
        return judged(
            named("unbiasedness", self.name), p_value, level, "Counts are right on average, every user counted once"
        )

    def _freshness(self, level: float) -> Finding:
        """No noise comes twice, nor a report, key or seed, and that of successive batches is uncorrelated."""
        noise = self.noise
        score = (noise[1:] * noise[:-1]).sum() / (self.law.variance * math.sqrt((len(noise) - 1) * noise.shape[1]))
        times = np.unique(np.rint(noise + self.law.mean), axis=0, return_counts=True)[1]
        pairs = int((times * (times - 1) // 2).sum())
        expected = math.comb(len(noise), 2) * float((outcomes(self.law)[1] ** 2).sum()) ** noise.shape[1]
        again = min(1.0, expected / pairs) if pairs else 1.0  # Markov's inequality
        p_value = bonferroni(again, self.played.session.repeats(self.played), two_sided(float(score)))
        return judged(
            named("freshness", self.name),
            0.0 if self.played.reused else p_value,
            level,
            "No report repeats, and no noise, key or seed is used again",
        )
