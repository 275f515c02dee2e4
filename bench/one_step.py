"""One random step beside the other ways: in tiles beside policy search, by one state beside tables of all steps.

A run reaches its target, 95% of the way from the best fixed channel to the best policy known, with the first batch
whose released policy does (2,000 fresh episodes); it fails if the one released last (5,000) does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import mean, median

import numpy as np

from bench.measure import Figure
from shufflerl import CountPopulation, envs, learn, learners, privatizers
from shufflerl.envs.sensing import SensingTiles, SpectrumSensing
from shufflerl.experiments.setting import Setting, prepare
from shufflerl.learners.contextual_bandit import ContextualBandit
from shufflerl.learners.policy_search import PolicySearch
from shufflerl.mdp import MDP, Mixture
from shufflerl.steps import one_step

#: Seeds that had no part in choosing the learner's constants.
DELTA, SEEDS, EPISODES, SHARE = 1e-6, range(100, 112), 20_000, 0.95
WAYS = {"tiles": ("spectrum-tiles", "contextual-bandit"), "returns": ("spectrum-sensing", "policy-search")}


def run() -> list[Figure]:
    """Users to reach 95% by one random step in tiles beside policy search, and regret beside tables of all steps."""
    return [*figures(), *tables()]


def figures() -> Iterator[Figure]:
    """Channels and noise one after the other."""
    for channels in (8, 16):
        for noise in ("servers", "users"):
            found = {way: [reach(way, channels, noise, seed) for seed in SEEDS] for way in WAYS}
            users = {way: median(one[0] for one in seeds) for way, seeds in found.items()}
            failed = {way: sum(math.isinf(one[0]) for one in seeds) for way, seeds in found.items()}
            last = {way: mean(one[1] for one in seeds) for way, seeds in found.items()}
            earned = {way: mean(one[2] for one in seeds) for way, seeds in found.items()}
            what = f"spectrum, {channels} channels, eps=1, noise by {noise}"
            said = f"fewer; {failed['tiles']} and {failed['returns']} of {len(SEEDS)} failed"
            yield Figure(
                what, "users", users["tiles"], users["returns"], "returns", said, users["tiles"] < users["returns"]
            )
            for name, of in (("policy released last", last), ("what users earned", earned)):
                better = of["tiles"] > of["returns"]
                yield Figure(f"{what}: {name}", "share", of["tiles"], of["returns"], "returns", "more", better)


def tables() -> Iterator[Figure]:
    """Regret in a step where users see one state for all actions, which tables can count; no goal."""
    for horizon, noise in itertools.product((5, 20, 100), ("servers", "users")):
        lost = {
            name: mean(_lost(name, _weather(horizon, seed), noise, seed) for seed in SEEDS)
            for name in ("contextual-bandit", "optimistic")
        }
        alone = mean(_lost("optimistic", one_step(_weather(horizon, seed)), noise, seed) for seed in SEEDS)
        what = f"6 states, 8 actions, H={horizon}, eps=1, 5,000 users, noise by {noise}: regret in a step"
        ours, peer = lost["contextual-bandit"], lost["optimistic"]
        yield Figure(
            what, "reward", ours, peer, "optimistic", f"less; by optimistic on one step {alone:.3f}", ours < peer
        )


def _weather(horizon: int, seed: int) -> MDP:
    """States that change by themselves, the same at every step, and rewards drawn at random."""
    rng = np.random.default_rng([seed, 99])
    moves, rewards = rng.dirichlet(np.ones(6), size=6), rng.random((6, 8))
    every = np.broadcast_to(moves[None, :, None, :], (horizon - 1, 6, 8, 6))
    return MDP(every, np.broadcast_to(rewards, (horizon, 6, 8)), rng.dirichlet(np.ones(6)))


def _lost(name: str, mdp: MDP, noise: str, seed: int) -> float:
    learner = learners.make(name, mdp.problem(5_000), seed)
    privatizer = privatizers.make("shuffle", learner, epsilon=1.0, delta=DELTA, seed=seed, noise=noise)
    return learn(learner, CountPopulation(mdp, seed), privatizer).total_regret / 5_000 / mdp.horizon


def reach(way: str, channels: int, noise: str, seed: int) -> tuple[float, float, float]:
    """Users that a run takes, how far the policy that it releases last is on its way, and how far its users were."""
    env, learner = WAYS[way]
    privatizer = {"noise": noise}
    setting = Setting(env, learner, "shuffle", EPISODES, 1.0, DELTA, {"n_channels": channels}, {}, privatizer)
    made = prepare(setting, seed)
    game = envs.make("spectrum-sensing", n_channels=channels)
    assert isinstance(made.learner, ContextualBandit | PolicySearch)
    assert isinstance(made.environment, SpectrumSensing | SensingTiles)
    assert isinstance(game, SpectrumSensing)
    fixed, known = game.best_fixed(), game.best_known(50_000, np.random.default_rng(0))
    rng, environment = np.random.default_rng(10**6 + seed), made.environment

    def share(mixture: Mixture, episodes: int) -> float:
        given = np.zeros(episodes, dtype=np.int64)
        return (float(environment.returns(mixture, given, rng).mean()) - fixed) / (known - fixed)

    if expected := made.privatizer.expected_noise(made.learner.widest_query):
        made.learner.expect(expected)
    reached, earned = math.inf, 0.0
    while (batch := made.learner.next_batch()) is not None:
        counts = made.population.play(batch)
        made.learner.observe(made.privatizer.release(counts))
        earned += counts.earned
        if math.isinf(reached) and share(made.learner.released, 2_000) >= SHARE:
            reached = float(made.learner.episodes_played)
    last = share(made.learner.released, 5_000)
    return reached if last >= SHARE else math.inf, last, (earned / EPISODES - fixed) / (known - fixed)
