"""Sweeps over enumerated policies.

Enumerated policies are numbers. The digit of weight A^k of a code is the action in cell k, so that neighbours in an
ascending list agree on the last steps and share their values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.policy_sets.product_kernels import starting_value


class Cells(NamedTuple):
    """A model of the cells (h, x) that matter, which count from zero by steps, then states.

    Those of step h are first[h] to first[h + 1]. moves[k, a, j] is the chance of the j-th cell of the next step,
    pays[k, a] the reward, start[k] the law of the first cells.
    """

    first: IntArray
    moves: FloatArray
    pays: FloatArray
    start: FloatArray


@compiled
def _decode(code: int, opening: int, prefix: NDArray[np.int64], action: NDArray[np.int64], actions: int) -> int:
    """Write the actions of the cells from `opening` on that differ from the code before; return where they end."""
    k = opening
    while k < len(action) and prefix[k] != code:
        prefix[k] = code
        shorter = code // actions
        action[k] = code - shorter * actions
        code = shorter
        k += 1
    return k


@compiled
def _steps_of_cells(first: NDArray[np.int64]) -> NDArray[np.int64]:
    step = np.empty(first[-1], dtype=np.int64)
    for h in range(len(first) - 1):
        step[first[h] : first[h + 1]] = h
    return step


@compiled
def _back_up(g: int, cells: Cells, value: FloatArray, q: FloatArray) -> None:
    """Write the q of the cells of step g, given the values of the step after."""
    first, moves, pays, _ = cells
    low, high, end = first[g], first[g + 1], first[g + 2]
    for c in range(low, high):
        for a in range(pays.shape[1]):
            total = 0.0
            for j in range(end - high):
                total += moves[c, a, j] * value[high + j]
            q[c, a] = pays[c, a] + total


@compiled
def _fill_block(opening: int, start: FloatArray, q: FloatArray, block: FloatArray) -> None:
    """The values of all policies that agree after the first step."""
    actions = q.shape[1]
    block[0] = 0.0
    size = 1
    for c in range(opening):
        for a in range(actions - 1, -1, -1):
            term = start[c] * q[c, a]
            for i in range(size):
                block[a * size + i] = block[i] + term
        size *= actions


@compiled
def _begin(cells: Cells) -> tuple[IntArray, FloatArray, FloatArray, IntArray, IntArray, FloatArray]:
    """What a sweep keeps of the code before: step, q, value, action and prefix of each cell, and a block of values."""
    count, actions = cells.pays.shape
    q = cells.pays.copy()
    block = np.empty(actions ** cells.first[1])
    _fill_block(cells.first[1], cells.start, q, block)
    action, prefix = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    return _steps_of_cells(cells.first), q, np.zeros(count), action, prefix, block


@compiled
def enumerated_values(codes: NDArray[np.int32], cells: Cells) -> FloatArray:
    """The value of each policy of an ascending list."""
    first, _, _, start = cells
    step, q, value, action, prefix, block = _begin(cells)
    opening, width, actions = first[1], len(block), q.shape[1]
    values = np.empty(len(codes))
    i = 0
    while i < len(codes):
        suffix = codes[i] // width
        changed = _decode(suffix, opening, prefix, action, actions)
        if changed > opening:
            h = step[changed - 1]
            for c in range(first[h], changed):
                value[c] = q[c, action[c]]
            for g in range(h - 1, -1, -1):
                _back_up(g, cells, value, q)
                if g > 0:
                    for c in range(first[g], first[g + 1]):
                        value[c] = q[c, action[c]]
            _fill_block(opening, start, q, block)
        base = suffix * width
        while i < len(codes) and codes[i] - base < width:
            values[i] = block[codes[i] - base]
            i += 1
    return values


@compiled
def _next_kept(n: int, rng: Generator) -> int:
    """Of ties met one by one the n-th replaces the one kept with chance 1/n; after the n-th did, who is the next?"""
    return int(min(n / (1.0 - rng.random()), 1e12)) + 1


@compiled
def _bound(g: int, cells: Cells, allowed: BoolArray, q: FloatArray, value: FloatArray) -> float:
    """The most that can be had when step g has these q and every action of the hull is allowed up to step g."""
    first, moves, pays, start = cells
    actions = q.shape[1]
    for c in range(first[g], first[g + 1]):
        value[c] = -np.inf
        for a in range(actions):
            if allowed[c, a]:
                value[c] = max(value[c], q[c, a])
    for f in range(g - 1, -1, -1):
        low, high, end = first[f], first[f + 1], first[f + 2]
        for c in range(low, high):
            value[c] = -np.inf
            for a in range(actions):
                if allowed[c, a]:
                    total = 0.0
                    for j in range(end - high):
                        total += moves[c, a, j] * value[high + j]
                    value[c] = max(value[c], pays[c, a] + total)
    return starting_value(start, value[: first[1]])


@compiled
def enumerated_best(
    codes: NDArray[np.int32], cells: Cells, allowed: BoolArray, known: float, rng: Generator
) -> tuple[int, float]:
    """Where in an ascending list the policy of the highest value stands, ties at random, and that value.

    Some policy of the list is known to have value `known`. Policies that agree on the last steps are passed over when
    not even the best first steps of the hull (allowed[k, a]) would bring them up to the best one found.
    """
    first, _, _, start = cells
    step, q, value, action, prefix, block = _begin(cells)
    opening, width, actions = first[1], len(block), q.shape[1]
    hoped = np.zeros(len(value))
    highest = known
    found = -1
    ties = 0
    wanted = 0
    i = 0
    while i < len(codes):
        suffix = codes[i] // width
        changed = _decode(suffix, opening, prefix, action, actions)
        if changed > opening:
            h = step[changed - 1]
            for c in range(first[h], changed):
                value[c] = q[c, action[c]]
            hopeless = False
            for g in range(h - 1, -1, -1):
                _back_up(g, cells, value, q)
                if _bound(g, cells, allowed, q, hoped) < highest:
                    apart = actions ** first[g + 1]
                    i = np.searchsorted(codes, (codes[i] // apart + 1) * apart)
                    hopeless = True
                    break
                for c in range(first[g], first[g + 1]):
                    value[c] = q[c, action[c]]
            if hopeless:
                continue
            _fill_block(opening, start, q, block)
        base = suffix * width
        while i < len(codes) and codes[i] - base < width:
            this = block[codes[i] - base]
            if this > highest or (found < 0 and this == highest):
                highest = this
                ties = 0
                wanted = 1
            if this == highest:
                ties += 1
                if ties == wanted:
                    found = i
                    wanted = _next_kept(ties, rng)
            i += 1
    return found, highest


@compiled
def used_actions(codes: NDArray[np.int32], cells: int, actions: int) -> BoolArray:
    """used[k, a]: whether some policy of an ascending list takes action a in cell k."""
    used = np.zeros((cells, actions), dtype=np.bool_)
    action = np.zeros(cells, dtype=np.int64)
    prefix = np.full(cells, -1, dtype=np.int64)
    for code in codes:
        for k in range(_decode(code, 0, prefix, action, actions)):
            used[k, action[k]] = True
    return used


@compiled
def prefix_visits(codes: NDArray[np.int32], step: int, cells: Cells) -> FloatArray:
    """visits[i, j]: how likely the i-th policy, a code over the cells before `step`, is to get to its j-th cell."""
    first, moves, _, start = cells
    actions = moves.shape[1]
    width = 0
    for g in range(step + 1):
        width = max(width, first[g + 1] - first[g])
    here = np.empty(width)
    ahead = np.empty(width)
    visits = np.empty((len(codes), first[step + 1] - first[step]))
    for i in range(len(codes)):
        rest = codes[i]
        here[: first[1]] = start
        for g in range(step):
            low, high, end = first[g], first[g + 1], first[g + 2]
            ahead[:] = 0.0
            for c in range(high - low):
                shorter = rest // actions
                if here[c] > 0:
                    row = moves[low + c, rest - shorter * actions]
                    for j in range(end - high):
                        ahead[j] += here[c] * row[j]
                rest = shorter
            here, ahead = ahead, here
        visits[i] = here[: visits.shape[1]]
    return visits


@compiled
def policy_cover(
    codes: NDArray[np.int32], size: int, place: NDArray[np.int32], visits: FloatArray, actions: int, rng: Generator
) -> tuple[FloatArray, NDArray[np.int64]]:
    """reach[j, a], the best chance in an ascending list to be in the j-th last cell and take a, and who has it.

    A code is p + size * (the actions in the last cells), and place[p] says which row of `visits` holds the chances of p
    to get to the last cells. Ties are broken at random; where the best chance is zero, who has it is -1.
    """
    goals = visits.shape[1]
    reach = np.zeros((goals, actions))
    found = np.full((goals, actions), -1, dtype=np.int64)
    ties = np.zeros((goals, actions), dtype=np.int64)
    wanted = np.zeros((goals, actions), dtype=np.int64)
    action = np.zeros(goals, dtype=np.int64)
    base = -size
    for i in range(len(codes)):
        if codes[i] - base >= size:
            rest = codes[i] // size
            base = rest * size
            for j in range(goals):
                action[j] = rest % actions
                rest //= actions
        p = place[codes[i] - base]
        for j in range(goals):
            a = action[j]
            chance = visits[p, j]
            if chance > reach[j, a]:
                reach[j, a] = chance
                ties[j, a] = 0
                wanted[j, a] = 1
            if chance == reach[j, a] and chance > 0:
                ties[j, a] += 1
                if ties[j, a] == wanted[j, a]:
                    found[j, a] = i
                    wanted[j, a] = _next_kept(ties[j, a], rng)
    return reach, found
