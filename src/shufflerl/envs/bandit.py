"""The paper's heterogeneous bandit: one state, one step, and users whose arms differ a little from each other's."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from shufflerl import checks
from shufflerl.arrays import FloatArray
from shufflerl.envs.instances import of_instance
from shufflerl.mdp import MDP


def bandit(rng: np.random.Generator, *, n_actions: int = 20, sigma: float = 0.1, instance: int | None = None) -> MDP:
    """A bandit with global means r*(a) ~ U(0, 0.99), in which user k's own mean is r*(a) + N(0, sigma^2).

    A user draws its reward from Bernoulli(clip(own mean, 0, 1)) and plays one action once, so that over users the
    reward of action a is exactly Bernoulli(E[clip(N(r*(a), sigma^2), 0, 1)]): the users' differences are in this
    mean in full, and nothing of the paper's setting is approximated. With `instance`, every seed has the same r*.
    """
    actions = checks.whole("n_actions", n_actions, least=1)
    checks.table_size(1, 1, actions)
    spread = checks.real("sigma", sigma, above=0, closed=True)
    means = clipped_normal_mean(of_instance(rng, instance).uniform(0.0, 0.99, actions), spread)
    return MDP(transitions=np.empty((0, 1, actions, 1)), rewards=means.reshape(1, 1, actions), start=[1.0])


def clipped_normal_mean(mean: FloatArray, sigma: float) -> FloatArray:
    """E[clip(Z, 0, 1)] for Z ~ N(mean, sigma^2), in closed form.

    With l = -mean/sigma and u = (1-mean)/sigma it is mean (Φ(u) - Φ(l)) + sigma (φ(l) - φ(u)) + 1 - Φ(u): the part of
    Z inside [0, 1], and the mass above 1 which counts as 1.
    """
    if sigma == 0:
        return np.clip(mean, 0.0, 1.0)
    low, high = -mean / sigma, (1 - mean) / sigma
    # For a tiny sigma a bound squares to infinity, and its density to what it should be: zero.
    with np.errstate(over="ignore"):
        densities = np.exp(-(low**2) / 2) - np.exp(-(high**2) / 2)
    inside = mean * (ndtr(high) - ndtr(low)) + sigma * densities / np.sqrt(2 * np.pi)
    total: FloatArray = np.clip(inside + ndtr(-high), 0.0, 1.0)
    return total
