"""Weights of a coverage design.

A design mixes a few policies, the atoms. d[t] is what the mixture makes of triple t, and the score of an atom is the
sum of its chances over d, which the weights average to the number of triples covered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled

#: The largest reciprocal of a chance: it keeps sums of products finite.
_CEILING = 1e250


class Visits(NamedTuple):
    """For n from begins[i] to ends[i], atom i takes the triple (h, x, a) numbered triples[n] with chances[n]."""

    begins: IntArray
    ends: IntArray
    triples: NDArray[np.int32]
    chances: FloatArray


@compiled
def uniform_visits(transitions: FloatArray, start: FloatArray, reachable: BoolArray) -> FloatArray:
    """visits[h, x] when every action that some policy can take is taken equally often."""
    horizon, states, actions = reachable.shape
    visits = np.zeros((horizon, states))
    visits[0] = start
    for h in range(horizon - 1):
        for x in range(states):
            share = visits[h, x] / max(reachable[h, x].sum(), 1)
            for a in range(actions):
                if reachable[h, x, a]:
                    for y in range(states):
                        visits[h + 1, y] += share * transitions[h, x, a, y]
    return visits


@compiled
def reciprocals(visits: Visits, weights: FloatArray, counted: BoolArray) -> tuple[FloatArray, FloatArray]:
    """d[t] of the mixture and 1/d[t] of the triples that count, zero elsewhere."""
    begins, ends, triples, chances = visits
    d = np.zeros(len(counted))
    for i in range(len(weights)):
        if weights[i] > 0:
            for n in range(begins[i], ends[i]):
                d[triples[n]] += weights[i] * chances[n]
    inverse = np.zeros(len(counted))
    for t in range(len(counted)):
        if counted[t]:
            inverse[t] = min(1.0 / d[t], _CEILING)
    return d, inverse


@compiled
def _step_length(d: FloatArray, change: FloatArray, touched: NDArray[np.int64], most: float) -> float:
    """The t in [0, most] at which the sum of log(d + t * change) is largest, by Newton's method within a bracket."""
    slope = 0.0
    for t in touched:
        left = d[t] + most * change[t]
        # What the atom that leaves covers alone must stay covered, whatever rounding says is left of it.
        slope += change[t] / left if left > 1e-12 * d[t] else -np.inf
    if slope >= 0:
        return most
    low, high, length = 0.0, most, 0.0
    for _ in range(50):
        slope = bend = 0.0
        for t in touched:
            ratio = change[t] / (d[t] + length * change[t])
            slope += ratio
            bend += ratio * ratio
        if slope > 0:
            low = length
        else:
            high = length
        following = length + slope / bend
        if not low < following < high:
            following = 0.5 * (low + high)
        if abs(following - length) < 1e-6 * most:
            return following
        length = following
    return length


@compiled
def _score(begin: int, end: int, triples: NDArray[np.int32], chances: FloatArray, inverse: FloatArray) -> float:
    total = 0.0
    for n in range(begin, end):
        total += chances[n] * inverse[triples[n]]
    return total


@compiled
def _exchange(
    high: tuple[int, int],
    low: tuple[int, int],
    triples: NDArray[np.int32],
    chances: FloatArray,
    change: FloatArray,
    touched: NDArray[np.int64],
) -> int:
    """Write how d changes when weight goes from one atom to another, and where; return in how many places."""
    count = 0
    for n in range(high[0], high[1]):
        change[triples[n]] = chances[n]
        touched[count] = triples[n]
        count += 1
    for n in range(low[0], low[1]):
        t = triples[n]
        if change[t] == 0.0:
            touched[count] = t
            count += 1
        change[t] -= chances[n]
    return count


@compiled
def reweigh(visits: Visits, weights: FloatArray, counted: BoolArray, gap: float, rounds: int) -> None:
    """Move the weights until no atom scores more than (1 + gap) times the number of triples, or for some rounds.

    A round scores the atoms and pairs the highest with the lowest, the next with the next, up to an eighth of them.
    Each pair moves as much weight from the lower to the higher as maximises the sum of log d. Atoms that no longer
    count for anything are left with no weight.
    """
    begins, ends, triples, chances = visits
    atoms = len(weights)
    aim = counted.sum()
    change = np.zeros(len(counted))
    touched = np.empty(len(counted), dtype=np.int64)
    d, inverse = reciprocals(visits, weights, counted)
    scores = np.empty(atoms)
    for _ in range(rounds):
        for i in range(atoms):
            scores[i] = _score(begins[i], ends[i], triples, chances, inverse)
        if scores.max() <= (1.0 + gap) * aim:
            break
        order = np.argsort(scores)
        givers = order[weights[order] > 0]
        for k in range(min(1 + atoms // 8, len(givers))):
            high, low = order[atoms - 1 - k], givers[k]
            if k > 0:
                scores[high] = _score(begins[high], ends[high], triples, chances, inverse)
                scores[low] = _score(begins[low], ends[low], triples, chances, inverse)
            if scores[high] <= max(scores[low], aim):
                continue
            n = _exchange((begins[high], ends[high]), (begins[low], ends[low]), triples, chances, change, touched)
            length = _step_length(d, change, touched[:n], weights[low])
            weights[high] += length
            weights[low] = 0.0 if length == weights[low] else weights[low] - length
            for t in touched[:n]:
                d[t] += length * change[t]
                change[t] = 0.0
                inverse[t] = min(1.0 / d[t], _CEILING)
    for i in range(atoms):
        if weights[i] < 1e-3 / aim and scores[i] <= aim:
            weights[i] = 0.0
    weights /= weights.sum()
