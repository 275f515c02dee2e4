"""A device that balances a pole, and takes part once in a run of `shufflerl coordinator --environment CartPole-v1`.

In its folder are the run's invitation, which is the same for all, and a token of its own. It plays one episode of a
policy that the run announces and reports one sealed tag: which policy, and one bit of its return, or a few.
"""

from __future__ import annotations

import logging
from pathlib import Path

import gymnasium

from shufflerl.network import Invitation, Node, Receipt, Terms
from shufflerl.privacy.accounting import Budget

# What goes wrong in an episode is told here and nowhere else: a report is sent all the same, and equally long.
logging.basicConfig(filename="device.log")
# In its place, whatever this device senses and does: Box or Discrete observations, Discrete or bounded Box actions.
env = gymnasium.make("CartPole-v1")
# What its user agreed to: this much privacy, among no fewer others.
terms = Terms(Budget(epsilon=1.0, delta=1e-5), min_batch_size=100)


def take_part(folder: Path) -> Receipt:
    """Play and report; called again, after a crash too, it sends the same and plays no second time."""
    token = (folder / "token.txt").read_text()
    node = Node(env, Invitation.load(folder / "invitation.toml"), terms, token, folder / "state")
    try:
        return node.participate()
    finally:
        node.close()


if __name__ == "__main__":
    print(take_part(Path()))
