"""Users are conserved from step to step: the identities that a batch's counts obey, imposed on their noisy release."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled

#: Sweeps over a step's cells; where every cell is possible one is exact, elsewhere a few come close.
_SWEEPS = 20


@compiled
def conserve(
    values: FloatArray,
    row_starts: IntArray,
    successors: NDArray[np.int32],
    live: BoolArray,
    users: float,
    tolerance: float,
    asked: BoolArray,
    unknown: float,
    visits: FloatArray,
    variance: FloatArray,
    row_variance: FloatArray,
) -> None:
    """Change the counters `values` so that users are conserved; write visits[h, x], their variance and that of rows.

    `live[h, x, a]` says which rows may count anybody; states that no live row leads to are struck out of it.
    asked[0, h] and asked[1, h] say whether transitions and rewards of a step were counted: where not, the two rewards
    of a row share its visits, and transitions mean nothing. Variances are in units of one counter's; `unknown` is that
    of a row of which neither was. A step's cells have met their margins once no row is off by `tolerance` per cell.
    """
    horizon, states, actions = live.shape
    rows = np.zeros((states, actions))
    arrivals = np.zeros(states)
    entrances = np.zeros(states)
    for h in range(horizon):
        for x in range(states):
            if h > 0 and entrances[x] == 0:
                live[h, x] = False
        _strike_out(h, values, row_starts, live)
        _count_rows(h, values, row_starts, live, asked, unknown, rows, row_variance[h])
        for x in range(states):
            visits[h, x] = rows[x].sum()
            variance[h, x] = row_variance[h, x].sum()
            if h > 0 and asked[0, h - 1] and variance[h, x] > 0:
                # Those who left the state are those who came.
                left = 1.0 / variance[h, x]
                came = 1.0 / entrances[x]
                visits[h, x] = (left * visits[h, x] + came * arrivals[x]) / (left + came)
                variance[h, x] = 1.0 / (left + came)
        # All users are somewhere.
        missing = users - visits[h].sum()
        spread = variance[h].sum()
        for x in range(states):
            if variance[h, x] > 0:
                visits[h, x] += missing * variance[h, x] / spread
                variance[h, x] *= 1.0 - variance[h, x] / spread
        _rewards_to_visits(h, values, row_starts[-1], live, visits, variance, rows, row_variance[h])
        arrivals[:] = 0.0
        entrances[:] = 0.0
        if h < horizon - 1:
            _arrive(h, values, row_starts, successors, live, arrivals, entrances)
    for h in range(horizon - 1):
        if asked[0, h]:
            _cells_to_margins(h, values, row_starts, successors, live, visits, tolerance)


@compiled
def _strike_out(h: int, values: FloatArray, row_starts: IntArray, live: BoolArray) -> None:
    """Rows that are not live count nobody."""
    horizon, states, actions = live.shape
    for x in range(states):
        for a in range(actions):
            if not live[h, x, a]:
                i = (h * states + x) * actions + a
                values[row_starts[-1] + 2 * i] = 0.0
                values[row_starts[-1] + 2 * i + 1] = 0.0
                if h < horizon - 1:
                    values[row_starts[i] : row_starts[i + 1]] = 0.0


@compiled
def _count_rows(
    h: int,
    values: FloatArray,
    row_starts: IntArray,
    live: BoolArray,
    asked: BoolArray,
    unknown: float,
    rows: FloatArray,
    row_variance: FloatArray,
) -> None:
    """rows[x, a]: how often a row was visited. Each visit is counted once by the D transitions, once by two rewards."""
    _, states, actions = live.shape
    for x in range(states):
        for a in range(actions):
            rows[x, a] = 0.0
            row_variance[x, a] = 0.0
            if live[h, x, a]:
                i = (h * states + x) * actions + a
                rows[x, a] = values[row_starts[-1] + 2 * i] + values[row_starts[-1] + 2 * i + 1]
                row_variance[x, a] = 2.0 if asked[1, h] else unknown
                if asked[0, h]:
                    width = row_starts[i + 1] - row_starts[i]
                    moved = values[row_starts[i] : row_starts[i + 1]].sum()
                    rows[x, a] = (2.0 * moved + width * rows[x, a]) / (width + 2.0) if asked[1, h] else moved
                    row_variance[x, a] = 2.0 * width / (width + 2.0) if asked[1, h] else width


@compiled
def _rewards_to_visits(
    h: int,
    values: FloatArray,
    first: int,
    live: BoolArray,
    visits: FloatArray,
    variance: FloatArray,
    rows: FloatArray,
    row_variance: FloatArray,
) -> None:
    """Share a state's visits among its rows by their variance; the two rewards of a row take up the change evenly.

    What rows say of each other stays as uncertain as it was, their sum becomes as certain as the visits: a row of
    share s of the variance r of all of them then has s r (1 - s) + s^2 v, v the variance of the visits.
    """
    _, states, actions = live.shape
    for x in range(states):
        change = visits[h, x] - rows[x].sum()
        spread = row_variance[x].sum()
        for a in range(actions):
            if live[h, x, a]:
                zero = first + 2 * ((h * states + x) * actions + a)
                row = rows[x, a] + change * row_variance[x, a] / spread
                shift = (row - values[zero] - values[zero + 1]) / 2.0
                values[zero] += shift
                values[zero + 1] += shift
        for a in range(actions):
            if live[h, x, a]:
                share = row_variance[x, a] / spread
                row_variance[x, a] = row_variance[x, a] * (1.0 - share) + share * share * variance[h, x]


@compiled
def _arrive(
    h: int,
    values: FloatArray,
    row_starts: IntArray,
    successors: NDArray[np.int32],
    live: BoolArray,
    arrivals: FloatArray,
    entrances: FloatArray,
) -> None:
    """Add up who comes to each state, and over how many counters."""
    _, states, actions = live.shape
    for x in range(states):
        for a in range(actions):
            if live[h, x, a]:
                i = (h * states + x) * actions + a
                for t in range(row_starts[i], row_starts[i + 1]):
                    arrivals[successors[t]] += values[t]
                    entrances[successors[t]] += 1.0


@compiled
def _cells_to_margins(
    h: int,
    values: FloatArray,
    row_starts: IntArray,
    successors: NDArray[np.int32],
    live: BoolArray,
    visits: FloatArray,
    tolerance: float,
) -> None:
    """Move the cells of step h as little as possible so that rows sum to their visits and columns to the next step's.

    Alternating projections: each row's residual is spread evenly over the row, then each column's over the column.
    """
    _, states, actions = live.shape
    rewards = row_starts[-1]
    residual = np.zeros(states)
    height = np.zeros(states)
    for sweep in range(_SWEEPS):
        worst = 0.0
        for y in range(states):
            residual[y] = visits[h + 1, y]
            height[y] = 0.0
        for x in range(states):
            for a in range(actions):
                if live[h, x, a]:
                    i = (h * states + x) * actions + a
                    shift = values[rewards + 2 * i] + values[rewards + 2 * i + 1]
                    for t in range(row_starts[i], row_starts[i + 1]):
                        shift -= values[t]
                    shift /= row_starts[i + 1] - row_starts[i]
                    worst = max(worst, abs(shift))
                    for t in range(row_starts[i], row_starts[i + 1]):
                        values[t] += shift
                        residual[successors[t]] -= values[t]
                        height[successors[t]] += 1.0
        for x in range(states):
            for a in range(actions):
                if live[h, x, a]:
                    i = (h * states + x) * actions + a
                    for t in range(row_starts[i], row_starts[i + 1]):
                        values[t] += residual[successors[t]] / height[successors[t]]
        if sweep > 0 and worst < tolerance:
            break
