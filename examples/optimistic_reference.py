"""The learner `optimistic` in one file of plain NumPy, to be read from top to bottom.

`Reference.plan` says what a batch plays and which counters are asked, `Reference.learn` takes in its release. Both do
as `shufflerl.learners.optimistic` (tests/examples/test_optimistic_reference.py) unless rounding breaks a tie; there are
the formulas derived, and `constants` explained. Here the law of the first state is known and every transition is
possible. Sizes of batches (`schedule`) and the least squares that conserve users (`flow`) are left to the library.

Axes are [h, x, a, y]: step, state, action, next state; f = 0 are transitions, f = 1 rewards. A row is the law of the
next state of (h, x, a), or of its reward: not paid, paid. `noise` is the variance of the noise on a counter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shufflerl.counts import Release
from shufflerl.estimation.flow import conserve
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.pooling import UNKNOWN

Array = np.ndarray[Any, Any]
COUNTERS = np.reshape([1.0, 2.0], (2, 1, 1, 1, 1))  # of a transition, of a reward (with half the noise)
erfc = np.vectorize(math.erfc, otypes=[float])


def ratio(top: Array, bottom: Array, otherwise: float) -> Array:
    """Top / bottom, or something else where the bottom is 0."""
    return np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1.0), otherwise)


# 1. What visits tell of a row, and how far behind a rival may be to be worth a try.
def information(visits: Array, noise: Array | float) -> Array:
    """The precision that so many visits in one batch add."""
    return ratio(visits**2, noise + C.typical * visits, 0.0)


def unit_normal_loss(z: Array) -> Array:
    """psi(z) = phi(z) - z Phi(-z), the mean of what a standard normal has above z; as good as nothing from 9 on."""
    z = np.minimum(z, 9.0)
    return np.asarray(np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) - z * erfc(z / math.sqrt(2)) / 2)


def worth_trying(users: Array, left: float) -> Array:
    """The z of psi(z) / z = n / R: z standard errors s behind, n users lose n z s and R later ones gain R psi(z) s."""
    z = np.zeros_like(users)
    for step in 10 / 2.0 ** np.arange(1, 15):  # bisection
        z += step * (unit_normal_loss(z + step) * left > (z + step) * users)
    return z


# 2. Releases are pooled to rows of error A p(1-p) + B: A is the inverse effective sample size, B what privacy adds.
def weigh(release: Release, start: Array, p: Array, u: Array) -> tuple[Array, ...]:
    """The visits [h, x, a, 1] of a release, and its terms w m, w^2 m, w^2 noise and w times its moves and rewards.

    Visits are counted, and predicted by the model so far, which errs by u in p: m users of a policy in a row send m p
    to a next state, with variance m p(1-p) + m^2 u + p^2 v, v the variance of m. Kalman's filter weighs the two.
    """
    batch, conserved, visits = release.batch, conserve(release, start), np.zeros(u.shape)
    takes = np.eye(u.shape[2])[batch.mixture.policies][..., None]  # [policy, h, x, a, 1]
    law = batch.mixture.weights[:, None] * start
    here, variance = batch.users * law, batch.users * law * (1 - law)  # [policy, x]
    for h, noise in enumerate(conserved.variance[..., None]):
        m, v = here[..., None, None] * takes[:, h], variance[..., None, None] * takes[:, h]
        predicted, spread = m.sum(0), v.sum(0)
        gain = ratio(spread, spread + noise, 1.0)
        visits[h] = np.maximum(0.0, predicted + gain * (conserved.visits[h, ..., None] - predicted))
        visits[h] *= batch.users / visits[h].sum()
        m, v = m * ratio(visits[h], predicted, 0.0), v * ratio(gain * noise, spread, 0.0)
        here, variance = (m * p[h]).sum((1, 2)), (m * p[h] * (1 - p[h]) + m**2 * u[h] + p[h] ** 2 * v).sum((1, 2))
    moves, pays = np.zeros(p.shape), conserved.values[-2 * u.size :].reshape(*u.shape[:3], 2)
    moves[:-1] = conserved.values[: -2 * u.size].reshape(-1, *p.shape[1:])  # the last step leads nowhere
    m, noise = visits * batch.table_query.asked[..., None, None, None], release.noise.variance / COUNTERS
    w = ratio(m, noise + C.typical * m, 0.0)
    return visits, w * m, w**2 * m, w**2 * noise, w[0] * moves, w[1] * (visits + pays - pays[..., ::-1]) / 2


# 3. Posterior: rows are drawn around their mean over the steps, that around the uniform row, by Dirichlet laws.
def learn_law(loglikelihood: Array) -> Array:
    """The posterior over the concentrations g of each row, [g, x, a, 1], by a law that EM learns from all of them."""
    likelihood = np.exp(loglikelihood - loglikelihood.max(0))
    law = np.full((len(likelihood), 1, 1, 1), 1 / len(likelihood))
    for _ in range(C.em_steps + 1):
        shares = law * likelihood / (law * likelihood).sum(0)
        law = (1 / len(law) + shares.sum((1, 2, 3), keepdims=True)) / (1 + likelihood[0].size)
    return np.asarray(shares)


def project(rows: Array) -> Array:
    """The nearest points of the simplex: all cells less some shift, but for those that fall below 0."""
    shifts = (np.cumsum(-np.sort(-rows), axis=-1) - 1) / np.arange(1, rows.shape[-1] + 1)
    return np.asarray(np.maximum(0.0, rows - shifts.max(-1, keepdims=True)))


def posterior(raw: Array, a: Array, b: Array, apart: float) -> tuple[Array, Array, Array, Array]:
    """Probabilities of a family's rows, what chance and noise leave open of them, and t, how much the steps differ."""
    width, c = raw.shape[-1], np.reshape(C.concentrations, (-1, 1, 1, 1))
    # How much do the steps differ? By t p(1-p), t = 1 / (1 + c): cells are normal around a mean that is integrated out.
    w = 1 / (a + b / C.typical + apart)  # for rewards as if they had nothing in common, else by visits alone
    mean = (w * raw).sum(0) / w.sum(0)
    chance = np.maximum(C.min_chance, np.clip(mean, 0, 1) * (1 - np.clip(mean, 0, 1)))
    v = a * chance + b + C.min_variance + (chance / (1 + c))[:, None]  # [g, h, x, a, cell]
    zeroth, first, second = (((raw - mean) ** k / v).sum(1) for k in range(3))
    logs = -0.5 * (np.log(v).sum(1) + np.log(zeroth) + second - first**2 / zeroth)
    t = (learn_law(logs.sum(-1, keepdims=True) * (width - 1) / width) / (1 + c)).sum(0)
    # Their mean, by weights that need its own p(1-p).
    chance = np.full(t.shape, C.typical)
    for _ in range(2):
        w = 1 / (a + b / chance + t)
        w = w / w.sum(0)
        mean, mean_a, mean_b = (w * raw).sum(0), (w**2 * (a + t)).sum(0), (w**2 * b).sum(0)
        near = project(mean)
        chance = np.maximum((near * (1 - near)).mean(-1, keepdims=True), C.min_chance)
    # How far is that from the uniform row?
    c, usual = c[: C.row_concentrations], (1 - 1 / width) / width
    v = np.maximum(usual * (1 + mean_a * c) / (1 + c) + mean_b, 1e-300)  # 0 only where a row has one cell
    law = learn_law(-0.5 * (width - 1) * (np.log(v) + ((mean - 1 / width) ** 2).mean(-1, keepdims=True) / v))
    k = 1 / (1 + mean_a * c + mean_b * (1 + c) / max(usual, C.min_chance))
    trust, shared = (law * k).sum(0), (law * k * mean_a / (1 + k * mean_a)).sum(0)
    # Data of a step have weight k, n / (n + c) for n exact visits; the rest leans on the mean and its errors.
    k = 1 / (1 + a * (1 / t - 1) + b / t / chance)
    p = k * project(raw) + (1 - k) * (trust * near + (1 - trust) / width)
    leans, t = (1 - k) ** 2, np.broadcast_to(t, k.shape)
    return p, k * a / (1 + k * a) + leans * shared, k * b + leans * trust * mean_b, t


class Reference:
    """The learner, for a problem of that shape (steps, states, actions) in which users start by that law."""

    def __init__(self, shape: tuple[int, int, int], start: Array) -> None:
        self.shape, self.start, self.releases = shape, start, list[Release]()
        rows, both = np.zeros((*shape, 1)), np.zeros((2, *shape, 1))
        self.fit(rows, both, both, both, np.zeros((*shape, shape[1])), np.zeros((*shape, 2)))

    def learn(self, release: Release) -> None:
        """Take in a release, in passes over all: their visits need the rows, the rows these visits."""
        self.releases.append(release)
        for _ in range(C.passes if release.noise.variance else 1):
            weighed = [weigh(one, self.start, self.p, self.p_variance) for one in self.releases]
            self.fit(*(np.sum(terms, 0) for terms in zip(*weighed, strict=True)))

    def fit(self, visits: Array, weights: Array, squares: Array, noises: Array, moves: Array, pays: Array) -> None:
        """The posterior of all rows, and the greedy policy by it."""
        a, b = (ratio(part, weights**2, UNKNOWN) for part in (squares, noises))
        moves, pays = (ratio(part, w, 1 / part.shape[-1]) for part, w in zip((moves, pays), weights, strict=True))
        n, k = len(visits), max(len(visits) - 1, 1)  # the last step leads nowhere: any transitions will do there
        self.p, *moved = (np.append(part, part[-1:], 0)[:n] for part in posterior(moves[:k], a[0, :k], b[0, :k], 0))
        r, *paid = posterior(pays, a[1], b[1], 1)
        by_chance, by_noise, between = np.stack([moved, paid], 1)  # each [f, h, x, a, 1]
        self.visits, self.r, self.between = visits[..., 0], r[..., 1], between[..., 0]
        beside = 0 if noises.any() else C.beside * by_chance[1]  # who was not paid a few times may yet be
        p = r + (0.5 - r) * beside / (1 + beside)
        self.r_variance = (by_chance[1] * p * (1 - p) + by_noise[1])[..., 1]
        self.p_variance = by_chance[0] * (self.p * (1 - self.p)).mean(-1, keepdims=True) + by_noise[0]
        self.by_chance, self.by_noise = by_chance[0] * self.p, by_noise[0]  # times (V - E V)^2: errors of E V
        self.homogeneity = 1 - min(1.0, C.dissimilarity * between.mean((1, 2, 3, 4)).max())
        # The precision of a row's own data, and as far as steps are alike that of its posterior, which all steps make.
        variance, own = C.typical * by_chance + by_noise, 1 / (C.typical * a + b * COUNTERS)
        known = own + self.homogeneity * np.maximum(0, 1 / variance - 1 / C.typical - own)
        self.precision = np.append(known[:, :-1].mean(0), known[1, -1:], axis=0)[..., 0]
        self.open = np.stack([variance[0, ..., 0], self.r_variance])  # [f, h, x, a]
        self.find_greedy()

    def expected(self, h: Any, values: Array) -> tuple[Array, Array]:
        """E V over the next states of the rows of a step, and the variance of its error, less where a prior tells."""
        apart = (values - (mean := (self.p[h] * values).sum(-1))[..., None]) ** 2
        noise, prior = ((part * apart).sum(-1) for part in (self.by_noise[h], np.maximum(self.p[h], C.min_chance)))
        return mean, (self.by_chance[h] * apart).sum(-1) + ratio(noise * prior, noise + prior, 0.0)

    def along(self, here: Array, after: Array) -> Array:
        """The variance of an error here and those after it: errors add up where steps are alike, else squares do."""
        return np.asarray(here + after + 2 * self.homogeneity * np.sqrt(here * after))

    # 4. The optimistic plan.
    def optimistic(self, allocated: Array, users: float, left: float, noise: float, ties: Array) -> tuple[Array, ...]:
        """The policy that is best if every row is as good as may be worth finding out, its values, and doubling visits.

        A try tells J where K is known, visits `allocated` by others of the batch included: an error of variance v can
        move by v J / (K + J). A row that few have seen may lead where nobody has been. Uniform `ties` break ties.
        """
        horizon, states, _ = self.shape
        policy, (values, mean, bonus) = np.zeros((horizon, states), dtype=int), np.zeros((3, horizon + 1, states))
        known = self.precision + information(allocated, noise)
        doubling = (half := C.typical * known / 2) + np.sqrt(half**2 + noise * known)  # visits that tell as much again
        tried = np.maximum(users, doubling)
        tells, z = information(tried, noise), C.optimism * worth_trying(tried, left)
        reach, still = z**2 * tells / (tells + known), (self.precision + 1 / C.typical) / (known + 1 / C.typical)
        seen = self.visits + allocated
        seen = seen + (1 - np.minimum(1, C.dissimilarity * self.between[1])) * (seen.sum(0) - seen)  # elsewhere too
        for h in reversed(range(horizon)):
            ahead, variance = self.expected(h, values[h + 1])
            novelty = C.novelty * reach[h] * (1 + values[h + 1].max() - ahead) / (1 + seen[h])
            index = self.r[h] + self.expected(h, mean[h + 1])[0] + novelty
            path = self.along(reach[h] * still[h] * (variance + self.r_variance[h]), self.expected(h, bonus[h + 1])[0])
            upper = np.minimum(index + np.sqrt(path), horizon - h)
            policy[h] = np.where(upper == upper.max(-1, keepdims=True), ties[h], -1.0).argmax(-1)
            best = np.arange(states), policy[h]
            values[h], mean[h], bonus[h] = upper[best], np.minimum(index, horizon - h)[best], path[best]
        return policy, values, doubling

    # 5. The greedy policy, and probes of what bad luck may have dismissed.
    def occupancy(self, policy: Array, other: Array) -> Array:
        """The law [h, x, a] of a policy's users who have done, and now do, as another policy would."""
        here, rows = self.start, np.asarray(np.eye(self.shape[2])[policy] * (policy == other)[..., None])
        for h in range(len(rows)):
            rows[h] *= here[:, None]
            here = (rows[h, ..., None] * self.p[h]).sum((0, 1))
        return rows

    def find_greedy(self) -> None:
        """The greedy policy, which is the plan if nobody is left to learn for, and all actions against it."""
        self.greedy, value, _ = self.optimistic(np.zeros(self.shape), 1.0, 0.0, 0.0, np.zeros(self.shape))
        self.met = self.occupancy(self.greedy, self.greedy).sum(-1, keepdims=True)
        ahead, error = self.expected(np.s_[:], value[1:, None, None])
        self.gap = value[:-1, :, None] - (self.r + ahead)
        self.gap_variance, self.value_variance, behind = self.r_variance + error, *np.zeros((2, *value.shape))
        self.slope = self.gap_variance / (self.precision + 1 / C.typical)  # at which precision takes an error off
        for h in reversed(range(len(error))):  # what follows errs too, where next states differ from the greedy ones
            best, after = (np.arange(self.shape[1]), self.greedy[h]), self.value_variance[h + 1]
            p, own = self.p[h][best], self.gap_variance[h][best]
            self.value_variance[h] = self.along(own, follows := (p**2 * after).sum(-1))
            both = ratio(self.value_variance[h], own + follows, 1.0)
            behind[h] = both * (self.slope[h][best] + (p**3 * behind[h + 1]).sum(-1))
            self.gap_variance[h] += ((apart := (self.p[h] - p[:, None]) ** 2) * after).sum(-1)
            self.slope[h] += (apart * self.p[h] * behind[h + 1]).sum(-1)

    def probe(self, allocated: Array, sizes: Array, left: float, noise: float, probed: Array) -> tuple[Array, float]:
        """The greedy policy but at one step, where actions of largest net value are tried, and by how many users."""
        gap, known = self.gap, ratio(self.gap_variance, self.slope, 1.0)
        precision = known + information(allocated, noise)
        later = left * (gap > 0) * (self.met + self.homogeneity * (self.met.sum(0) - self.met))
        few = C.few / (C.few + C.typical * self.precision)
        bold = C.boldness**2 * (1 + few) if noise else C.exact_boldness**2
        error = np.sqrt(bold * self.gap_variance * known / precision)
        visits = sizes.reshape(-1, 1, 1, 1) * self.met  # [size, h, x, 1]
        tells = np.maximum(0, information(visits + allocated, noise) - information(allocated, noise))
        # What later users gain, the knowledge gradient; the next batches can go on: of the best number of tries (KG*).
        gain, whole = np.zeros(tells.shape), np.maximum(C.fewest, C.part * C.typical * precision)
        for batches in 2.0 ** np.arange(40) if noise else [ratio(whole, visits, 0.0)]:
            moves = np.maximum(error * np.sqrt(batches * tells / (batches * tells + precision)), 1e-300)
            gain = np.maximum(gain, ratio(later * moves * unit_normal_loss(gap / moves), batches, 0.0) * (batches >= 1))
        value = np.maximum(0, gain - visits * gap) * ((visits > 0) & ~probed)
        worth = value.max(-1).sum(-1).T
        step, size = np.unravel_index(worth.argmax(), worth.shape)
        policy, tries, probed[step] = self.greedy.copy(), value[size, step], not noise
        policy[step] = np.where(tries.any(-1), tries.argmax(-1), policy[step])
        return policy, float(sizes[size])

    # 6. A batch: a few probes, then optimistic plans, each made as if those before it had been played.
    def plan(self, users: float, left: float, following: float, variances: Array, smallest: float, ties: Array) -> Any:
        """Policies of a batch, users of each, counters asked; `variances` of noise if one is touched, two, ... all."""
        noise, parts = float(variances[-1]), 1 + (len(ties) - C.policies) / C.probes  # batches it stands for, if few
        allocated, probed = np.zeros(self.shape), np.zeros((self.shape[0], 1, 1), dtype=bool)
        policies, shares, n = list[Array](), list[float](), max(smallest, users / parts)
        plan, upper_values, _ = self.optimistic(allocated, n, left, noise, ties[0])
        idle = self.occupancy(plan, self.greedy)[-1].sum()  # who does as the greedy policy anyhow
        probing = users * (C.always + C.idle * idle if noise else C.exact_share)
        max_probe, more = probing / (1 if noise else C.probes), bool(self.visits.any())
        sizes = C.smallest_share * smallest * np.append(0.0, C.probe_step ** np.arange(64))
        while (rest := users - sum(shares)) > 0:
            last, share = len(shares) == len(ties) - 1, 0.0
            most = min(max_probe, probing - sum(shares), rest - smallest)
            if more and len(shares) < C.probes * parts and most >= sizes[1]:
                tried = sizes <= max(most, (1 - 1 / parts) * probing)
                policy, whole = self.probe(allocated, sizes[tried], left, noise, probed)
                share = whole and np.rint(min(most, max(sizes[1], whole * max(1 / parts, following / left))))
            if not (more := share > 0):  # a plan, for as many as double what is known of one of its decisions
                policy, _, doubling = self.optimistic(allocated, n, 0.0 if last else left, noise, ties[len(shares)])
                share = np.rint(ratio(np.maximum(smallest, doubling), self.occupancy(policy, policy), np.inf).min())
                share = rest if last or rest - share < sizes[1] else share
            policies, shares = [*policies, policy], [*shares, share]
            allocated = allocated + share * self.occupancy(policy, policy)
        return np.array(policies), np.array(shares), self.ask(allocated, upper_values, variances)

    # 7. Which counters are asked: noise grows with the number of those that a user touches.
    def ask(self, visits: Array, values: Array, variances: Array) -> Array:
        """Which [f, h]: what tells least is dropped, again and again; of all these, what together tells most."""
        values, value_variance = values[1:, None, None], self.value_variance[1:, None, None]
        after = C.apart * ((self.by_chance + self.by_noise) * value_variance).sum(-1)
        error = np.stack([self.expected(np.s_[:], values)[1] + after, self.r_variance])
        known, stake = 1 / self.open, visits.sum(-1, keepdims=True) * (visits > 0) * error

        def tell(asked: Array, noise: float) -> tuple[float, Array]:
            """What is learned of all that is at stake, and how much of that each family and step adds."""
            own = information(visits, noise / COUNTERS[..., 0]) * asked[..., None, None]
            shared = own / (1 + own * C.typical * self.between)  # with other steps, as far as these are alike
            others = shared.sum(1, keepdims=True) - shared
            gain, slope = stake * (own + others) / (known + own + others), stake * known / (known + own + others) ** 2
            adds = gain - stake * others / (known + others) + shared * (slope.sum(1, keepdims=True) - slope)
            return float(gain.sum()), np.where(asked, adds.sum((2, 3)), np.inf)

        asked = np.stack([np.arange(self.shape[0]) < self.shape[0] - 1, np.full(self.shape[0], True)])
        tried = [(tell(asked, variances[-1])[0], asked)]
        for noise in variances[-2::-1] if variances[0] < variances[-1] else ():
            fewer = tried[-1][1].copy()
            fewer.flat[tell(fewer, noise)[1].argmin()] = False
            tried.append((tell(fewer, noise)[0], fewer))
        return max(tried, key=lambda one: one[0])[1]
