"""What a batch plays: optimistic plans, and probes by their value of information.

A probe is the greedy policy but at one step, where every state takes the action that is most worth a try: nobody meets
more than one such try, so what it costs and what it tells does not depend on the others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.query import choose_counters
from shufflerl.learners.optimistic.rows import (
    Rows,
    expectation,
    expected_value,
    information,
    similarity,
    unit_normal_loss,
    visits_for,
    worth_trying,
)

#: States that are less likely are never met; those up to the second number are not probed.
_NEVER, _HARDLY = 1e-12, 1e-9
#: Nothing further behind than this many errors is probed.
_FAR = 8.0


class Outlook(NamedTuple):
    """What a batch is planned for: so many `users`, and so many `left` after it, `following` of them in the next batch.

    `noise` is the variance of a counter's noise if every counter is asked, `smallest` the users of the smallest try.
    """

    users: float
    left: float
    noise: float
    smallest: float
    following: float = 0.0


class Greedy(NamedTuple):
    """The greedy policy of the posterior mean, its occupancy[h, x], and all actions against it.

    They are behind it by their `gap`, an estimate of such a `variance`. Precision that a try adds takes that off at the
    rate of its `slope`, sum v / K over what it is made of: rows of variance v at precision K, here and behind. The
    variance of what the policy earns from (h, x) on is `value_variance`.
    """

    policy: PolicyArray
    occupancy: FloatArray
    gap: FloatArray
    variance: FloatArray
    slope: FloatArray
    value_variance: FloatArray


class Rivals(NamedTuple):
    """All actions against the greedy one as a probe sees them: `gap`, and the `error` of it.

    `precision` counts the visits `allocated` to others of the batch; `noise` is the variance of a counter's. So many
    users come `later` to (h, x) on the greedy way, those at other steps included as far as they count; they would
    gain `perfect` by knowing all.
    """

    gap: FloatArray
    error: FloatArray
    precision: FloatArray
    allocated: FloatArray
    noise: float
    later: FloatArray
    perfect: FloatArray


@compiled
def along(here: float, after: float, homogeneity: float) -> float:
    """The variance of an error here and those after it: squares add up, or errors do where the steps are alike."""
    return here + after + 2.0 * homogeneity * math.sqrt(here * after)


@compiled
def optimistic_policy(
    rows: Rows, allocated: FloatArray, terms: Outlook, ties: FloatArray, policy: PolicyArray, values: FloatArray
) -> None:
    """Write the policy that is best if every row is as good as it may be worth finding out.

    `values[h, x]` become what it would then earn from (h, x) on. Uniform `ties[h, x, a]` break ties.

    Let v be the variance of r + E V in row (h, x, a), V the next step's optimistic values, and I its precision, the
    visits `allocated` by others of the same batch included: these take their part off v. Trying the row with the n
    users of a batch, or with as many as double I if that is more, adds J and can move it by sqrt(v J / (I + J)):
    optimism times z times that is its bonus b, z what is worth trying by so many of the users that are left.

    Errors add up along a path: b^2 + E b'^2 + 2 homogeneity b sqrt(E b'^2), b' the bonus at the next step. Where the
    steps are alike (1) their errors are the same error and bonuses add; where they are not (0), their squares do.

    A row that few have seen may lead where nobody has been: novelty (optimism z)^2 (1 + max V - E V) / (1 + N) for
    that, times J / (I + J), with the visits N counting those at other steps too where rewards are alike.
    """
    horizon, states, actions = rows.rewards.shape
    everywhere = np.zeros((states, actions))
    for h in range(horizon):
        for x in range(states):
            for a in range(actions):
                everywhere[x, a] += rows.visits[h, x, a] + allocated[h, x, a]
    users, left, noise = max(terms.smallest, terms.users), terms.left, terms.noise
    by_all = worth_trying(users, left)
    mean = np.zeros((horizon + 1, states))
    bonus = np.zeros((horizon + 1, states))
    values[horizon] = 0.0
    for h in range(horizon - 1, -1, -1):
        highest = 0.0
        for x in range(states):
            highest = max(highest, values[h + 1, x])
        max_value = float(horizon - h)
        for x in range(states):
            best = -1.0
            tie = -1.0
            for a in range(actions):
                expected, variance = expected_value(rows, values, h, x, a)
                variance += rows.reward_variances[h, x, a]
                seen = rows.visits[h, x, a] + allocated[h, x, a]
                prior = rows.precision[h, x, a] + information(allocated[h, x, a], noise)
                variance *= (rows.precision[h, x, a] + 1.0 / C.typical) / (prior + 1.0 / C.typical)
                to_double = visits_for(prior, noise)
                z = C.optimism * (by_all if to_double <= users else worth_trying(to_double, left))
                gained = information(max(users, to_double), noise)
                squared = z * z * gained / (gained + prior) if left > 0.0 else 0.0
                shared = seen + similarity(rows.between[1, x, a]) * (everywhere[x, a] - seen)
                index = rows.rewards[h, x, a] + expectation(rows, mean, h, x, a)
                index += C.novelty * squared * (1.0 + highest - expected) / (1.0 + shared)
                path = along(squared * variance, expectation(rows, bonus, h, x, a), rows.homogeneity)
                upper = min(index + math.sqrt(path), max_value)
                if upper > best or (upper == best and ties[h, x, a] > tie):
                    best = upper
                    tie = ties[h, x, a]
                    policy[h, x] = a
                    mean[h, x] = min(index, max_value)
                    bonus[h, x] = path
            values[h, x] = best


@compiled
def policy_estimate(rows: Rows, policy: PolicyArray) -> tuple[FloatArray, FloatArray]:
    """mean[x] and variance[x] of what a policy earns from state x on, by the posterior.

    The errors of the states that may come next are taken for one error: E b^2 where independent ones would give less.
    """
    horizon, states, _ = rows.rewards.shape
    mean = np.zeros((horizon + 1, states))
    variance = np.zeros((horizon + 1, states))
    for h in range(horizon - 1, -1, -1):
        for x in range(states):
            a = policy[h, x]
            expected, error = expected_value(rows, mean, h, x, a)
            after = expectation(rows, variance, h, x, a)
            mean[h, x] = rows.rewards[h, x, a] + expected
            variance[h, x] = along(rows.reward_variances[h, x, a] + error, after, rows.homogeneity)
    return mean[0], variance[0]


@compiled
def occupancy_of(
    rows: Rows, start: FloatArray, policy: PolicyArray, other: PolicyArray, occupancy: FloatArray
) -> float:
    """Write a policy's occupancy[h, x] of users who never did what another would not; returns how many are left.

    With the policy itself for the other, that is its occupancy.
    """
    horizon, states, actions = rows.rewards.shape
    occupancy[:] = 0.0
    through = 0.0
    for x in range(states):
        occupancy[0, x] = start[x]
    for h in range(horizon):
        for x in range(states):
            if occupancy[h, x] > _NEVER and policy[h, x] == other[h, x]:
                i = (h * states + x) * actions + policy[h, x]
                if h == horizon - 1:
                    through += occupancy[h, x]
                for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                    occupancy[h + 1, rows.successors[t]] += occupancy[h, x] * rows.probabilities[t]
    return through


@compiled
def find_greedy(rows: Rows, start: FloatArray) -> Greedy:
    """The greedy policy and all actions against it.

    The variance of an action's gap is that of the row itself, and of what follows where its next states differ from the
    greedy action's: sum (p - p*)^2 D over the next states, D what is open of their value. Of m visits m p go on to a
    next state and take D off with so much of its slope, that of small tries without noise. Where steps are alike their
    errors are more than their squares, and all of that falls.
    """
    horizon, states, actions = rows.rewards.shape
    policy = np.empty((horizon, states), dtype=np.int32)
    gap, variance, slope = np.empty((3, horizon, states, actions))
    value, value_variance, value_slope = np.zeros((3, horizon + 1, states))
    difference = np.zeros(states)
    for h in range(horizon - 1, -1, -1):
        for x in range(states):
            best = 0
            for a in range(actions):
                expected, error = expected_value(rows, value, h, x, a)
                gap[h, x, a] = -rows.rewards[h, x, a] - expected
                variance[h, x, a] = rows.reward_variances[h, x, a] + error
                slope[h, x, a] = variance[h, x, a] / (rows.precision[h, x, a] + 1.0 / C.typical)
                if gap[h, x, a] < gap[h, x, best]:
                    best = a
            policy[h, x] = best
            value[h, x] = -gap[h, x, best]
            i = (h * states + x) * actions
            for a in range(actions):
                gap[h, x, a] += value[h, x]
                if a != best:
                    unlike = _unlike(rows, i + a, i + best, value_variance[h + 1], value_slope[h + 1], difference)
                    variance[h, x, a] += unlike[0]
                    slope[h, x, a] += unlike[1]
            here, behind, slope_behind = variance[h, x, best], 0.0, 0.0
            for t in range(rows.row_starts[i + best], rows.row_starts[i + best + 1]):
                p, y = rows.probabilities[t], rows.successors[t]
                behind += p * p * value_variance[h + 1, y]
                slope_behind += p * p * p * value_slope[h + 1, y]
            value_variance[h, x] = along(here, behind, rows.homogeneity)
            both = value_variance[h, x] / (here + behind) if here + behind > 0.0 else 1.0
            value_slope[h, x] = both * (slope[h, x, best] + slope_behind)
    occupancy = np.zeros((horizon, states))
    occupancy_of(rows, start, policy, policy, occupancy)
    return Greedy(policy, occupancy, gap, variance, slope, value_variance)


@compiled
def _unlike(
    rows: Rows, rival: int, best: int, variance: FloatArray, slope: FloatArray, difference: FloatArray
) -> tuple[float, float]:
    """sum (p - p*)^2 D over the next states of two rows, and its slope; leaves the scratch space `difference` empty."""
    for t in range(rows.row_starts[best], rows.row_starts[best + 1]):
        difference[rows.successors[t]] -= rows.probabilities[t]
    for t in range(rows.row_starts[rival], rows.row_starts[rival + 1]):
        difference[rows.successors[t]] += rows.probabilities[t]
    total = total_slope = 0.0
    for i in (rival, best):
        for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
            y = rows.successors[t]
            total += difference[y] ** 2 * variance[y]
            if i == rival:
                total_slope += difference[y] ** 2 * rows.probabilities[t] * slope[y]
            difference[y] = 0.0
    return total, total_slope


@compiled
def expected_gain(rivals: Rivals, h: int, x: int, a: int, added: float) -> float:
    """What users who come later gain by so much precision of an action, whatever it costs: see `plan_probe`."""
    gap = rivals.gap[h, x, a]
    if gap <= 0.0 or added <= 0.0:
        return 0.0
    moves = rivals.error[h, x, a] / math.sqrt(1.0 + rivals.precision[h, x, a] / added)
    return float(rivals.later[h, x] * moves * unit_normal_loss(gap / moves)) if gap < _FAR * moves else 0.0


@compiled
def best_rival(rivals: Rivals, h: int, x: int, visits: float) -> tuple[float, int]:
    """The net value of the best try of a state's actions, and which that is, if so many come now.

    The next batches can go on with a try, so it is worth its part of what several of them gain (as in KG*, Frazier &
    Powell 2010: alone it would hardly change anybody's mind): with noise of as many, a power of two, as gain most each.
    Without it, of those that together make a part of the visits that are known; none has more visits than that.
    """
    most = 0.0
    which = -1
    for a in range(rivals.gap.shape[2]):
        price, perfect = visits * rivals.gap[h, x, a], rivals.perfect[h, x, a]
        if perfect <= price + most:
            continue
        had = rivals.allocated[h, x, a]
        added = max(0.0, information(visits + had, rivals.noise) - information(had, rivals.noise))  # not -0 by rounding
        gain, batches = 0.0, 1.0
        if rivals.noise > 0.0:
            while batches * max(price, gain) < perfect:
                gain = max(gain, expected_gain(rivals, h, x, a, batches * added) / batches)
                batches *= 2.0
        else:
            batches = max(C.fewest, C.part * C.typical * rivals.precision[h, x, a]) / visits
            gain = expected_gain(rivals, h, x, a, batches * added) / batches if batches >= 1.0 else 0.0
        if gain - price > most:
            most, which = gain - price, a
    return most, which


@compiled
def find_rivals(rows: Rows, greedy: Greedy, allocated: FloatArray, terms: Outlook) -> Rivals:
    """All actions against the greedy one, with errors as bold as probes take them."""
    horizon, states, actions = rows.rewards.shape
    error, precision, perfect = np.empty((3, horizon, states, actions))
    later = np.empty((horizon, states))
    rivals = Rivals(greedy.gap, error, precision, allocated, terms.noise, later, perfect)
    for x in range(states):
        total = greedy.occupancy[:, x].sum()
        for h in range(horizon):
            elsewhere = rows.homogeneity * (total - greedy.occupancy[h, x])
            later[h, x] = terms.left * (greedy.occupancy[h, x] + elsewhere)
            for a in range(actions):
                few = C.few / (C.few + C.typical * rows.precision[h, x, a])
                bold = C.boldness**2 * (1.0 + few) if terms.noise > 0.0 else C.exact_boldness**2
                variance, slope = greedy.variance[h, x, a], greedy.slope[h, x, a]
                prior = variance / slope if slope > 0.0 else 1.0
                precision[h, x, a] = prior + information(allocated[h, x, a], terms.noise)
                error[h, x, a] = math.sqrt(bold * variance * prior / precision[h, x, a])
                perfect[h, x, a] = expected_gain(rivals, h, x, a, np.inf)
    return rivals


@compiled
def plan_probe(
    rows: Rows,
    greedy: Greedy,
    allocated: FloatArray,
    terms: Outlook,
    most: float,
    probed: BoolArray,
    policy: PolicyArray,
) -> float:
    """Write the probe of largest net value and return how many users it is for, at `most` so many; 0 if none.

    An action with gap d, of error s before and t after m visits, gains R t' psi(d / t') if R users come this way later,
    t'^2 = s^2 - t^2 the variance of what the visits will say of it, and costs m d: the knowledge gradient of a normal
    law, of one try or of the best number of them (`best_rival`). Without noise no step that the batch has `probed` is
    probed again.
    """
    horizon, states = policy.shape
    rivals = find_rivals(rows, greedy, allocated, terms)
    gain = 0.0
    users = 0.0
    step = -1
    for h in range(horizon):
        n = C.smallest_share * terms.smallest
        while n <= most and not probed[h]:
            total = 0.0
            for x in range(states):
                if greedy.occupancy[h, x] > _HARDLY:
                    total += best_rival(rivals, h, x, n * greedy.occupancy[h, x])[0]
            if total > gain:
                gain, users, step = total, n, h
            n *= C.probe_step
    for h in range(horizon):
        for x in range(states):
            policy[h, x] = greedy.policy[h, x]
            if h == step and greedy.occupancy[h, x] > _HARDLY:
                value, a = best_rival(rivals, h, x, users * greedy.occupancy[h, x])
                if value > 0.0:
                    policy[h, x] = a
    if step >= 0 and terms.noise == 0.0:
        probed[step] = True
    return users


@compiled
def doubling(rows: Rows, allocated: FloatArray, terms: Outlook, policy: PolicyArray, occupancy: FloatArray) -> float:
    """How many users of a policy double the precision of one of its decisions, or bring it the smallest try."""
    users = np.inf
    for h in range(policy.shape[0]):
        for x in range(policy.shape[1]):
            if occupancy[h, x] > _NEVER:
                a = policy[h, x]
                prior = rows.precision[h, x, a] + information(allocated[h, x, a], terms.noise)
                users = min(users, max(terms.smallest, visits_for(prior, terms.noise)) / occupancy[h, x])
    return users


def plan_batch(
    rows: Rows, start: FloatArray, terms: Outlook, variances: FloatArray, ties: FloatArray
) -> tuple[PolicyArray, FloatArray, BoolArray]:
    """The policies of a batch, how many of its users play each, and what is asked of them (`choose_counters`).

    Probes first, then optimistic plans, each made as if those before it had been played already. A probe is for as many
    users as its net value is largest for, a plan for as many as double the precision of one of its decisions (or bring
    it the smallest try). Who is left when there is no room for more plays the greedy policy. With noise more may
    probe where the plan's users do as the greedy policy anyhow; a whole try stays for the plans. `variances` are those
    of a counter's noise if fewer counters are asked; there are uniform `ties` for all policies there may be.

    Where batches are few, each stands for `parts` of many: it has as many times the probes (one more of the `ties` for
    each), and plans as bold as for a part of its users. A probe whose net value is largest with m users has m / parts
    of them, as the next batch can go on with it, or as much of m as that batch is of all that is left.
    """
    horizon, states, actions = rows.rewards.shape
    users, smallest = terms.users, terms.smallest
    parts = 1.0 + (len(ties) - C.policies) / C.probes
    bold, further = terms._replace(users=users / parts), terms.following / max(1.0, terms.left)
    occupancy, allocated = np.empty((horizon, states)), np.zeros((horizon, states, actions))
    upper_values, values = np.empty((horizon + 1, states)), np.empty((horizon + 1, states))
    policies: PolicyArray = np.empty((len(ties), horizon, states), dtype=np.int32)
    shares: list[float] = []
    plan: PolicyArray = np.empty((horizon, states), dtype=np.int32)
    optimistic_policy(rows, allocated, bold, ties[0], plan, upper_values)
    greedy, probed = find_greedy(rows, start), np.zeros(horizon, dtype=np.bool_)
    idle = occupancy_of(rows, start, plan, greedy.policy, occupancy)
    max_probing = users * (C.always + C.idle * idle if terms.noise else C.exact_share)
    max_probe = max_probing if terms.noise else max_probing / C.probes
    probing = bool(rows.visits.any())  # nothing before something was seen
    while (rest := users - sum(shares)) > 0.0:
        policy, share = policies[len(shares)], 0.0
        last = len(shares) == len(policies) - 1
        if probing and len(shares) < C.probes * parts and not last:
            most = min(max_probe, max_probing - sum(shares), rest - smallest)
            whole = max(most, (1.0 - 1.0 / parts) * max_probing) if most >= C.smallest_share * smallest else 0.0
            if (whole := plan_probe(rows, greedy, allocated, terms, whole, probed, policy)) > 0.0:
                share = float(round(min(most, max(C.smallest_share * smallest, whole * max(1.0 / parts, further)))))
        probing = share > 0.0
        if not probing and not shares:
            policy[:] = plan
        elif not probing:
            now = terms._replace(left=0.0) if last else bold
            optimistic_policy(rows, allocated, now, ties[len(shares)], policy, values)
        occupancy_of(rows, start, policy, policy, occupancy)
        if not probing:
            share = min(max(1.0, float(np.rint(doubling(rows, allocated, terms, policy, occupancy)))), rest)
            if last or rest - share < C.smallest_share * smallest:
                share = rest
        shares.append(share)
        allocated += share * occupancy[..., None] * (policy[..., None] == np.arange(actions))
    asked = choose_counters(rows, upper_values, greedy.value_variance, allocated, variances)
    return policies[: len(shares)], np.array(shares), asked
