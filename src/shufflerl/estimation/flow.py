"""What is certain about a batch, imposed on its release: users are conserved, and nobody does what nobody was told to.

All n users are in some state at every step; those who leave a state are those who entered it; each of them is counted
once by each family. Actions that no deployed policy takes, and first states that cannot be, count nobody. Noise breaks
these identities, so imposing them removes noise: post-processing, which costs no privacy.

The step below is one pass of least squares: first each row's two counts of its visits are made to agree, then arrivals
and departures of each state and the total, then the cells are moved as little as possible to meet both.
"""

from __future__ import annotations

import numpy as np

from shufflerl.checks import BoolArray, FloatArray
from shufflerl.counts import Release


def conserve(release: Release, start: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """The tables of a full release with users conserved from step to step: transitions[h,x,a,x'], rewards[h,x,a,r].

    For a release that asks all transitions and rewards; `start` is the law of the first state, where it is known.
    """
    moves, pays = (np.array(table) for table in release.tables)
    if release.noise.variance == 0:
        return moves, pays
    users = float(release.batch.users)
    live = _live(release, start)
    moves[~live[:-1]] = 0.0
    pays[~live] = 0.0
    possible = (
        np.ones_like(moves, dtype=np.bool_) if release.batch.query.support is None else release.batch.query.support
    )
    cells = np.where(live[:-1, ..., None], possible, False)
    moved, paid = moves.sum(axis=-1), pays.sum(axis=-1)
    # Variances in units of one counter's: D cells in a row of transitions, two in a row of rewards.
    width = cells.sum(axis=-1)
    row_visits, row_variance = paid.copy(), np.full(paid.shape, 2.0)
    row_visits[:-1] = (2 * moved + width * paid[:-1]) / (width + 2)
    row_variance[:-1] = 2 * width / (width + 2)
    row_variance[~live] = 0.0

    arrivals_variance = cells.sum(axis=(1, 2))
    visits = _state_visits(row_visits, row_variance, moves.sum(axis=(1, 2)), arrivals_variance, users, start)
    # What a state's rows must change by is shared among them by their variance.
    change = visits - row_visits.sum(axis=-1)
    total_variance = row_variance.sum(axis=-1)
    share = np.divide(row_variance, total_variance[..., None], out=np.zeros_like(row_variance), where=row_variance > 0)
    row_visits += share * change[..., None]

    pays += np.where(live, (row_visits - paid) / 2, 0.0)[..., None]
    moves += _cells_to_margins(moves, cells, row_visits[:-1], visits[1:])
    return moves, pays


def _live(release: Release, start: FloatArray | None) -> BoolArray:
    """Whether some user may be in state x at step h and take action a."""
    query, policies = release.batch.query, release.batch.mixture.policies[release.batch.mixture.weights > 0]
    live = np.stack([(policies == a).any(axis=0) for a in range(query.n_actions)], axis=-1)
    if start is not None:
        live[0] &= (start > 0)[:, None]
    return live


def _state_visits(
    rows: FloatArray,
    row_variance: FloatArray,
    arrivals: FloatArray,
    arrivals_variance: FloatArray,
    users: float,
    start: FloatArray | None,
) -> FloatArray:
    """visits[h, x]: departures and arrivals of each state averaged by inverse variance, all states summing to n."""
    visits, variance = rows.sum(axis=-1), row_variance.sum(axis=-1)
    weights = np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0)
    arrived = np.divide(1.0, arrivals_variance, out=np.zeros(arrivals_variance.shape), where=arrivals_variance > 0)
    both = weights[1:] + arrived
    visits[1:] = np.divide(weights[1:] * visits[1:] + arrived * arrivals, both, out=np.zeros_like(both), where=both > 0)
    variance[1:] = np.divide(1.0, both, out=np.zeros_like(both), where=both > 0)
    if start is not None and (start > 0).sum() == 1:
        visits[0], variance[0] = users * start, 0.0  # everybody starts there
    excess = (visits.sum(axis=-1) - users)[:, None]
    total = variance.sum(axis=-1, keepdims=True)
    share = np.divide(variance, total, out=np.zeros_like(variance), where=total > 0)
    balanced: FloatArray = visits - share * excess
    return balanced


def _cells_to_margins(moves: FloatArray, cells: BoolArray, rows: FloatArray, columns: FloatArray) -> FloatArray:
    """What to add to the cells[h, x, a, x'] of each step so that row and column sums come (close to) the margins.

    The least change in the Euclidean norm where all cells are possible: each cell gets its row's residual over the
    row's width plus its column's over the column's height, less what both have in common.
    """
    width = np.maximum(cells.sum(axis=-1), 1)
    height = np.maximum(cells.sum(axis=(1, 2)), 1)
    row_residual = rows - moves.sum(axis=-1)
    column_residual = columns - moves.sum(axis=(1, 2))
    everything = np.maximum(cells.sum(axis=(1, 2, 3)), 1)
    common = (np.where(cells.any(axis=-1), row_residual, 0.0).sum(axis=(1, 2)) / everything)[:, None, None, None]
    change = (row_residual / width)[..., None] + (column_residual / height)[:, None, None, :] - common
    return np.where(cells, change, 0.0)
