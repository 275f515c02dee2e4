"""Oracles of product sets: dynamic programs over allowed actions.

They and the sweeps over enumerated policies add up in the same order (the reward, plus the sum over next states in
their order; then the sum over first states in theirs), and rounding is monotone, so the largest of the enumerated
values and the value of the dynamic program are the same number to the last bit. Elimination relies on it: product sets
contain the enumerated ones.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.compiling import compiled

#: Enumerated sets have at most this many states, so up to here the order of sums is theirs.
_IN_ORDER = 24


@compiled
def expectation(row: FloatArray, value: FloatArray) -> float:
    """The sum of row[y] * value[y]: in order for few states, in four interleaved sums for many."""
    states = len(value)
    first = 0.0
    if states <= _IN_ORDER:
        for y in range(states):
            first += row[y] * value[y]
        return first
    second = third = fourth = 0.0
    whole = states - states % 4
    for y in range(0, whole, 4):
        first += row[y] * value[y]
        second += row[y + 1] * value[y + 1]
        third += row[y + 2] * value[y + 2]
        fourth += row[y + 3] * value[y + 3]
    for y in range(whole, states):
        first += row[y] * value[y]
    return (first + second) + (third + fourth)


@compiled
def starting_value(start: FloatArray, value: FloatArray) -> float:
    """The expected value of the first state."""
    total = 0.0
    for x in range(len(start)):
        total += start[x] * value[x]
    return total


@compiled
def choose(q: FloatArray, allowed: BoolArray, rng: Generator) -> int:
    """An allowed action of the highest q, ties at random."""
    choice = -1
    ties = 0
    for a in range(len(q)):
        if allowed[a]:
            if choice < 0 or q[a] > q[choice]:
                choice = a
                ties = 1
            elif q[a] == q[choice]:
                ties += 1
                if rng.random() * ties < 1.0:
                    choice = a
    return choice


@compiled
def best(
    transitions: FloatArray, rewards: FloatArray, start: FloatArray, allowed: BoolArray, rng: Generator
) -> tuple[PolicyArray, float]:
    """The best policy among those that take allowed actions, ties at random in each cell, and its value."""
    horizon, states, actions = rewards.shape
    policy = np.empty((horizon, states), dtype=np.int32)
    value = np.zeros(states)
    after = np.zeros(states)
    q = np.empty(actions)
    for h in range(horizon - 1, -1, -1):
        value, after = after, value
        for x in range(states):
            for a in range(actions):
                q[a] = rewards[h, x, a]
                if h < horizon - 1 and allowed[h, x, a]:
                    q[a] += expectation(transitions[h, x, a], after)
            policy[h, x] = choose(q, allowed[h, x], rng)
            value[x] = q[policy[h, x]]
    return policy, starting_value(start, value)


@compiled
def nonzeros(transitions: FloatArray) -> tuple[NDArray[np.int64], NDArray[np.int32], FloatArray]:
    """ends[h, x, a], next states and chances: those of a row end there and begin where the row before ends."""
    steps, states, actions, _ = transitions.shape
    ends = np.zeros((steps, states, actions), dtype=np.int64)
    count = np.count_nonzero(transitions)
    targets = np.empty(count, dtype=np.int32)
    chances = np.empty(count)
    n = 0
    for h in range(steps):
        for x in range(states):
            for a in range(actions):
                for y in range(states):
                    if transitions[h, x, a, y] != 0:
                        targets[n] = y
                        chances[n] = transitions[h, x, a, y]
                        n += 1
                ends[h, x, a] = n
    return ends, targets, chances


@compiled
def best_sparse(
    ends: NDArray[np.int64],
    targets: NDArray[np.int32],
    chances: FloatArray,
    rewards: FloatArray,
    start: FloatArray,
    allowed: BoolArray,
    rng: Generator,
) -> tuple[PolicyArray, float]:
    """The same as `best`, for transitions most of which are zero."""
    horizon, states, actions = rewards.shape
    policy = np.empty((horizon, states), dtype=np.int32)
    value = np.zeros(states)
    after = np.zeros(states)
    q = np.empty(actions)
    for h in range(horizon - 1, -1, -1):
        value, after = after, value
        n = 0 if h == 0 else ends[h - 1, states - 1, actions - 1]
        for x in range(states):
            for a in range(actions):
                total = 0.0
                if h < horizon - 1:
                    while n < ends[h, x, a]:
                        total += chances[n] * after[targets[n]]
                        n += 1
                q[a] = rewards[h, x, a] + total
            policy[h, x] = choose(q, allowed[h, x], rng)
            value[x] = q[policy[h, x]]
    return policy, starting_value(start, value)


@compiled
def reachable(transitions: FloatArray, start: FloatArray, allowed: BoolArray) -> BoolArray:
    """Which (h, x, a) some allowed policy gets to with positive probability."""
    horizon, states, actions = allowed.shape
    possible = np.zeros((horizon, states), dtype=np.bool_)
    found = np.zeros(allowed.shape, dtype=np.bool_)
    for x in range(states):
        possible[0, x] = start[x] > 0
    for h in range(horizon):
        for x in range(states):
            if possible[h, x]:
                for a in range(actions):
                    if allowed[h, x, a]:
                        found[h, x, a] = True
                        if h < horizon - 1:
                            for y in range(states):
                                if transitions[h, x, a, y] > 0:
                                    possible[h + 1, y] = True
    return found


@compiled
def _listed(allowed: BoolArray) -> tuple[PolicyArray, PolicyArray]:
    """choices[h, x, :counts[h, x]]: the allowed actions."""
    horizon, states, actions = allowed.shape
    choices = np.zeros((horizon, states, actions), dtype=np.int32)
    counts = np.zeros((horizon, states), dtype=np.int32)
    for h in range(horizon):
        for x in range(states):
            for a in range(actions):
                if allowed[h, x, a]:
                    choices[h, x, counts[h, x]] = a
                    counts[h, x] += 1
    return choices, counts


@compiled
def _act_at_random(policy: PolicyArray, since: int, choices: PolicyArray, counts: PolicyArray, rng: Generator) -> None:
    for h in range(since, policy.shape[0]):
        for x in range(policy.shape[1]):
            n = counts[h, x]
            policy[h, x] = choices[h, x, 0 if n == 1 else int(rng.random() * n)]


@compiled
def _chances(moves: FloatArray, choices: PolicyArray, chance: FloatArray, through: FloatArray) -> None:
    """through[i, x]: how likely the i-th choice is to lead to goal x, when chance[z, x] says how likely state z is."""
    for i in range(len(choices)):
        row = moves[choices[i]]
        total = through[i]
        total[:] = 0.0
        for z in range(len(row)):
            p = row[z]
            if p > 0:
                for x in range(len(total)):
                    total[x] += p * chance[z, x]


@compiled
def _aim(
    through: FloatArray,
    choices: PolicyArray,
    policies: PolicyArray,
    chance: FloatArray,
    tied: PolicyArray,
    rng: Generator,
) -> None:
    """Of through[i, x] write for each goal x the largest, and for each policy for x a choice that has it."""
    actions = len(policies) // len(chance)
    for x in range(len(chance)):
        highest = -1.0
        ties = 0
        for i in range(len(choices)):
            if through[i, x] > highest:
                highest = through[i, x]
                ties = 0
            if through[i, x] == highest:
                tied[ties] = choices[i]
                ties += 1
        chance[x] = highest
        for a in range(actions):
            policies[x * actions + a] = tied[0 if ties == 1 else int(rng.random() * ties)]


@compiled
def policy_cover(
    transitions: FloatArray, start: FloatArray, allowed: BoolArray, step: int, rng: Generator
) -> tuple[PolicyArray, FloatArray]:
    """For every (x, a) the allowed policy likeliest to be in x at `step` and take a there; ties at random."""
    horizon, states, actions = allowed.shape
    choices, counts = _listed(allowed)
    policies = np.empty((states * actions, horizon, states), dtype=np.int32)
    # chance[y, x]: how likely the best policy for x is to get there from y; one column for each goal.
    chance = np.eye(states)
    earlier = np.empty((states, states))
    through = np.empty((actions, states))
    tied = np.empty(actions, dtype=np.int32)
    for h in range(step - 1, -1, -1):
        for y in range(states):
            mine = choices[h, y, : counts[h, y]]
            _chances(transitions[h, y], mine, chance, through)
            _aim(through, mine, policies[:, h, y], earlier[y], tied, rng)
        chance, earlier = earlier, chance

    reach = np.zeros((states, actions))
    for x in range(states):
        for a in range(actions):
            policy = policies[x * actions + a]
            if allowed[step, x, a]:
                reach[x, a] = starting_value(start, chance[:, x])
                _act_at_random(policy, step, choices, counts, rng)
                policy[step, x] = a
            else:  # never taken: all policies tie at zero
                _act_at_random(policy, 0, choices, counts, rng)
    return policies, reach


@compiled
def _loses_margin(
    transitions: FloatArray,
    q: FloatArray,
    value: FloatArray,
    start: FloatArray,
    allowed: BoolArray,
    rewards: FloatArray,
    cell: tuple[int, int],
    forced: float,
    goal: tuple[float, float, float],
    alive: FloatArray,
    scratch: FloatArray,
) -> bool:
    """Whether the best policy is `margin` worse than the best of all once cell (h, x) is worth only `forced`.

    Walks back from the cell. What is lost at the start is an average of what is lost at any step over the states
    there, so the walk ends early when even the largest loss of a step is too small, or the least one large enough.
    """
    h, x = cell
    highest, margin, slack = goal
    states = value.shape[1]
    after, now = scratch[0], scratch[1]
    after[:] = value[h]
    after[x] = forced
    for g in range(h - 1, -1, -1):
        most = 0.0
        least = np.inf
        for y in range(states):
            top = -np.inf
            for a in range(q.shape[2]):
                # A loss only lowers q, so an action that was below the top so far cannot rise above it.
                if allowed[g, y, a] and q[g, y, a] > top:
                    top = max(top, rewards[g, y, a] + expectation(transitions[g, y, a], after))
            now[y] = top
            loss = value[g, y] - top
            most = max(most, loss)
            least = min(least, loss)
        if most * alive[g, 1] < margin - slack:
            return False
        if least * alive[g, 0] > margin + slack:
            return True
        after, now = now, after
    return highest - starting_value(start, after) >= margin


@compiled
def _values(
    transitions: FloatArray, rewards: FloatArray, allowed: BoolArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """q[h, x, a] and value[h, x] of the best allowed policy, and the value[x] of the worst one from the first step."""
    horizon, states, actions = rewards.shape
    q = rewards.copy()
    value = np.full((horizon, states), -np.inf)
    lowest = np.full((horizon, states), np.inf)
    for h in range(horizon - 1, -1, -1):
        for x in range(states):
            for a in range(actions):
                if allowed[h, x, a]:
                    worst = q[h, x, a]
                    if h < horizon - 1:
                        worst += expectation(transitions[h, x, a], lowest[h + 1])
                        q[h, x, a] += expectation(transitions[h, x, a], value[h + 1])
                    value[h, x] = max(value[h, x], q[h, x, a])
                    lowest[h, x] = min(lowest[h, x], worst)
    return q, value, lowest[0]


@compiled
def _survival(transitions: FloatArray, start: FloatArray, allowed: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Bounds on what any allowed policy can do.

    alive[h]: the least and the most that can be left, by step h, of what has not been absorbed; entry[h, x]: the
    largest chance of any action to lead into x at step h.
    """
    horizon, states, actions = allowed.shape
    alive = np.full((horizon, 2), start.sum())
    entry = np.zeros((horizon, states))
    entry[0] = start
    for h in range(horizon - 1):
        least, most = np.inf, 0.0
        for x in range(states):
            for a in range(actions):
                if allowed[h, x, a]:
                    total = 0.0
                    for y in range(states):
                        total += transitions[h, x, a, y]
                        entry[h + 1, y] = max(entry[h + 1, y], transitions[h, x, a, y])
                    least = min(least, total)
                    most = max(most, total)
        alive[h + 1, 0] = alive[h, 0] * least
        alive[h + 1, 1] = alive[h, 1] * most
    return alive, entry


@compiled
def _worst_last(q: FloatArray, candidates: BoolArray, order: NDArray[np.int64]) -> int:
    """Write the candidate actions by falling q; return how many there are."""
    n = 0
    for a in range(len(q)):
        if candidates[a]:
            i = n
            while i > 0 and q[order[i - 1]] < q[a]:
                order[i] = order[i - 1]
                i -= 1
            order[i] = a
            n += 1
    return n


@compiled
def hopeless_actions(
    transitions: FloatArray, rewards: FloatArray, start: FloatArray, allowed: BoolArray, margin: float
) -> BoolArray:
    """drop[h, x, a]: every allowed policy that takes a there is at least `margin` worse than the best one."""
    horizon, states, actions = rewards.shape
    drop = np.zeros(allowed.shape, dtype=np.bool_)
    q, value, lowest = _values(transitions, rewards, allowed)
    highest = starting_value(start, value[0])
    if highest - starting_value(start, lowest) < margin:
        return drop

    alive, entry = _survival(transitions, start, allowed)
    slack = 1e-9 * margin + 1e-12 * np.abs(value).max()
    goal = (highest, margin, slack)
    scratch = np.empty((2, states))
    order = np.empty(actions, dtype=np.int64)
    for h in range(horizon):
        for x in range(states):
            # The most that a policy can lose by taking a here is too little for most actions.
            visits = entry[h, x] * (alive[h - 1, 1] if h > 0 else 1.0)
            loss = (value[h, x] - q[h, x]) * visits
            n = _worst_last(q[h, x], allowed[h, x] & (loss >= margin - slack), order)
            # The worse an action, the more is lost by taking it: find the first one bad enough by halving.
            keep, bad = -1, n
            while bad - keep > 1:
                middle = (keep + bad) // 2
                forced = q[h, x, order[middle]]
                if _loses_margin(transitions, q, value, start, allowed, rewards, (h, x), forced, goal, alive, scratch):
                    bad = middle
                else:
                    keep = middle
            for i in range(bad, n):
                drop[h, x, order[i]] = True
    return drop
