"""Confidence on an estimated model: bounds on Q, and which actions are significantly worse than the incumbent."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.compiling import compiled
from shufflerl.estimation.model import Model
from shufflerl.policy_sets.product_kernels import choose


class Plan(NamedTuple):
    """policy[h, x] with its Q[h, x, a], -inf where a is not allowed, and value[h, x], zeros one step past the last."""

    policy: PolicyArray
    q: FloatArray
    value: FloatArray


class Margin(NamedTuple):
    """What a gap must exceed to be significant: so many standard errors, plus a second-order term (`curvature`)."""

    deviations: float
    curvature: float


@compiled
def row_variance(h: int, x: int, a: int, gradient: FloatArray, slope: float, model: Model) -> float:
    """Variance, by the delta method, of slope * r + sum_x' gradient(x') P(x') as estimated in one row.

    A row that was hardly ever visited may show no spread at all; one more outcome, spread evenly, is added to it.
    """
    smoothing = min(1.0, model.inverse_ess[h, x, a])
    r = model.rewards[h, x, a]
    paid = max(r * (1.0 - r), 0.25 * smoothing)
    spread = 0.0
    sum_of_squares = 0.0
    if h < len(model.rewards) - 1:
        mean = 0.0
        for y in range(len(gradient)):
            mean += model.transitions[h, x, a, y] * gradient[y]
        for y in range(len(gradient)):
            deviation = gradient[y] - mean
            spread += model.transitions[h, x, a, y] * deviation * deviation
            sum_of_squares += deviation * deviation
        spread += smoothing * sum_of_squares / len(gradient)
    sampling_variance = model.inverse_ess[h, x, a] * (spread + slope * slope * paid)
    return float(sampling_variance + model.noise_variance[h, x, a] * (sum_of_squares + 0.5 * slope * slope))


@compiled
def bounded_plan(rng: Generator, allowed: BoolArray, deviations: float, model: Model) -> Plan:
    """The policy of allowed actions that is best for Q plus so many deviations of its row, with that Q and its V.

    Unknown rows are worth all that can still be earned, or nothing when `deviations` is negative. Ties at random.
    """
    horizon, states, actions = model.rewards.shape
    policy = np.zeros((horizon, states), dtype=np.int32)
    q = np.full((horizon, states, actions), -np.inf)
    value = np.zeros((horizon + 1, states))
    for h in range(horizon - 1, -1, -1):
        max_value = float(horizon - h)
        for x in range(states):
            for a in range(actions):
                if not allowed[h, x, a]:
                    continue
                if model.known[h, x, a]:
                    total = model.rewards[h, x, a]
                    if h < horizon - 1:
                        for y in range(states):
                            total += model.transitions[h, x, a, y] * value[h + 1, y]
                    if deviations != 0.0:
                        variance = row_variance(h, x, a, value[h + 1], 1.0, model)
                        total += deviations * np.sqrt(variance)
                    total = min(max_value, max(0.0, total))
                else:
                    total = 0.0 if deviations < 0.0 else max_value
                q[h, x, a] = total
            policy[h, x] = choose(q[h, x], allowed[h, x], rng)
            value[h, x] = q[h, x, policy[h, x]]
    return Plan(policy, q, value)


@compiled
def incumbent_value(incumbent: PolicyArray, model: Model) -> FloatArray:
    """value[h, x] of a policy from step h on, unknown rows worth nothing; one step past the last, zeros."""
    horizon, states, _ = model.rewards.shape
    value = np.zeros((horizon + 1, states))
    for h in range(horizon - 1, -1, -1):
        for x in range(states):
            a = incumbent[h, x]
            if model.known[h, x, a]:
                total = model.rewards[h, x, a]
                if h < horizon - 1:
                    for y in range(states):
                        total += model.transitions[h, x, a, y] * value[h + 1, y]
                value[h, x] = total
    return value


@compiled
def incumbent_error(incumbent: PolicyArray, start: FloatArray, value: FloatArray, model: Model) -> tuple[float, float]:
    """Of a policy's `incumbent_value`: its variance, and how much more it may earn in rows that are not known."""
    horizon, states, _ = model.rewards.shape
    here = start.copy()
    variance = 0.0
    unknown = 0.0
    for h in range(horizon):
        after = np.zeros(states)
        for x in range(states):
            a = int(incumbent[h, x])
            if here[x] == 0.0:
                continue
            if not model.known[h, x, a]:
                unknown += here[x] * (horizon - h)
                continue
            gradient = here[x] * value[h + 1]
            variance += row_variance(h, x, a, gradient, here[x], model)
            if h < horizon - 1:
                for y in range(states):
                    after[y] += here[x] * model.transitions[h, x, a, y]
        here = after
    return variance, unknown


@compiled
def significantly_worse(
    gap: float,
    h: int,
    x: int,
    a: int,
    incumbent: PolicyArray,
    value: FloatArray,
    rival: Plan,
    margin: Margin,
    model: Model,
) -> bool:
    """Whether the estimated gap, from (h, x) on, between the incumbent and a followed by the rival exceeds its error.

    Both are read off the same model, so errors they share cancel: the margin is in standard errors of the difference,
    row by row along both paths, and its second-order term counts where rows are thin. It only grows on the way, so the
    walk ends where it has reached the gap.
    """
    horizon, states, _ = model.rewards.shape
    ours = np.zeros(states)
    theirs = np.zeros(states)
    ours[x] = theirs[x] = 1.0
    gradient = np.empty(states)
    variance = 0.0
    thin = 0.0
    for k in range(h, horizon):
        ours_next = np.zeros(states)
        theirs_next = np.zeros(states)
        for z in range(states):
            i = int(incumbent[k, z])
            j = a if k == h else int(rival.policy[k, z])
            p = ours[z] if model.known[k, z, i] else 0.0
            q = theirs[z] if model.known[k, z, j] else 0.0
            for second in range(1 if i == j else 2):
                # One row where both act alike; else first ours, then theirs.
                action = j if second else i
                mine = 0.0 if second else p
                other = q if second or i == j else 0.0
                if mine == 0.0 and other == 0.0:
                    continue
                for y in range(states):
                    gradient[y] = mine * value[k + 1, y] - other * rival.value[k + 1, y]
                variance += row_variance(k, z, action, gradient, mine - other, model)
                thin += abs(mine - other) * (horizon - k) * model.inverse_ess[k, z, action]
            if k < horizon - 1:
                for y in range(states):
                    ours_next[y] += p * model.transitions[k, z, i, y]
                    theirs_next[y] += q * model.transitions[k, z, j, y]
        if gap <= margin.deviations * np.sqrt(variance) + margin.curvature * thin:
            return False
        ours = ours_next
        theirs = theirs_next
    return True


@compiled
def dominated(allowed: BoolArray, incumbent: PolicyArray, rival: Plan, margin: Margin, model: Model) -> BoolArray:
    """Which allowed, known actions a at (h, x) are significantly worse there than the incumbent.

    The rival is the best of the allowed policies with unknown rows worth all that can still be earned; the
    incumbent's unknown rows are worth nothing.
    """
    value = incumbent_value(incumbent, model)
    drop = np.zeros(allowed.shape, dtype=np.bool_)
    for h in range(allowed.shape[0]):
        for x in range(allowed.shape[1]):
            for a in range(allowed.shape[2]):
                gap = value[h, x] - rival.q[h, x, a]
                if not allowed[h, x, a] or not model.known[h, x, a] or a == incumbent[h, x] or gap <= 0:
                    continue
                drop[h, x, a] = significantly_worse(gap, h, x, a, incumbent, value, rival, margin, model)
    return drop
