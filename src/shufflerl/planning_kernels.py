"""Dynamic programs over transitions in rows (see `Layout`) and rewards[h, x, a]; transitions have a layer fewer."""

from __future__ import annotations

import numpy as np

from shufflerl.arrays import FloatArray, IntArray, PolicyArray, StateArray
from shufflerl.compiling import compiled


@compiled
def optimal_q(
    row_starts: IntArray, successors: StateArray, probabilities: FloatArray, rewards: FloatArray
) -> FloatArray:
    """Q*[h, x, a] by backward induction. Rows may sum to less than one: what is missing earns nothing."""
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
                row = (h * states + x) * actions + a
                total = 0.0
                for i in range(row_starts[row], row_starts[row + 1]):
                    total += probabilities[i] * value[successors[i]]
                q[h, x, a] += total
    return q


@compiled
def policy_value(
    row_starts: IntArray,
    successors: StateArray,
    probabilities: FloatArray,
    rewards: FloatArray,
    policy: PolicyArray,
    value: FloatArray,
    after: FloatArray,
) -> None:
    """Write into `value` the value of one policy from each start state; `after` is scratch of the same size."""
    horizon, states = policy.shape
    actions = rewards.shape[2]
    for x in range(states):
        value[x] = rewards[horizon - 1, x, policy[horizon - 1, x]]
    for h in range(horizon - 2, -1, -1):
        for x in range(states):
            after[x] = value[x]
        for x in range(states):
            a = policy[h, x]
            row = (h * states + x) * actions + a
            total = rewards[h, x, a]
            for i in range(row_starts[row], row_starts[row + 1]):
                total += probabilities[i] * after[successors[i]]
            value[x] = total


@compiled
def policy_values(
    row_starts: IntArray,
    successors: StateArray,
    probabilities: FloatArray,
    rewards: FloatArray,
    start: FloatArray,
    policies: PolicyArray,
) -> FloatArray:
    """The expected reward of an episode under each of many policies."""
    count, _, states = policies.shape
    values = np.empty(count)
    value = np.empty(states)
    after = np.empty(states)
    for i in range(count):
        policy_value(row_starts, successors, probabilities, rewards, policies[i], value, after)
        total = 0.0
        for x in range(states):
            total += start[x] * value[x]
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
