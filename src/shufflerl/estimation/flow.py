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

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.counts import Release
from shufflerl.errors import ContractError

#: The variance of uncounted visits: so many times that of a counter's noise, and the square of all users, at least.
_UNKNOWN, _FAR_ABOVE = 1e6, 1e3
#: Sweeps over a step's cells; where every cell is possible one is exact, elsewhere a few come close.
_SWEEPS = 20


class Conserved(NamedTuple):
    """A release in which users are conserved.

    `values` are all counters in order of tags; visits[h, x, a] how many users took an action in a state, with errors of
    that `variance`.
    """

    values: FloatArray
    visits: FloatArray
    variance: FloatArray


def conserve(release: Release, start: FloatArray | None) -> Conserved:
    """Impose conservation on a release; `start` is the law of the first state, where it is known.

    `values` are then those of all counters. Of those that were not asked, the rewards of a row share what its other
    counters, and those of the states before and after, tell of its visits; nothing is told of its transitions.
    """
    query, mixture, noise = release.batch.table_query, release.batch.mixture, release.noise.variance
    values = query.fill(release.values)
    pays = values[query.layout.size :].reshape(query.horizon, query.n_states, query.n_actions, 2)
    if noise == 0:
        if not query.asked[1].all():
            raise ContractError("A release without noise must have all rewards asked; ask for everything.")
        return Conserved(values, pays.sum(axis=-1), np.zeros(pays.shape[:-1]))
    live = (mixture.policies[mixture.weights > 0, ..., None] == np.arange(query.n_actions)).any(axis=0)
    if start is not None:
        live[0] &= (start > 0)[:, None]
    layout, users = query.layout, float(release.batch.users)
    row_starts = np.append(layout.row_starts, np.full(live[0].size, layout.size))  # the last step's rows lead nowhere
    counters = Counters(values, row_starts, layout.successors, live, query.asked)
    unknown = max(_UNKNOWN, _FAR_ABOVE * users**2 / noise)
    variance = noise * conserve_users(counters, users, 1e-3 * np.sqrt(noise), unknown)
    return Conserved(values, pays.sum(axis=-1), variance)


class Counters(NamedTuple):
    """The counters `values` of a release: transitions of row i from row_starts[i] on, then two rewards of every row.

    live[h, x, a] says which rows may count anybody, asked[0, h] and asked[1, h] whether transitions and rewards of a
    step were counted: where not, the two rewards of a row share its visits, and transitions mean nothing. Rows of the
    last step have no transitions.
    """

    values: FloatArray
    row_starts: IntArray
    successors: NDArray[np.int32]
    live: BoolArray
    asked: BoolArray


@compiled
def conserve_users(counters: Counters, users: float, tolerance: float, unknown: float) -> FloatArray:
    """Change the counters so that users are conserved; returns the variance of every row's visits.

    States that no live row leads to are struck out of the live ones. Variances are in units of one counter's; `unknown`
    is that of a row of which nothing was asked. A step's cells have met their margins once no row is off by `tolerance`
    per cell.
    """
    horizon, states, actions = counters.live.shape
    rows = np.zeros((states, actions))
    row_variance = np.zeros((horizon, states, actions))
    visits = np.empty((horizon, states))
    variance, arrivals, entrances = np.zeros((3, states))
    for h in range(horizon):
        total = spread = 0.0
        coming = np.zeros((2, states))
        for x in range(states):
            visits[h, x] = variance[x] = 0.0
            for a in range(actions):
                counters.live[h, x, a] &= h == 0 or entrances[x] > 0
                rows[x, a], row_variance[h, x, a] = _count_row(counters, h, x, a, unknown, coming)
                visits[h, x] += rows[x, a]
                variance[x] += row_variance[h, x, a]
            if h > 0 and counters.asked[0, h - 1] and variance[x] > 0:
                # Those who left the state are those who came.
                left = 1.0 / variance[x]
                came = 1.0 / entrances[x]
                visits[h, x] = (left * visits[h, x] + came * arrivals[x]) / (left + came)
                variance[x] = 1.0 / (left + came)
            total += visits[h, x]
            spread += variance[x]
        for x in range(states):
            if variance[x] > 0:
                # All users are somewhere.
                visits[h, x] += (users - total) * variance[x] / spread
                variance[x] *= 1.0 - variance[x] / spread
            _rewards_to_visits(counters, h, x, visits[h, x], variance[x], rows[x], row_variance[h, x])
        arrivals, entrances = coming
    for h in range(horizon - 1):
        if counters.asked[0, h]:
            _cells_to_margins(counters, h, visits[h + 1], tolerance)
    return row_variance


@compiled
def _count_row(c: Counters, h: int, x: int, a: int, unknown: float, coming: FloatArray) -> tuple[float, float]:
    """How often a row was visited, and the variance of that: D transitions count each visit once, two rewards too.

    Adds up who comes from it to each state, coming[0], and over how many counters, coming[1].
    """
    i = (h * c.live.shape[1] + x) * c.live.shape[2] + a
    first, last, zero = c.row_starts[i], c.row_starts[i + 1], c.row_starts[-1] + 2 * i
    if not c.live[h, x, a]:
        c.values[zero] = c.values[zero + 1] = 0.0
        for t in range(first, last):
            c.values[t] = 0.0
        return 0.0, 0.0
    paid, moved, width = c.values[zero] + c.values[zero + 1], 0.0, float(last - first)
    for t in range(first, last):
        moved += c.values[t]
        coming[0, c.successors[t]] += c.values[t]
        coming[1, c.successors[t]] += 1.0
    if c.asked[0, h] and c.asked[1, h]:
        return (2.0 * moved + width * paid) / (width + 2.0), 2.0 * width / (width + 2.0)
    return (moved, width) if c.asked[0, h] else (paid, 2.0 if c.asked[1, h] else unknown)


@compiled
def _rewards_to_visits(
    c: Counters, h: int, x: int, visits: float, variance: float, rows: FloatArray, row_variance: FloatArray
) -> None:
    """Share a state's visits among its rows by their variance; the two rewards of a row take up the change evenly.

    What rows say of each other stays as uncertain as it was, their sum becomes as certain as the visits: a row of
    share s of the variance r of all of them then has s r (1 - s) + s^2 v, v the variance of the visits.
    """
    total = spread = 0.0
    for a in range(len(rows)):
        total += rows[a]
        spread += row_variance[a]
    for a in range(len(rows)):
        if c.live[h, x, a]:
            zero = c.row_starts[-1] + 2 * ((h * c.live.shape[1] + x) * len(rows) + a)
            row = rows[a] + (visits - total) * row_variance[a] / spread
            shift = (row - c.values[zero] - c.values[zero + 1]) / 2.0
            c.values[zero] += shift
            c.values[zero + 1] += shift
            share = row_variance[a] / spread
            row_variance[a] = row_variance[a] * (1.0 - share) + share * share * variance


@compiled
def _cells_to_margins(c: Counters, h: int, arrivals: FloatArray, tolerance: float) -> None:
    """Move the cells of step h as little as possible so that rows sum to their visits and columns to the arrivals.

    Alternating projections: each row's residual is spread evenly over the row, then each column's over the column.
    """
    _, states, actions = c.live.shape
    residual = np.zeros(states)
    height = np.zeros(states)
    for sweep in range(_SWEEPS):
        worst = 0.0
        for y in range(states):
            residual[y] = arrivals[y]
            height[y] = 0.0
        for x in range(states):
            for a in range(actions):
                if c.live[h, x, a]:
                    i = (h * states + x) * actions + a
                    shift = c.values[c.row_starts[-1] + 2 * i] + c.values[c.row_starts[-1] + 2 * i + 1]
                    for t in range(c.row_starts[i], c.row_starts[i + 1]):
                        shift -= c.values[t]
                    shift /= c.row_starts[i + 1] - c.row_starts[i]
                    worst = max(worst, abs(shift))
                    for t in range(c.row_starts[i], c.row_starts[i + 1]):
                        c.values[t] += shift
                        residual[c.successors[t]] -= c.values[t]
                        height[c.successors[t]] += 1.0
        for x in range(states):
            for a in range(actions):
                if c.live[h, x, a]:
                    i = (h * states + x) * actions + a
                    for t in range(c.row_starts[i], c.row_starts[i + 1]):
                        c.values[t] += residual[c.successors[t]] / height[c.successors[t]]
        if sweep > 0 and worst < tolerance:
            break
