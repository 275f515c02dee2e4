"""Time rlberry-scool's UCBVI on an MDP given as tables: runs in the peer's environment, where shufflerl is not.

Usage: peer_ucbvi.py TABLES.npz EPISODES BONUS_SCALE SEED. Prints one JSON object.
"""

# mypy: ignore-errors
import json
import sys
import time

import numpy as np
from rlberry.envs.finite_mdp import FiniteMDP
from rlberry_scool.agents.ucbvi import UCBVIAgent

WARM_UP_EPISODES = 3


def make_agent(path, scale, seed):
    """An agent that has seen nothing; transitions[h, x, a, x'] and rewards[h, x, a] must be the same at every h."""
    with np.load(path) as tables:
        transitions, rewards, start = tables["transitions"], tables["rewards"], tables["start"]
    assert (transitions == transitions[0]).all()
    assert (rewards == rewards[0]).all()
    assert start.max() == 1.0
    mdp = FiniteMDP(rewards[0].copy(), transitions[0].copy(), int(start.argmax()))
    agent = UCBVIAgent(mdp, horizon=len(rewards), bonus_scale_factor=scale, stage_dependent=True, seeder=seed)
    agent.set_writer(None)
    return agent


def main():
    """Fit once to warm up, then time a fresh agent."""
    path, episodes, scale, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    make_agent(path, scale, seed).fit(WARM_UP_EPISODES)
    agent = make_agent(path, scale, seed)
    began = time.perf_counter()
    agent.fit(episodes)
    print(json.dumps({"episodes_per_second": episodes / (time.perf_counter() - began)}))


if __name__ == "__main__":
    main()
