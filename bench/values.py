"""The values of many policies at once beside a NumPy loop over policies."""

from __future__ import annotations

import numpy as np

from bench.measure import Figure, medians, seconds
from shufflerl import MDP, envs
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.planning import policy_values

POLICIES, REPEATS = 100_000, 10


def run() -> list[Figure]:
    """Values of 100,000 random policies, X=10 A=4 H=10, against a NumPy loop over them, a tenth in each repeat."""
    mdp = envs.make("random", seed=1, n_states=10, n_actions=4, horizon=10)
    assert isinstance(mdp, MDP)
    shape = (POLICIES, mdp.horizon, mdp.n_states)
    policies = np.random.default_rng(2).integers(mdp.n_actions, size=shape, dtype=np.int32)
    parts = np.split(policies, REPEATS)
    ours, theirs = np.empty(POLICIES), np.empty((REPEATS, POLICIES // REPEATS))

    def all_at_once() -> None:
        ours[:] = policy_values(mdp.transitions, mdp.rewards, mdp.start, policies)

    def loop(repeat: int) -> None:
        theirs[repeat] = numpy_loop(mdp, parts[repeat])

    all_at_once()
    our_speed, loop_speed = medians(
        REPEATS,
        lambda _: POLICIES / seconds(all_at_once),
        lambda repeat: len(parts[repeat]) / seconds(lambda: loop(repeat)),
    )
    error = float(np.abs(ours - theirs.ravel()).max())
    return [
        Figure.at_least(20, "100,000 policies", "policies/s", our_speed, loop_speed, "NumPy loop"),
        Figure.under(1e-12, "largest difference of the values", "", error),
    ]


def numpy_loop(mdp: MDP, policies: PolicyArray) -> FloatArray:
    """One policy after the other, all states of a step at once."""
    states = np.arange(mdp.n_states)
    values = np.empty(len(policies))
    for i, policy in enumerate(policies):
        value = mdp.rewards[-1, states, policy[-1]]
        for h in range(mdp.horizon - 2, -1, -1):
            value = mdp.rewards[h, states, policy[h]] + mdp.transitions[h, states, policy[h]] @ value
        values[i] = mdp.start @ value
    return values
