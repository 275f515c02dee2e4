"""Second looks: what is most worth finding out beside the best policy, and what a whole batch plays.

A look is the best policy but at one step, where every state takes the action that is most worth a try: nobody meets
more than one such try, so what it costs and what it tells does not depend on the others. Or it goes out of its way
to one row that the best policy rarely passes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.asking import choose_counters
from shufflerl.learners.optimistic.detours import FINER, HARDLY, Rivals, count_gains, gain_of, plan_detour, whole_try
from shufflerl.learners.optimistic.optimism import (
    Rows,
    along,
    information,
    mean_and_error,
    optimistic_policy,
    visits_for,
)
from shufflerl.learners.optimistic.pooling import TYPICAL

#: Standard errors in looks are taken so many times: the bolder, the more they find of what was dismissed by bad luck,
#: and the more they cost, a trade of mean regret for its tail. Less where steps are alike: there it counts as well who
#: comes at other steps. Without noise looks are small (see `gain_of`) and go on from batch to batch while they seem
#: worth it: with errors so bold they end where optimal stopping would, and a little later where steps are alike.
_BOLD, _BOLD_ALIKE = 0.9, 0.8
_BOLD_UNNOISY, _BOLD_UNNOISY_ALIKE = 1.65, 1.95
#: Who comes to the same state at another step counts by this part, as far as the steps are alike: what is found out is
#: found out for them too. Less than one, as other steps are looked at as well: again a trade of mean for tail.
_OTHER_STEPS, _OTHER_STEPS_UNNOISY = 0.5, 0.3
#: With noise the variance of what few visits tell is taken twice, from this many on less: one unlucky try is no law.
_FEW = 8.0
#: A sixth of a skew below this is none.
_SYMMETRIC = 1e-9
#: Looks of a batch at most; the smallest, in parts of the smallest try.
_LOOKS, _SMALL = 4, 0.5
#: Users of all looks of a batch at most: some in any case, and as many more of these as optimism would send along the
#: best policy anyhow. Without noise each look has a part of them: steps where it costs little to try take turns with
#: those where it is dear.
_ANYHOW, _SHARE = 0.04, 0.32
_ANYHOW_UNNOISY, _SHARE_UNNOISY, _EACH_UNNOISY = 0.12, 0.3, 0.25
#: What a batch asks for is chosen by what it tries, so looks reckon with so much less of the noise that the other
#: counters add. Not with none of it: the rest of the batch is heard as well.
_UNASKED = 0.7
#: Bonuses of the plans that all other users play are this much of a standard error times z. Less than one, since
#: values add up over a path of rows that are all taken at their best, which no run of luck would do.
_OPTIMISM = 0.5
#: Policies of a batch at most.
MOST = 9
#: States that are less likely are never met.
_NEVER = 1e-12


class Best(NamedTuple):
    """The best policy by the estimates, how likely it is in (h, x), and all actions against it.

    They are `behind` it by so much, the `variance` of that, and there is so much `room` ahead of it (see `Rivals`).
    What it earns from (h, x) on is `unsure` by such variances. All users so far `lost` so much against it, or one.
    """

    policy: PolicyArray
    reached: FloatArray
    behind: FloatArray
    variance: FloatArray
    room: FloatArray
    unsure: FloatArray
    lost: float


@compiled
def plan_batch(
    rows: Rows,
    start: FloatArray,
    users: float,
    left: float,
    kept: float,
    noisy: float,
    each: float,
    smallest: float,
    lots: FloatArray,
    policies: PolicyArray,
    shares: FloatArray,
    asked: BoolArray,
) -> int:
    """Write the policies of a batch and how many of its `users` play each; returns how many policies there are.

    Looks first, then optimistic plans, each made as if those before it had been played already. A look is for as many
    users as gain most by it, a plan for as many as double what is known of one of its decisions (or bring it the
    `smallest` try). Who is left when there is no room for more plays the best policy. The less is left to discover, the
    more users may look back; a whole try stays for the plans. Of the users `left` after the batch a part is `kept`
    until batches are larger (see `Rivals`). `noisy` is the variance of a counter's noise if every counter is asked,
    `lots` break ties.

    Writes which of the counters are `asked` (see `choose_counters`): all, unless `each` that users touch adds noise.
    """
    promised = np.zeros_like(rows.visits)
    reached = np.zeros(rows.visits.shape[:2])
    given = 0.0
    looked = np.zeros(len(reached), dtype=np.bool_)
    looking = rows.visits.max() > 0.0  # back at what was seen
    plan = np.empty_like(policies[0])
    hoped = np.empty_like(reached)
    further = np.empty_like(reached)
    optimistic_policy(rows, promised, _OPTIMISM, max(smallest, users), left, noisy, lots[0], plan, hoped)
    best = find_best(rows, start)
    faithful = _faithful(rows, start, plan, best.policy)
    most_looking = by_one = users * (_ANYHOW + _SHARE * faithful)
    if noisy == 0.0:
        most_looking = users * (_ANYHOW_UNNOISY + _SHARE_UNNOISY * faithful)
        by_one = most_looking * _EACH_UNNOISY
    noise_in_looks = noisy - _UNASKED * each * (asked.sum() - 1)
    for c in range(len(policies)):
        policy = policies[c]
        last = c == len(policies) - 1
        rest = users - given
        look = 0.0
        if looking and c < _LOOKS and not last:
            sizes = (_SMALL * smallest, min(by_one, most_looking - given, rest - smallest))
            look = plan_look(rows, best, promised, start, sizes, left, kept, noise_in_looks, looked, policy)
        looking = look > 0.0
        if c == 0 and not looking:
            policy[:] = plan
        elif not looking:
            to_come = 0.0 if last else left
            by = max(smallest, users)
            optimistic_policy(rows, promised, _OPTIMISM, by, to_come, noisy, lots[c], policy, further)
        _follow(rows, start, policy, reached)
        worth = _doubling(rows, promised, smallest, noisy, policy, reached)
        share = rest if last else min(max(1.0, np.rint(worth)), rest)
        if looking:
            share = np.rint(look)
        elif rest - share < smallest / 2.0:
            share = rest
        shares[c] = share
        given += share
        for h in range(len(policy)):
            for x in range(policy.shape[1]):
                promised[h, x, policy[h, x]] += share * reached[h, x]
        if given >= users:
            break
    if each > 0.0:
        choose_counters(rows, hoped, best.unsure, promised, noisy, each, asked)
    return c + 1


@compiled
def _follow(rows: Rows, start: FloatArray, policy: PolicyArray, reached: FloatArray) -> None:
    """Write how likely a policy is to be in (h, x)."""
    horizon, states, actions = rows.rewards.shape
    reached[:] = 0.0
    reached[0] = start
    for h in range(horizon - 1):
        for x in range(states):
            if reached[h, x] > _NEVER:
                i = (h * states + x) * actions + policy[h, x]
                for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                    reached[h + 1, rows.successors[t]] += reached[h, x] * rows.probabilities[t]


@compiled
def _doubling(
    rows: Rows, promised: FloatArray, smallest: float, noisy: float, policy: PolicyArray, reached: FloatArray
) -> float:
    """How many users of a policy double what is known of one of its decisions, or bring it the smallest try."""
    users = np.inf
    for h in range(policy.shape[0]):
        for x in range(policy.shape[1]):
            if reached[h, x] > _NEVER:
                a = policy[h, x]
                known = rows.told[h, x, a] + information(promised[h, x, a], noisy)
                users = min(users, max(smallest, visits_for(known, noisy)) / reached[h, x])
    return float(users)


@compiled
def _faithful(rows: Rows, start: FloatArray, plan: PolicyArray, best: PolicyArray) -> float:
    """How likely somebody who follows a plan does all that the best policy would."""
    horizon, states, actions = rows.rewards.shape
    here = start
    for h in range(horizon):
        after = np.zeros(states)
        so_far = 0.0
        for x in range(states):
            if plan[h, x] == best[h, x]:
                so_far += here[x]
                if h < horizon - 1:
                    i = (h * states + x) * actions + best[h, x]
                    for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                        after[rows.successors[t]] += here[x] * rows.probabilities[t]
        here = after
    return float(so_far)


@compiled
def plan_look(
    rows: Rows,
    best: Best,
    promised: FloatArray,
    start: FloatArray,
    sizes: tuple[float, float],
    left: float,
    kept: float,
    noisy: float,
    looked: BoolArray,
    policy: PolicyArray,
) -> float:
    """Write the look that gains most and return how many users it is for, between the two `sizes`; 0 if none gains.

    An action behind the best by d, its error s before and t after m visits, gains R t' psi(d / t') if R users come
    this way later (or to the same state at other steps, as far as these are alike), t'^2 = s^2 - t^2 the variance of
    what the visits will say of it, and costs m d: the knowledge gradient of a normal law. As it can be ahead by no
    more than some room c, R t' psi((d + c) / t') of that is never gained. Its error is that of the row itself and that
    of what follows where its next states differ from the best action's: sum (p - p*)^2 D over the next states, D what
    is open of their value. With noise it may be better to wait, without noise every visit is worth its part of what a
    larger try gains (see `gain_of` for both), and no step that the batch has `looked` at is looked at again, but on a
    detour.

    At the end of a detour d is what the whole way costs by visit, and R those of all users who would get there.
    """
    policy[:] = best.policy
    reached = best.reached
    error, known = _count_promises(rows, best, promised, noisy)
    part = _OTHER_STEPS_UNNOISY if noisy == 0.0 else _OTHER_STEPS
    others = part * rows.alike * left * (reached.sum(axis=0) - reached)
    later = left * reached + others
    by_visit = np.zeros_like(error)
    rivals = Rivals(best.behind, error, best.room, known, promised, noisy, later, others, by_visit, best.lost, kept)
    if noisy == 0.0:
        count_gains(rivals)
    gain = 0.0
    users = 0.0
    step = -1
    for h in range(len(policy)):
        n = sizes[0]
        while n <= sizes[1] and not looked[h]:
            total = 0.0
            for x in range(policy.shape[1]):
                if reached[h, x] > HARDLY:
                    total += _best_try(rivals, h, x, n * reached[h, x])[0]
            if total > gain:
                gain, users, step = total, n, h
            n *= FINER
    detour = np.zeros_like(policy)
    more, by = plan_detour(rows, rivals, start, sizes, left, policy, detour)
    if more > gain:
        policy[:] = detour
        return by
    for x in range(policy.shape[1]):
        if step >= 0 and reached[step, x] > HARDLY:
            here, a = _best_try(rivals, step, x, users * reached[step, x])
            if here > 0:
                policy[step, x] = a
    if step >= 0 and noisy == 0.0:
        looked[step] = True
    return users


@compiled
def find_best(rows: Rows, start: FloatArray) -> Best:
    """The best policy, and all others against it; for the variances see `plan_look`."""
    horizon, states, actions = rows.rewards.shape
    policy = np.empty((horizon, states), dtype=np.int32)
    behind = -rows.rewards
    variance = rows.reward_variances.copy()
    room = np.empty((horizon, states))
    value = np.zeros(states)
    unsure = np.zeros((horizon, states))
    apart = np.zeros(states)
    for h in range(horizon - 1, -1, -1):
        value_after = value.copy()
        unsure_after = unsure[h + 1] if h < horizon - 1 else np.zeros(states)
        for x in range(states):
            if h < horizon - 1:
                for a in range(actions):
                    ahead, more = mean_and_error(value_after, rows, h, x, a)
                    behind[h, x, a] -= ahead
                    variance[h, x, a] += more
            best = behind[h, x].argmin()
            policy[h, x] = best
            value[x] = -behind[h, x, best]
            behind[h, x] += value[x]
            room[h, x] = max(0.0, 1.0 + value_after.max() - value[x])
            further = 0.0
            if h < horizon - 1:
                i = (h * states + x) * actions + best
                for a in range(actions):
                    if a != best:
                        variance[h, x, a] += _unlike(rows, i + a - best, i, unsure_after, apart)
                for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                    further += rows.probabilities[t] ** 2 * unsure_after[rows.successors[t]]
            unsure[h, x] = along(variance[h, x, best], further, rows.alike)
    reached = np.zeros((horizon, states))
    _follow(rows, start, policy, reached)
    return Best(policy, reached, behind, variance, room, unsure, max(1.0, (rows.visits * behind).sum()))


@compiled
def _count_promises(rows: Rows, best: Best, promised: FloatArray, noisy: float) -> tuple[FloatArray, FloatArray]:
    """Errors as bold as looks take them, and what is known of rows: both with what is promised already."""
    variance = best.variance
    error = np.empty_like(variance)
    known = rows.told + 1.0 / TYPICAL
    for h in range(variance.shape[0]):
        for x in range(variance.shape[1]):
            for a in range(variance.shape[2]):
                had = information(promised[h, x, a], noisy)
                if noisy == 0.0:
                    skew = _skew(rows.rewards[h, x, a], rows.reward_variances[h, x, a], variance[h, x, a])
                    bold = _BOLD_UNNOISY + rows.alike * (_BOLD_UNNOISY_ALIKE - _BOLD_UNNOISY)
                    doubtful = as_normal(best.behind[h, x, a], variance[h, x, a], skew)
                else:
                    few = 1.0 + _FEW / (_FEW + TYPICAL * rows.told[h, x, a])
                    bold = _BOLD + rows.alike * (_BOLD_ALIKE - _BOLD)
                    doubtful = variance[h, x, a] * few
                error[h, x, a] = bold * math.sqrt(doubtful * known[h, x, a] / (known[h, x, a] + had))
                known[h, x, a] += had
    return error, known


@compiled
def _skew(reward: float, reward_variance: float, variance: float) -> float:
    """The skew of an error of which a reward's has such a part, by a beta law: p (1 - p) / v = n + 1, and n more."""
    if reward_variance <= 0.0:
        return 0.0
    visits = reward * (1.0 - reward) / reward_variance - 1.0
    return float(2.0 * (1.0 - 2.0 * reward) / (visits + 2.0) * reward_variance / variance**1.5)


@compiled
def as_normal(behind: float, variance: float, skew: float) -> float:
    """The variance of a normal law that is above `behind` as often as one which is skewed.

    That is above s (z + skew (z^2 - 1) / 6) as often as a normal above z (Cornish & Fisher's expansion), s^2 the
    variance: few visits that were not paid leave more open than their variance says. Where the skew is the other way,
    or `behind` within s, it does not count.

    >>> as_normal(3.0, 1.0, 0.0)
    1.0
    >>> z = 2.5
    >>> round(as_normal(z + 0.6 * (z * z - 1) / 6, 1.0, 0.6) ** 0.5 * z, 6) == round(z + 0.6 * (z * z - 1) / 6, 6)
    True
    """
    third = skew / 6.0
    if third <= _SYMMETRIC or behind * behind <= variance:
        return variance
    far = behind / math.sqrt(variance)
    z = (math.sqrt(1.0 + 4.0 * third * (far + third)) - 1.0) / (2.0 * third)
    return float((behind / z) ** 2)


@compiled
def _unlike(rows: Rows, rival: int, best: int, unsure: FloatArray, apart: FloatArray) -> float:
    """sum (p - p*)^2 D over the next states of two rows; leaves the scratch space `apart` empty."""
    for t in range(rows.row_starts[best], rows.row_starts[best + 1]):
        apart[rows.successors[t]] -= rows.probabilities[t]
    for t in range(rows.row_starts[rival], rows.row_starts[rival + 1]):
        apart[rows.successors[t]] += rows.probabilities[t]
    total = 0.0
    for i in (rival, best):
        for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
            y = rows.successors[t]
            total += apart[y] ** 2 * unsure[y]
            apart[y] = 0.0
    return total


@compiled
def _best_try(rivals: Rivals, h: int, x: int, now: float) -> tuple[float, int]:
    """What trying the best of a state's rivals gains, and which that is, if so many come now."""
    most = 0.0
    which = -1
    for a in range(rivals.behind.shape[2]):
        if rivals.noisy == 0.0:
            gain = now * rivals.by_visit[h, x, a] if now <= whole_try(rivals, h, x, a) else 0.0
        else:
            gain = gain_of(rivals, h, x, a, now, rivals.later[h, x], rivals.behind[h, x, a], 1.0)
        if gain > most:
            most, which = gain, a
    return most, which
