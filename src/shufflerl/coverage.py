"""Coverage designs: one mixture of policies from which every policy of a set can be evaluated.

Fine exploration wants the mixture π that minimises, over the policies μ of a set, the largest sum over (h, x, a) of
d^μ / d^π, where d are the probabilities of being at (h, x) and taking a. The paper's lemma on coverage (Lemma 1 of
Zhang et al. 2022) says that at the optimum this is the number of triples some policy can reach, and that the optimum
maximises the sum of log d^π. It is a mixture of deterministic policies (docs/corrections.md, 6), found here by
Frank-Wolfe: the policy to add is the best one for the reward 1/d^π, and its value is the worst-case coverage itself,
so every answer comes with its certificate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl import coverage_kernels as kernels
from shufflerl.arrays import BoolArray, FloatArray, IntArray, PolicyArray
from shufflerl.mdp import Mixture
from shufflerl.planning import visit_probabilities
from shufflerl.policy_sets.base import PolicySet, Search, read_only

#: Rounds of moving weights between two searches for a policy to add.
_ROUNDS_PER_SEARCH = 10


@dataclass(frozen=True)
class Design:
    """A mixture of policies of a set and how well it covers the set."""

    #: What to play.
    mixture: Mixture
    #: The largest, over the policies of the set, sum of d^policy / d^mixture over the triples that can be reached.
    coverage: float
    #: How many triples (h, x, a) some policy of the set can reach: no mixture has a lower coverage.
    triples: int
    #: Searches of the policy set for the worst-covered policy.
    iterations: int

    @property
    def ratio(self) -> float:
        """Coverage over the least possible."""
        return self.coverage / self.triples


def coverage_design(
    policy_set: PolicySet,
    transitions: FloatArray,
    start: FloatArray,
    rng: np.random.Generator,
    *,
    gap: float = 0.05,
    warm_start: Mixture | None = None,
    max_iterations: int = 50,
) -> Design:
    """A mixture whose worst-case coverage is at most (1 + gap) times the number of reachable triples.

    Triples no policy of the set can reach under the model count as covered (0/0 = 0). `warm_start`, say the design of
    the set before an elimination, is where to start from: its policies that are still in the set. After
    `max_iterations` the best mixture so far is returned; its `ratio` says how good it is.
    """
    gap = checks.real("gap", gap, above=0.0)
    max_iterations = checks.whole("max_iterations", max_iterations, least=1)
    reachable = policy_set.reachable(transitions, start)
    search = policy_set.search(transitions, start)
    atoms = _Atoms.of(policy_set, transitions, start, warm_start)
    counted = _cover(atoms, search, reachable, rng)
    triples = int(counted.sum())

    policies, weights, coverage, iterations = atoms.policies, atoms.weights, math.inf, 0
    while True:
        atoms.reweigh(counted, gap / 2)
        worst, value = search(atoms.objective(counted), rng)
        iterations += 1
        if value < coverage:
            policies, weights, coverage = atoms.policies.copy(), atoms.weights.copy(), value
        if coverage <= (1.0 + gap) * triples or iterations == max_iterations:
            return Design(Mixture(np.stack(policies), weights), coverage, triples, iterations)
        atoms.add(worst)


def _cover(atoms: _Atoms, search: Search, reachable: BoolArray, rng: np.random.Generator) -> BoolArray:
    """Add policies until every reachable triple is covered; return the triples covered.

    Each policy added gets as often as it can to what is not yet covered, measured against acting at random. It covers
    the triples it gets to at least half as often as that, or, if there is none, those it gets to at all.
    """
    shares = reachable / np.maximum(reachable.sum(axis=-1, keepdims=True), 1)
    at_random = kernels.uniform_visits(atoms.transitions, atoms.start, reachable)[..., None] * shares
    enough = np.maximum(0.5 * at_random, 1e-100).ravel()
    missing = reachable.ravel().copy()
    for i in range(len(atoms.policies)):
        triples, chances = atoms.visited(i)
        missing[triples[chances >= enough[triples]]] = False
    while missing.any():
        policy, _ = search(np.where(missing, 1.0 / enough, 0.0).reshape(reachable.shape), rng)
        atoms.add(policy)
        triples, chances = atoms.visited(-1)
        often = triples[chances >= enough[triples]]
        new = often if missing[often].any() else triples
        if not missing[new].any():  # what is left is reached with probabilities that round to zero
            break
        missing[new] = False
    atoms.spread()
    return np.asarray(reachable.ravel() & ~missing)


class _Atoms:
    """The policies of a design in the making, what they visit, and their weights; new ones have none."""

    def __init__(self, shape: tuple[int, int, int], transitions: FloatArray, start: FloatArray) -> None:
        self.shape = shape
        self.transitions = read_only(np.ascontiguousarray(transitions, dtype=np.float64))
        self.start = read_only(np.ascontiguousarray(start, dtype=np.float64))
        self.policies: list[PolicyArray] = []
        self.weights: FloatArray = np.empty(0)
        # Atom i visits triples[begins[i]:ends[i]]. What dropped atoms visited stays in place, unused.
        self._begins: IntArray = np.empty(0, dtype=np.int64)
        self._ends: IntArray = np.empty(0, dtype=np.int64)
        self._triples: NDArray[np.int32] = np.empty(1024, dtype=np.int32)
        self._chances: FloatArray = np.empty(1024)
        self._used = 0

    @classmethod
    def of(cls, policy_set: PolicySet, transitions: FloatArray, start: FloatArray, mixture: Mixture | None) -> _Atoms:
        """The part of a mixture that is in the set."""
        atoms = cls(policy_set.shape, transitions, start)
        if mixture is not None:
            mixture.check_fits(*policy_set.shape)
            inside = policy_set.contains(mixture.policies) & (mixture.weights > 0)
            for policy in mixture.policies[inside]:
                atoms.add(policy)
            atoms.weights = mixture.weights[inside]
        return atoms

    def add(self, policy: PolicyArray) -> None:
        visits = visit_probabilities(self.transitions, self.start, policy[None]).ravel()
        cells = np.flatnonzero(visits)
        begin, end = self._used, self._used + len(cells)
        while end > len(self._triples):
            self._triples = np.concatenate([self._triples, np.empty_like(self._triples)])
            self._chances = np.concatenate([self._chances, np.empty_like(self._chances)])
        self._triples[begin:end] = cells * self.shape[2] + policy.ravel()[cells]
        self._chances[begin:end] = visits[cells]
        self._used = end
        self.policies.append(policy)
        self.weights = np.append(self.weights, 0.0)
        self._begins, self._ends = np.append(self._begins, begin), np.append(self._ends, end)

    @property
    def _visits(self) -> kernels.Visits:
        return kernels.Visits(self._begins, self._ends, self._triples, self._chances)

    def visited(self, i: int) -> tuple[NDArray[np.int32], FloatArray]:
        """The triples atom i visits and how likely it is to."""
        where = slice(self._begins[i], self._ends[i])
        return self._triples[where], self._chances[where]

    def spread(self) -> None:
        """Give atoms without weight the average weight."""
        new = self.weights == 0
        share = new.mean()
        if share < 1:
            self.weights *= (1 - share) / self.weights.sum()
        self.weights[new] = 1 / len(new)

    def reweigh(self, counted: BoolArray, gap: float) -> None:
        """Make the most of the atoms there are, and drop those that are of no use."""
        kernels.reweigh(self._visits, self.weights, counted, gap, _ROUNDS_PER_SEARCH)
        keep = self.weights > 0
        if not keep.all():
            self.policies = [policy for policy, kept in zip(self.policies, keep, strict=True) if kept]
            self._begins, self._ends, self.weights = self._begins[keep], self._ends[keep], self.weights[keep]

    def objective(self, counted: BoolArray) -> FloatArray:
        """1 / d[h, x, a] on the triples that count."""
        inverse: FloatArray = kernels.reciprocals(self._visits, self.weights, counted)[1]
        return inverse.reshape(self.shape)
