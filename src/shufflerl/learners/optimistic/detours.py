"""What it is worth to try a row, and the way to one that the best policy rarely passes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.optimism import Rows, beyond, information
from shufflerl.learners.optimistic.pooling import TYPICAL

#: How many users a look has is searched for in steps of this factor.
FINER = 1.5
#: Nothing further behind than this many errors is looked at.
_FAR_BEHIND = 8.0
#: With noise a gain counts up to so many times more, half of that where a mistake would cost this many times what is
#: lost so far: a run that makes such a mistake is one of the worst.
_MORE_AT_STAKE, _AT_STAKE = 1.5, 3.0
#: With noise a try may wait for batches that are so many times larger. What it would gain there counts by this part
#: against one now: not all of it, as who looks now may look again then.
LARGER, _WAITING = 3.0, 0.3
#: A try without noise has this part of the visits that are known of a row, or so few, at most.
_PART, _FEWEST = 0.5, 2.0
#: States that are reached more rarely are not looked at.
HARDLY = 1e-9
#: At the end of a detour errors are taken for so much of what other looks take them for.
_SHYER = 0.9
#: Rows that a detour is planned to, and by how many of their errors they are taken for better, to find the way.
_ROWS, _BETTER = 8, (1.0, 3.0)


class Rivals(NamedTuple):
    """All actions against the best of their state: how far `behind`, give or take what `error`.

    By the estimates of what follows none of (h, x) is ahead by more than `room[h, x]`: paid 1, and the best next state
    for sure.
    `known` is what is known of them, the visits `promised` by others of the batch included; `noisy` is the variance of
    a counter's noise. So many come to (h, x) `later` on the best policy's way, those `others` included who come to x at
    other steps, as far as they count. Without noise a visit on that way gains so much `by_visit`, less what it costs;
    with noise that is not counted. By the estimates so much was `lost` by all users so far. A part of those who come
    later is `kept` by waiting for larger batches: 0 if there will be none.
    """

    behind: FloatArray
    error: FloatArray
    room: FloatArray
    known: FloatArray
    promised: FloatArray
    noisy: float
    later: FloatArray
    others: FloatArray
    by_visit: FloatArray
    lost: float
    kept: float


@compiled
def gain_of(rivals: Rivals, h: int, x: int, a: int, now: float, later: float, price: float, bold: float) -> float:
    """What trying a row gains for those who come later, if each of those who come now pays so much for it.

    Without noise small tries tell as much by visit as large ones, and the next batch can go on. So a visit is worth
    what it is on average in a try of a part of the visits that are known (as in KG*, Frazier & Powell 2010: alone it
    would hardly change anybody's mind), and none has more than these.

    With noise large tries tell more by visit than small ones: twice as many tell four times as much where noise is all.
    So a part of what the same share of a larger batch would gain, for those who still come then, is taken off: as far
    as noise is what the error is made of.
    """
    whole = whole_try(rivals, h, x, a) if rivals.noisy == 0.0 else now
    if now > whole:
        return 0.0
    gain = learned(rivals, h, x, a, whole, later, price, bold)
    if gain <= 0.0:
        return 0.0
    gain = (gain - whole * price) * (now / whole)
    if rivals.noisy > 0.0 and gain > 0.0:
        then = LARGER * now
        gain_then = learned(rivals, h, x, a, then, rivals.kept * later, price, bold) - then * price
        gain -= _WAITING * rivals.noisy / (rivals.noisy + TYPICAL * now) * max(0.0, gain_then)
    return float(gain)


@compiled
def whole_try(rivals: Rivals, h: int, x: int, a: int) -> float:
    """How many visits a try without noise has at most."""
    return float(max(_FEWEST, _PART * TYPICAL * rivals.known[h, x, a]))


@compiled
def learned(rivals: Rivals, h: int, x: int, a: int, now: float, later: float, price: float, bold: float) -> float:
    """What those who come later gain by so many visits, whatever these cost: see `looks.plan_look`.

    With noise that counts more where much is at stake, R s / (1 + z): about what an action z errors s behind, if it is
    better after all, would have gained for the R users who come later.
    """
    had = rivals.promised[h, x, a]
    tells = max(0.0, information(now + had, rivals.noisy) - information(had, rivals.noisy))  # not -0 by rounding
    moves = bold * rivals.error[h, x, a] * math.sqrt(tells / (tells + rivals.known[h, x, a]))
    most = rivals.behind[h, x, a] + rivals.room[h, x]
    if price <= 0.0 or price >= min(most, _FAR_BEHIND * moves):
        return 0.0
    never = beyond(most / moves) if most < _FAR_BEHIND * moves else 0.0
    gain = later * moves * (beyond(price / moves) - never)
    if rivals.noisy == 0.0:
        return float(gain)
    error = bold * rivals.error[h, x, a]
    stake = later * min(error / (1.0 + price / error), rivals.room[h, x])
    return float(gain * (1.0 + _MORE_AT_STAKE * stake / (stake + _AT_STAKE * rivals.lost)))


@compiled
def count_gains(rivals: Rivals) -> None:
    """Write what each visit of a whole try without noise gains, less what it costs, where it gains anything."""
    horizon, states, actions = rivals.behind.shape
    for h in range(horizon):
        for x in range(states):
            for a in range(actions):
                whole, price = whole_try(rivals, h, x, a), rivals.behind[h, x, a]
                gain = learned(rivals, h, x, a, whole, rivals.later[h, x], price, 1.0)
                if gain > 0.0:
                    rivals.by_visit[h, x, a] = gain / whole - price


@compiled
def plan_detour(
    rows: Rows,
    rivals: Rivals,
    start: FloatArray,
    sizes: tuple[float, float],
    left: float,
    best: PolicyArray,
    detour: PolicyArray,
) -> tuple[float, float]:
    """Write the detour that gains most; returns what it gains, by how many users."""
    gain = 0.0
    users = 0.0
    trial = np.zeros_like(best)
    for row in promising(rows, rivals, start):
        h, x, a = row[0], row[1], row[2]
        for better in _BETTER:
            value = rivals.behind[h, x, a] + min(better * rivals.error[h, x, a], rivals.room[h, x])
            rate, cost = go_to(rows, rivals.behind, start, best, h, x, a, value, trial)
            if rate > HARDLY:
                n = sizes[0]
                while n <= sizes[1]:
                    total = gain_of(rivals, h, x, a, n * rate, left * rate + rivals.others[h, x], cost / rate, _SHYER)
                    if total > gain:
                        gain, users = total, n
                        detour[:] = trial
                    n *= FINER
    return gain, users


@compiled
def promising(rows: Rows, rivals: Rivals, start: FloatArray) -> IntArray:
    """The rows (h, x, a) most worth a detour, wherever they are, by how many can get there and at what price.

    At most as many of x get to y as the likeliest action takes there. A visit of y is priced at a visit of x and what
    the action is behind, over its probability, at the cheapest of all x and actions: dear where many ways lead there.
    """
    horizon, states, actions = rivals.behind.shape
    reach = start.copy()
    price = np.where(start > 0, 0.0, np.inf)
    worth = np.zeros(_ROWS)
    which = np.full((_ROWS, 3), -1)
    likeliest = np.zeros(states)
    for h in range(horizon):
        after = np.zeros(states)
        price_after = np.full(states, np.inf)
        for x in range(states):
            if reach[x] <= HARDLY:
                continue
            for a in range(actions):
                cost = price[x] + rivals.behind[h, x, a]
                error = rivals.error[h, x, a]
                if 0 < cost < _FAR_BEHIND * error:
                    least = worth.argmin()
                    may = reach[x] * error * beyond(cost / error)
                    if may > worth[least]:
                        worth[least] = may
                        which[least, 0], which[least, 1], which[least, 2] = h, x, a
                if h < horizon - 1:
                    i = (h * states + x) * actions + a
                    for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                        y, p = rows.successors[t], rows.probabilities[t]
                        likeliest[y] = max(likeliest[y], p)
                        if p > 0:
                            price_after[y] = min(price_after[y], cost / p)
            if h < horizon - 1:
                i = (h * states + x) * actions
                for t in range(rows.row_starts[i], rows.row_starts[i + actions]):
                    y = rows.successors[t]
                    after[y] += reach[x] * likeliest[y]
                    likeliest[y] = 0.0
        reach = np.minimum(after, 1.0)
        price = price_after
    return which[worth > 0]


@compiled
def go_to(
    rows: Rows,
    behind: FloatArray,
    start: FloatArray,
    best: PolicyArray,
    h: int,
    x: int,
    a: int,
    better: float,
    policy: PolicyArray,
) -> tuple[float, float]:
    """Write the policy that is best if row (h, x, a) is better by so much; returns who gets there, and at what cost."""
    states, actions = behind.shape[1:]
    policy[:] = best
    policy[h, x] = a
    more = np.zeros(states)  # than the best policy, from step k + 1 on
    more[x] = better - behind[h, x, a]
    for k in range(h - 1, -1, -1):
        more_after = more
        more = np.zeros(states)
        for y in range(states):
            for b in range(actions):
                i = (k * states + y) * actions + b
                gain = -behind[k, y, b]
                for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                    gain += rows.probabilities[t] * more_after[rows.successors[t]]
                if gain > more[y]:
                    more[y] = gain
                    policy[k, y] = b
    here = start
    cost = 0.0
    for k in range(h):
        after = np.zeros(states)
        for y in range(states):
            if here[y] > 0:
                i = (k * states + y) * actions + policy[k, y]
                cost += here[y] * behind[k, y, policy[k, y]]
                for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                    after[rows.successors[t]] += here[y] * rows.probabilities[t]
        here = after
    return here[x], cost + here[x] * behind[h, x, a]
