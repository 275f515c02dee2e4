"""Draws what policy search learned on CartPole: `python docs/assets/film.py` writes docs/images/cartpole.svg.

A policy is learned in the shuffle model at epsilon 1; then it, and the policy that the search began with, play an
episode in Gymnasium's own CartPole from the same start.
"""

from __future__ import annotations

import math

import gymnasium
import numpy as np
from draw import IMAGES, Picture

from shufflerl import learn, privatizers
from shufflerl.envs.players import ControlTask
from shufflerl.envs.playing import Interface
from shufflerl.learners.policy_search import PolicySearch
from shufflerl.mdp import Mixture
from shufflerl.policies import Network
from shufflerl.population import ReturnPopulation

USERS, EPSILON, DELTA, SEED = 15_000, 1.0, 1e-6, 0
FRAMES, WIDTH, HEIGHT, GAP, LEFT = 8, 104, 116, 8, 16
LENGTH = 1.0  # of the pole, in metres

#: Cart's place in metres, pole's angle in radians.
Seen = tuple[float, float]


def policies() -> tuple[Mixture, Mixture]:
    """The policy before the first user and after the last."""
    game = ControlTask("CartPole-v1")
    learner = PolicySearch(game.problem(USERS), SEED)
    before = learner.released
    learn(
        learner,
        ReturnPopulation(game, seed=SEED),
        privatizers.make("shuffle", learner, epsilon=EPSILON, delta=DELTA, seed=SEED),
    )
    return before, learner.released


def episode(mixture: Mixture) -> list[Seen]:
    """What is seen of one episode, after every step."""
    env = gymnasium.make("CartPole-v1")
    interface, family = Interface.of(env), mixture.family
    assert isinstance(family, Network)
    observation, _ = env.reset(seed=SEED)
    seen, over = [observation], False
    while not over:
        action = int(family.act(mixture.policies[0], interface.observed(seen[-1])))
        observation, _, terminated, truncated, _ = env.step(action)
        seen.append(observation)
        over = terminated or truncated
    return [(float(one[0]), float(one[2])) for one in seen]


def film(episodes: dict[str, list[Seen]]) -> Picture:
    """A row of frames for each episode, evenly spaced in it, all to one scale."""
    p = Picture(
        "cartpole",
        920,
        178 * len(episodes) + 14,
        "CartPole before and after learning",
        "Two rows of frames of a cart with a pole. Above, the pole falls within a few steps. Below, a policy learned "
        "from one noisy tag of each user keeps it upright to the end.",
    )
    shown = {
        title: [(round(step), *seen[round(step)]) for step in np.linspace(0, len(seen) - 1, FRAMES)]
        for title, seen in episodes.items()
    }
    furthest = max(abs(place) for frames in shown.values() for _, place, _ in frames)
    scale = (WIDTH / 2 - 22) / max(furthest, 0.5)  # pixels of a metre; the cart stays in its frame
    for row, (title, frames) in enumerate(shown.items()):
        top = 178 * row + 34
        p.words(LEFT, top - 10, title, size=14, bold=True, at="start")
        for i, (step, place, angle) in enumerate(frames):
            left = LEFT + i * (WIDTH + GAP)
            p.box(left, top, WIDTH, HEIGHT, "soft")
            _cart(p, left + WIDTH / 2 + scale * place, top + HEIGHT - 18, angle, scale)
            p.words(left + WIDTH / 2, top + HEIGHT + 18, f"step {step}, {round(math.degrees(angle))}°", size=12)
    return p


def _cart(p: Picture, x: float, ground: float, angle: float, scale: float) -> None:
    p.line([(x - 18, ground), (x + 18, ground), (x + 18, ground - 12), (x - 18, ground - 12), (x - 18, ground)], "user")
    across, along = math.cos(angle), math.sin(angle)
    foot, length = (x, ground - 12), scale * LENGTH
    tip = (foot[0] + length * along, foot[1] - length * across)
    wide = (2.5 * across, 2.5 * along)
    sides = [(a[0] + s * wide[0], a[1] + s * wide[1]) for a, s in ((foot, -1), (tip, -1), (tip, 1), (foot, 1))]
    p.line([*sides, sides[0]], "noise", filled=True)


if __name__ == "__main__":
    before, after = map(episode, policies())
    picture = film(
        {
            f"Before the first user: down after {len(before) - 1} steps": before,
            f"After {USERS:,} users, epsilon {EPSILON:g}: {len(after) - 1} steps of 500": after,
        }
    )
    (IMAGES / f"{picture.name}.svg").write_text(picture.text)
