"""What is certain about a batch, imposed on its release: users are conserved, and nobody does what nobody was told to.

All n users are in some state at every step; those who leave a state are those who entered it; each of them is counted
once by each family. Actions that no deployed policy takes, first states that cannot be, and states that nothing leads
to count nobody. Noise breaks these identities, so imposing them removes noise: post-processing, which costs no privacy.

The model: independent errors of one variance on every counter, the identities exact. Least squares then has a closed
form where every transition is possible: average by inverse variance what each counter says of a state's visits, share
out by variance what is missing to n, and spread what rows and columns lack evenly over their cells. Where the known
support leaves gaps, the cells are moved by alternating projections and the visits are averaged as if the gaps did not
couple them: still unbiased, a little above least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import CountQuery, Release
from shufflerl.errors import ContractError

#: The variance of uncounted visits: so many times that of a counter's noise, and the square of all users, at least.
_UNKNOWN, _FAR_ABOVE = 1e6, 1e3


@dataclass(frozen=True, eq=False)
class Conserved:
    """A release in which users are conserved.

    `values` are all counters in order of tags; `visits[h, x]` how many users were in a state and `row_visits[h, x, a]`
    how many took an action there, with error variances `variance` and `row_variance`.
    """

    values: FloatArray
    visits: FloatArray
    variance: FloatArray
    row_visits: FloatArray
    row_variance: FloatArray


def conserve(release: Release, start: FloatArray | None) -> Conserved:
    """Impose conservation on a release; `start` is the law of the first state, where it is known.

    `values` are then those of all counters. Of those that were not asked, the rewards of a row share what its other
    counters, and those of the states before and after, tell of its visits; nothing is told of its transitions.
    """
    from shufflerl.estimation import flow_kernels

    query, noise = release.batch.table_query, release.noise.variance
    values = query.fill(release.values)
    if noise == 0:
        if not query.asked[1].all():
            raise ContractError("A release without noise must have all rewards asked; ask for everything.")
        rows = _row_visits(query, values)
        states = rows.sum(axis=-1)
        return Conserved(values, states, np.zeros_like(states), rows, np.zeros_like(rows))
    live = _live(release, start)
    row_variance = np.zeros(live.shape)
    visits, variance = np.empty(live.shape[:2]), np.empty(live.shape[:2])
    layout, users = query.layout, float(release.batch.users)
    row_starts = np.append(layout.row_starts, np.full(live[0].size, layout.size))  # the last step's rows lead nowhere
    counters = flow_kernels.Counters(values, row_starts, layout.successors, live, query.asked)
    unknown = max(_UNKNOWN, _FAR_ABOVE * users**2 / noise)
    flow_kernels.conserve(counters, users, 1e-3 * np.sqrt(noise), unknown, visits, variance, row_variance)
    return Conserved(values, visits, noise * variance, _row_visits(query, values), noise * row_variance)


def _row_visits(query: CountQuery, values: FloatArray) -> FloatArray:
    """How many users the two rewards of every row count together."""
    pays = values[query.layout.size :].reshape(query.horizon, query.n_states, query.n_actions, 2)
    total: FloatArray = pays.sum(axis=-1)
    return total


def _live(release: Release, start: FloatArray | None) -> BoolArray:
    """Whether some user may be in state x at step h and take action a."""
    query, mixture = release.batch.table_query, release.batch.mixture
    played = mixture.policies[mixture.weights > 0, ..., None] == np.arange(query.n_actions)
    live: BoolArray = played.any(axis=0)
    if start is not None:
        live[0] &= (start > 0)[:, None]
    return live
