"""SDP-PE in one file, with the paper's constants, line by line beside the paper's Algorithms 1 to 3.

Plain NumPy over a list of all deterministic policies: slow, small and readable from top to bottom. The library's
`sdp-pe` with `constants=paper` decides the same (tests/examples/test_sdp_pe_reference.py), with policy sets that never
list policies.
A line that differs from the printed one names the correction of docs/corrections.md that asks for it.

    python examples/sdp_pe_reference.py          # a small problem, 30 to 3e13 episodes, without privacy
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Policies = NDArray[np.int32]
#: Users who play these policies, each policy equally often or by its weight, and whose transitions at some steps and
#: rewards at some steps are counted; the answer are noisy counts[h, x, a, x'] and [h, x, a, r], and their precision E.
Privatizer = Callable[[int, Policies, Floats, list[int], list[int]], tuple[Floats, Floats, float]]


@dataclass
class Stage:
    """What one stage did."""

    users: int
    infrequent: NDArray[np.bool_]
    crude: Floats
    coverage_ratio: float
    radius: float
    best_value: float
    policies: Policies  # that are left


@dataclass
class Problem:
    """What is public."""

    horizon: int
    states: int
    actions: int
    start: Floats
    episodes: int


# Algorithm 1


def sdp_pe(
    problem: Problem, privatizer: Privatizer, rng: np.random.Generator, c: float = 1.0, failure: float = 0.05
) -> list[Stage]:
    """Shuffle DP policy elimination; all stages, the last with the policies that are left."""
    h, x, a = problem.horizon, problem.states, problem.actions
    policies = all_policies(problem)
    iota = math.log(2 * h * a * problem.episodes / failure)
    stages: list[Stage] = []
    left = problem.episodes
    while left:  # line 1: for b = 1 to B
        users = 3 * 2 ** (len(stages) + 1)
        if users >= left or left - users < 3:  # lines 2-4; every episode is played (correction 4)
            users = left
        length = users // 3
        infrequent, crude, auxiliary = crude_exploration(problem, policies, length, iota, privatizer, rng)
        model, rewards, precision, ratio = fine_exploration(
            problem, infrequent, crude, policies, auxiliary, users - length_of_crude(problem, length), privatizer, rng
        )
        # Lines 7-13: what is worse than the best by twice the radius goes.
        radius = c * (math.sqrt(x * a * h**3 * iota / length) + x**3 * a * h**5 * precision * iota / length)
        values = value(problem, policies, model, rewards)
        policies = policies[values.max() - values < 2 * radius]
        stages.append(Stage(users, infrequent, crude, ratio, radius, float(values.max()), policies))
        left -= users
    return stages


# Algorithm 2


def crude_exploration(
    problem: Problem, policies: Policies, length: int, iota: float, privatizer: Privatizer, rng: np.random.Generator
) -> tuple[NDArray[np.bool_], Floats, Policies]:
    """Infrequent tuples, a crude model in which they lead to the absorbing state, and the policies that explored."""
    h, x, a = problem.horizon, problem.states, problem.actions
    infrequent = np.ones((h - 1, x, a, x), dtype=np.bool_)
    crude = np.zeros((h - 1, x, a, x))
    auxiliary = []
    for step, users in enumerate(split(length, h - 1)):  # line 1; nothing follows the last step (correction 8)
        if users == 0:  # fewer users than steps (correction 5)
            continue
        cover = explore(problem, policies, crude, step, rng)  # lines 3-5
        auxiliary.append(cover)
        transitions, _, precision = privatizer(users, cover, uniform(cover), [step], [])  # lines 6-8
        counts = private_counts(transitions[step], transitions[step].sum(axis=-1), precision)
        infrequent[step] = counts <= 6 * precision * h**2 * iota  # line 9, C_1 = 6
        crude[step] = estimate_transition(counts, infrequent[step])  # line 10
    auxiliary.append(explore(problem, policies, crude, h - 1, rng))
    return infrequent, crude, np.concatenate(auxiliary)  # line 12


def explore(problem: Problem, policies: Policies, model: Floats, step: int, rng: np.random.Generator) -> Policies:
    """For every (x, a) the policy most likely to get there at this step; ties are drawn (correction 9)."""
    visits = occupancy(problem, policies, model)[:, step]
    chosen = []
    for state, action in itertools.product(range(problem.states), range(problem.actions)):
        reach = visits[:, state] * (policies[:, step, state] == action)
        chosen.append(rng.choice(np.flatnonzero(reach == reach.max())))
    return policies[chosen]


def estimate_transition(counts: Floats, infrequent: NDArray[np.bool_]) -> Floats:
    """Rows of private counts as probabilities; what is infrequent goes to the absorbing state, out of the table."""
    return np.asarray(np.where(infrequent, 0.0, counts / counts.sum(axis=-1, keepdims=True)))


# Algorithm 3


def fine_exploration(
    problem: Problem,
    infrequent: NDArray[np.bool_],
    crude: Floats,
    policies: Policies,
    auxiliary: Policies,
    users: int,
    privatizer: Privatizer,
    rng: np.random.Generator,
) -> tuple[Floats, Floats, float, float]:
    """The refined model and rewards, their precision, and how well the design covered the policies."""
    weights, ratio = coverage_design(problem, policies, crude)  # line 1: a mixture (correction 6)
    played = np.concatenate([policies, auxiliary])
    shares = np.concatenate([weights, uniform(auxiliary)]) / 2  # line 2: half of the users each
    steps = list(range(problem.horizon))
    transitions, rewards, precision = privatizer(users, played, shares, steps[:-1], steps)  # lines 3-4
    successors, bits = problem.states, rewards.sum(axis=-1)
    # Both families count every visit; the mean of least variance weighs each by the inverse of its own.
    totals = (2 * transitions.sum(axis=-1) + successors * bits[:-1]) / (successors + 2)
    refined, visits = np.zeros_like(crude), np.maximum(bits, 0.0) + precision / 2
    for step in steps[:-1]:  # lines 5-8
        counts = private_counts(transitions[step], totals[step], precision)
        refined[step] = estimate_transition(counts, infrequent[step])
        visits[step] = counts.sum(axis=-1)
    return refined, rewards[..., 1] / visits, precision, ratio


def coverage_design(problem: Problem, policies: Policies, model: Floats) -> tuple[Floats, float]:
    """Weights w of policies that cover every policy: min over w of max over m of sum_c d_mc / (w d)_c.

    At the optimum this is the number of reachable cells c = (h, x, a), and the optimum maximises sum_c log (w d)_c
    (Lemma 1 of Zhang et al. 2022): the likelihood of a mixture, which this fixed point of EM climbs.
    """
    visits = occupancy(problem, policies, model)[..., None] * np.eye(problem.actions)[policies]
    cells = visits.reshape(len(policies), -1)
    cells = cells[:, cells.max(axis=0) > 0]  # 0/0 is 0: what no policy can reach is covered
    weights = uniform(policies)
    for _ in range(10_000):
        coverage = cells @ (1 / (weights @ cells))
        ratio = float(coverage.max() / cells.shape[1])
        if ratio <= 1.05:
            break
        weights = weights * coverage / cells.shape[1]
    return weights / weights.sum(), ratio


# Private counts, models and policies


def private_counts(noisy: Floats, totals: Floats, precision: float) -> Floats:
    """Counts n[..., x'] that satisfy the paper's Assumption 1, from noisy ones within E/4 of the truth.

    min t with n >= 0, |n - y| <= t, |sum n - N| <= E/4, and of these n the one nearest to N and then to y: it is
    (y + c)+ with one c for the row. Then E / (2X) more for every cell, so that none is zero and none too small.
    """
    slack = precision / 4
    totals = np.maximum(totals, -slack)  # else nothing is feasible (correction 7)

    def shift(total: float, row: Floats) -> float:
        """The c with sum (y + c)+ = total; below zero the sum goes on in a straight line."""
        falling = np.sort(row)[::-1]
        return float(np.min((total - np.cumsum(falling)) / np.arange(1, len(row) + 1)))

    counts = np.empty_like(noisy)
    for row in np.ndindex(noisy.shape[:-1]):
        y, total = noisy[row], float(totals[row])
        t = max(0.0, -y.min(), shift(total - slack, y), -shift(total + slack, y))
        counts[row] = np.maximum(y + np.clip(shift(total, y), -t, t), 0.0)
    return np.asarray(counts + precision / (2 * noisy.shape[-1]))


def value(problem: Problem, policies: Policies, model: Floats, rewards: Floats) -> Floats:
    """V[m] of every policy; the absorbing state earns nothing."""
    worth = np.zeros((len(policies), problem.states))
    states = np.arange(problem.states)
    for step in reversed(range(problem.horizon)):
        actions = policies[:, step]
        later = 0.0 if step == problem.horizon - 1 else np.einsum("mxy,my->mx", model[step][states, actions], worth)
        worth = rewards[step][states, actions] + later
    return np.asarray(worth @ problem.start)


def occupancy(problem: Problem, policies: Policies, model: Floats) -> Floats:
    """d[m, h, x]: how likely each policy is to be in x at step h."""
    visits = np.empty((len(policies), problem.horizon, problem.states))
    visits[:, 0] = problem.start
    states = np.arange(problem.states)
    for step in range(problem.horizon - 1):
        visits[:, step + 1] = np.einsum("mx,mxy->my", visits[:, step], model[step][states, policies[:, step]])
    return visits


def all_policies(problem: Problem) -> Policies:
    """policies[m, h, x], every one."""
    cells = problem.horizon * problem.states
    listed = np.array(list(itertools.product(range(problem.actions), repeat=cells)), dtype=np.int32)
    return listed.reshape(-1, problem.horizon, problem.states)


def uniform(policies: Policies) -> Floats:
    """Equal weights."""
    return np.full(len(policies), 1 / len(policies))


def split(users: int, parts: int) -> list[int]:
    """As even as whole numbers allow, larger parts first."""
    return [users // parts + (part < users % parts) for part in range(parts)]


def length_of_crude(problem: Problem, length: int) -> int:
    """Users of crude exploration; where there is no step to explore, fine exploration has them."""
    return length if problem.horizon > 1 else 0


def main() -> None:
    """Two states: going right costs now and pays later."""
    rng = np.random.default_rng(1)
    problem = Problem(3, 2, 2, np.array([1.0, 0.0]), 0)
    moves = np.array([[[0.9, 0.1], [0.3, 0.7]], [[0.8, 0.2], [0.1, 0.9]]])  # [x, a, x'], at every step
    pays = np.array([[0.1, 0.0], [0.0, 0.9]])  # [x, a]

    def exact(
        users: int, policies: Policies, weights: Floats, transition_steps: list[int], reward_steps: list[int]
    ) -> tuple[Floats, Floats, float]:
        """No privacy: the counts of users who play, drawn at a cost that does not grow with them. E is 1, not 0."""
        transitions, rewards = np.zeros((2, 2, 2, 2)), np.zeros((3, 2, 2, 2))
        for policy, number in zip(policies, rng.multinomial(users, weights / weights.sum()), strict=True):
            there = np.array([number, 0])
            for step in range(3):
                following = np.zeros(2, dtype=np.int64)
                for state, visits in enumerate(there):
                    action = policy[step, state]
                    paid = rng.binomial(visits, pays[state, action])
                    rewards[step, state, action] += (visits - paid, paid)
                    if step < 2:
                        moved = rng.multinomial(visits, moves[state, action])
                        transitions[step, state, action] += moved
                        following += moved
                there = following
        return transitions, rewards, 1.0

    for episodes in (30, 30_000, 3 * 10**7, 3 * 10**10, 3 * 10**13):
        problem.episodes = episodes
        last = sdp_pe(problem, exact, rng)[-1]
        print(f"{episodes:>20,} episodes: {len(last.policies):>3} of 64 policies left, radius {last.radius:.3g}")


if __name__ == "__main__":
    main()
