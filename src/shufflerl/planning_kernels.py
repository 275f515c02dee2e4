"""Dynamic programs over `Dynamics`."""

from __future__ import annotations

import numpy as np

from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.compiling import compiled, inlined
from shufflerl.layout import Dynamics


@inlined
def row_of(row_starts: IntArray, rewards: FloatArray, h: int, x: int, a: int) -> tuple[int, int]:
    """Where the transitions from (h, x, a) begin and end."""
    row = (h * rewards.shape[1] + x) * rewards.shape[2] + a
    return row_starts[row], row_starts[row + 1]


@compiled
def optimal_q(dynamics: Dynamics) -> FloatArray:
    """Q*[h, x, a] by backward induction, which asks for no start."""
    row_starts, successors, probabilities, rewards, _, _ = dynamics
    horizon, states, actions = rewards.shape
    q = rewards.copy()
    value = np.empty(states)
    for h in range(horizon - 2, -1, -1):
        for x in range(states):
            value[x] = q[h + 1, x, 0]
            for a in range(1, actions):
                value[x] = max(value[x], q[h + 1, x, a])
        for x in range(states):
            for a in range(actions):
                first, end = row_of(row_starts, rewards, h, x, a)
                total = 0.0
                for i in range(first, end):
                    total += probabilities[i] * value[successors[i]]
                q[h, x, a] += total
    return q


@compiled
def policy_value(dynamics: Dynamics, policy: PolicyArray, value: FloatArray, after: FloatArray) -> None:
    """Write into `value` the value of one policy from each start state; `after` is scratch of the same size."""
    horizon, states = policy.shape
    row_starts, successors, probabilities, rewards, _, _ = dynamics
    for x in range(states):
        value[x] = rewards[horizon - 1, x, policy[horizon - 1, x]]
    for h in range(horizon - 2, -1, -1):
        for x in range(states):
            after[x] = value[x]
        for x in range(states):
            a = policy[h, x]
            first, end = row_of(row_starts, rewards, h, x, a)
            total = rewards[h, x, a]
            for i in range(first, end):
                total += probabilities[i] * after[successors[i]]
            value[x] = total


@compiled
def policy_values(dynamics: Dynamics, policies: PolicyArray) -> FloatArray:
    """The expected reward of an episode under each of many policies."""
    count, _, states = policies.shape
    values = np.empty(count)
    value = np.empty(states)
    after = np.empty(states)
    for i in range(count):
        policy_value(dynamics, policies[i], value, after)
        total = 0.0
        for x in range(states):
            total += dynamics.start[x] * value[x]
        values[i] = total
    return values


@compiled
def visit_probabilities(transitions: FloatArray, start: FloatArray, policies: PolicyArray) -> FloatArray:
    """visits[m, h, x] by a table transitions[h, x, a, x']: how likely policy m is to be in state x at step h."""
    count, horizon, states = policies.shape
    visits = np.zeros((count, horizon, states))
    for i in range(count):
        for x in range(states):
            visits[i, 0, x] = start[x]
        for h in range(horizon - 1):
            for x in range(states):
                here = visits[i, h, x]
                if here > 0:
                    a = policies[i, h, x]
                    for y in range(states):
                        visits[i, h + 1, y] += here * transitions[h, x, a, y]
    return visits
