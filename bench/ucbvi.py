"""Our UCBVI beside rlberry-scool's: same MDP, same bonus scale, both planning anew after every episode.

The peer runs as it is shipped (its planning is plain Python), in an environment of its own made by `make bench`. Where
there was a choice it got the cheaper one: no log of rewards is kept, rewards are their means, the start state is fixed.
Ours keeps the whole history (deployed policies, exact regret) and draws every reward.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from bench.measure import Figure, SkippedError, medians, seconds
from shufflerl import MDP, CountPopulation, envs, learn
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.privatizers.none import NoPrivacy

HERE = Path(__file__).parent
PEER = HERE.parent / ".peer-venv"
SCALE, REPEATS = 1.0, 5
#: n_states, horizon, our episodes, the peer's episodes: about a third of a second or more each.
SETTINGS = ((6, 6, 100_000, 4_000), (50, 20, 2_000, 30))


def run() -> list[Figure]:
    """Episodes per second of learn(UCBVI) and of rlberry-scool's UCBVIAgent, on RiverSwim X=6 H=6 and X=50 H=20."""
    if not (PEER / ".installed").exists():
        raise SkippedError(
            "the peer's environment .peer-venv is not installed; `make bench` does so where pip can reach a registry."
        )
    return [compare(*setting) for setting in SETTINGS]


def compare(states: int, horizon: int, episodes: int, peer_episodes: int) -> Figure:
    """Both on one RiverSwim, in turn."""
    mdp = envs.make("riverswim", n_states=states, horizon=horizon)
    assert isinstance(mdp, MDP)
    our_speed(mdp, episodes, seed=REPEATS)
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder, "mdp.npz")
        np.savez(tables, transitions=mdp.transitions, rewards=mdp.rewards, start=mdp.start)
        ours, peer = medians(
            REPEATS,
            lambda seed: our_speed(mdp, episodes, seed),
            lambda seed: peer_speed(tables, peer_episodes, seed),
        )
    what = f"UCBVI on RiverSwim X={states} H={horizon}"
    return Figure.at_least(50, what, "episodes/s", ours, peer, "rlberry-scool 0.7.3")


def our_speed(mdp: MDP, episodes: int, seed: int) -> float:
    """Episodes per second of one run."""
    for_users, for_learner = np.random.SeedSequence(seed).spawn(2)
    learner = UCBVI(mdp.problem(episodes), for_learner, scale=SCALE)
    population = CountPopulation(mdp, for_users)
    return episodes / seconds(lambda: learn(learner, population, NoPrivacy()))


def peer_speed(tables: Path, episodes: int, seed: int) -> float:
    """Episodes per second of one run of the peer, in a process of its own."""
    # -I: neither this folder nor the caller's settings reach the peer's imports.
    command = [str(PEER / "bin" / "python"), "-I", str(HERE / "peer_ucbvi.py")]
    arguments = [str(tables), str(episodes), str(SCALE), str(seed)]
    done = subprocess.run(command + arguments, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout)["episodes_per_second"])
