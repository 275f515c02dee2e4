"""Users are conserved from step to step: the identities that a batch's counts obey, imposed on their noisy release."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled

#: Sweeps over a step's cells; where every cell is possible one is exact, elsewhere a few come close.
_SWEEPS = 20


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
def conserve(
    counters: Counters,
    users: float,
    tolerance: float,
    unknown: float,
    visits: FloatArray,
    variance: FloatArray,
    row_variance: FloatArray,
) -> None:
    """Change the counters so that users are conserved; write visits[h, x], their variance and that of rows.

    States that no live row leads to are struck out of the live ones. Variances are in units of one counter's; `unknown`
    is that of a row of which nothing was asked. A step's cells have met their margins once no row is off by `tolerance`
    per cell.
    """
    horizon, states, actions = counters.live.shape
    rows = np.zeros((states, actions))
    arrivals = np.zeros(states)
    entrances = np.zeros(states)
    for h in range(horizon):
        total = spread = 0.0
        for x in range(states):
            visits[h, x] = variance[h, x] = 0.0
            for a in range(actions):
                counters.live[h, x, a] &= h == 0 or entrances[x] > 0
                rows[x, a], row_variance[h, x, a] = _count_row(counters, h, x, a, unknown)
                visits[h, x] += rows[x, a]
                variance[h, x] += row_variance[h, x, a]
            if h > 0 and counters.asked[0, h - 1] and variance[h, x] > 0:
                # Those who left the state are those who came.
                left = 1.0 / variance[h, x]
                came = 1.0 / entrances[x]
                visits[h, x] = (left * visits[h, x] + came * arrivals[x]) / (left + came)
                variance[h, x] = 1.0 / (left + came)
            total += visits[h, x]
            spread += variance[h, x]
        for x in range(states):
            if variance[h, x] > 0:
                # All users are somewhere.
                visits[h, x] += (users - total) * variance[h, x] / spread
                variance[h, x] *= 1.0 - variance[h, x] / spread
            _rewards_to_visits(counters, h, x, visits[h, x], variance[h, x], rows[x], row_variance[h, x])
            arrivals[x] = entrances[x] = 0.0
        _arrive(counters, h, arrivals, entrances)
    for h in range(horizon - 1):
        if counters.asked[0, h]:
            _cells_to_margins(counters, h, visits[h + 1], tolerance)


@compiled
def _count_row(c: Counters, h: int, x: int, a: int, unknown: float) -> tuple[float, float]:
    """How often a row was visited, and the variance of that: D transitions count each visit once, two rewards too."""
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
def _arrive(c: Counters, h: int, arrivals: FloatArray, entrances: FloatArray) -> None:
    """Add up who comes to each state, and over how many counters."""
    _, states, actions = c.live.shape
    for x in range(states):
        for a in range(actions):
            if c.live[h, x, a]:
                i = (h * states + x) * actions + a
                for t in range(c.row_starts[i], c.row_starts[i + 1]):
                    arrivals[c.successors[t]] += c.values[t]
                    entrances[c.successors[t]] += 1.0


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
