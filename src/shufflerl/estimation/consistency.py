"""The paper's post-processing: from noisy counts to private counts that satisfy its Assumption 1 (Private counts).

Let E be the release's `precision`: every counter and every estimate of N_h(x, a) is within E/4 of the truth. Then the
counts made here are, for every step asked,

- accurate: N~(x, a), N~(x, a, x') and R~(x, a) are within E of the truth;
- never too small: N~(x, a) >= N(x, a);
- consistent: N~(x, a) = sum_x' N~(x, a, x');
- positive: N~(x, a, x') > 0 for every x' that can follow.

Why: the true counts satisfy the constraints of `nearest` with t = E/4, so its minimiser has t <= E/4 and each cell is
within E/4 + E/4 of the truth, and so is the total. Adding E/2 to the total puts it between N and N + E; each of the D
cells gets E/(2D) of that, which leaves it within E/2 + E/(2D) <= E.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import CountQuery, Release
from shufflerl.estimation.rows import visits


@dataclass(frozen=True, eq=False)
class PrivateCounts:
    """Counts that satisfy the paper's Assumption 1 with E = `precision`; nan at steps that were not asked.

    `transitions[h, x, a, x']` (one step fewer; zero where the known support rules x' out), `visits[h, x, a]` and
    `rewards[h, x, a]`, the cumulative rewards R~. At a step without transitions, as the last one, `visits` come from
    the reward counters alone.
    """

    query: CountQuery
    precision: float
    transitions: FloatArray
    visits: FloatArray
    rewards: FloatArray

    def __post_init__(self) -> None:
        for name in ("transitions", "visits", "rewards"):
            object.__setattr__(self, name, checks.frozen(getattr(self, name)))

    @property
    def transition_steps(self) -> tuple[int, ...]:
        """Steps whose transitions were asked."""
        return self.query.transition_steps

    @property
    def reward_steps(self) -> tuple[int, ...]:
        """Steps whose rewards were asked."""
        return self.query.reward_steps

    @cached_property
    def transition_probabilities(self) -> FloatArray:
        """P~[h, x, a, x'] = N~(x, a, x') / N~(x, a): every row asked is a distribution."""
        return checks.frozen(self.transitions / self.visits[:-1, ..., None])

    @cached_property
    def reward_means(self) -> FloatArray:
        """r~[h, x, a] = R~(x, a) / N~(x, a), as in the paper: not clipped, so noise may carry it below 0 or above 1."""
        return checks.frozen(self.rewards / self.visits)


def consistent(release: Release, precision: float) -> PrivateCounts:
    """The private counts of a release whose counters and estimates of N are within precision/4 of the truth."""
    precision = checks.real("precision", precision, above=0)
    query = release.batch.table_query
    moves, pays = list(query.transition_steps), list(query.reward_steps)
    noisy, bits = release.tables
    totals = visits(release).estimate

    shape = (query.n_states, query.n_actions)
    private = np.maximum(totals, 0.0) + precision / 2
    transitions = np.full((query.horizon - 1, *shape, query.n_states), np.nan)
    possible = np.ones_like(transitions, dtype=np.bool_) if query.support is None else query.support
    if moves:
        follows = possible[moves]
        cells, _ = nearest(noisy[moves], follows, totals[moves], precision / 4)
        share = precision / (2 * follows.sum(axis=-1, keepdims=True))
        transitions[moves] = np.where(follows, cells + share, 0.0)
        private[moves] = transitions[moves].sum(axis=-1)
    rewards = np.full((query.horizon, *shape), np.nan)
    rewards[pays] = bits[pays, ..., 1]
    return PrivateCounts(query, precision, transitions, private, rewards)


def nearest(noisy: FloatArray, possible: BoolArray, totals: FloatArray, slack: float) -> tuple[FloatArray, FloatArray]:
    """Solve, for every row y of noisy[..., x'], the paper's program.

        min t   subject to   n(x') >= 0,   |n(x') - y(x')| <= t,   |sum_x' n(x') - N| <= slack

    over the possible x' of the row (at least one). Returns n[..., x'], zero elsewhere, and t[...]. Totals that no n can
    meet are `raised` first.

    Raise all y by c and cut them off at zero: the sum h(c) = sum (y + c)+ grows with c and, with p_k the sum of the k
    largest y, equals max_k (p_k + k c); so h(c) = s > 0 at c = shift(s) = min_k (s - p_k) / k. A t serves if it lifts
    every y to zero, t >= -min y, and if the sums it allows, from h(-t) to h(t), meet those within the slack of N. Hence

        t = max(0, -min y, shift(N - slack), -shift(N + slack)).

    Many n may have this t. Ours is the one whose sum is nearest to N and, among those, which is nearest to y in the
    Euclidean norm: n = (y + c)+ with c = shift(N), cut off to [-t, t].
    """
    totals = raised(totals, slack)
    largest = -np.sort(np.where(possible, -noisy, np.inf), axis=-1)
    partial = np.cumsum(largest, axis=-1)
    numbers = np.arange(1, noisy.shape[-1] + 1)

    def shift(sums: FloatArray) -> FloatArray:
        return np.asarray(((sums[..., None] - partial) / numbers).min(axis=-1))

    smallest = np.where(possible, noisy, np.inf).min(axis=-1)
    t = np.maximum.reduce([np.zeros_like(totals), -smallest, shift(totals - slack), -shift(totals + slack)])
    c = np.clip(shift(totals), -t, t)
    return np.where(possible, np.maximum(noisy + c[..., None], 0.0), 0.0), t


def raised(totals: FloatArray, slack: float) -> FloatArray:
    """Noisy totals below -slack, where no n >= 0 comes within the slack, raised to -slack, the least that some n meets.

    True totals are not negative, so this only brings them nearer.
    """
    return np.maximum(totals, -slack)
