"""Dynamic spectrum access, the paper's motivating use: a node finds free spectrum among Gilbert-Elliott channels."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.mdp import MDP, homogeneous

BUSY, FREE = 0, 1


def spectrum(rng: np.random.Generator, *, n_channels: int = 3, horizon: int = 8, memory: float = 0.6) -> MDP:
    """A node on one of `n_channels` channels; each is busy or free by a two-state Markov chain of its own.

    At the start of a slot the node senses the channel it is tuned to: state 2c means channel c is busy, 2c+1 that it
    is free. Action c, its own channel, is to stay: on a free channel the node transmits and is heard with the
    channel's success probability (reward 1), on a busy one it waits (reward 0). Any other action retunes to that
    channel and costs the slot. Channels run from good but crowded to free but poor: the free share goes evenly from
    0.2 to 0.8 and the success probability from 0.95 to 0.6. `memory` is the second eigenvalue of every channel's
    chain: 0 is a fresh draw in each slot, near 1 a channel hardly changes. Nodes start spread evenly over channels.
    Nothing is drawn at random. Known support: the node's tuner obeys, so that action c leads to channel c.

    What is exact: staying follows the channel's chain, and the reward depends on what was sensed, not on what
    comes next. What is modelling: a channel just tuned to is free with its long-run share. This is the truth when c
    stands for a band of many alike channels and retuning picks a fresh one, and on the first visit to a channel; on
    a return to the very same channel the node has forgotten what it sensed there, and the model with it.
    """
    del rng
    channels = checks.whole("n_channels", n_channels, least=2)
    checks.table_size(checks.whole("horizon", horizon, least=1), 2 * channels, channels)
    kept = checks.real("memory", memory, above=0, below=0.99, closed=True)
    share_free = np.linspace(0.2, 0.8, channels)
    success = np.linspace(0.95, 0.6, channels)

    stationary = np.stack([1 - share_free, share_free], axis=-1)
    transitions = np.zeros((channels, 2, channels, channels, 2))  # [channel, sensed, action, channel', sensed']
    rewards = np.zeros((channels, 2, channels))
    for c in range(channels):
        transitions[:, :, c, c, :] = stationary[c]
        transitions[c, :, c, c, :] = kept * np.eye(2) + (1 - kept) * stationary[c]
        rewards[c, FREE, c] = success[c]
    states = 2 * channels
    return homogeneous(
        transitions.reshape(states, channels, states),
        rewards.reshape(states, channels),
        horizon,
        start=stationary.ravel() / channels,
        known_support=True,
    )
