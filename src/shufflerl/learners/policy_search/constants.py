"""Every constant that was chosen for policy search, in one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """One set for all problems, chosen on seeds from 1000 on (research/ says what they are worth)."""

    arms: int = 12  # policies drawn around the mean in every batch
    pool: int = 128  # where there is no noise: so many that hardly any two users play the same
    points: int = 6  # of the window; more tell where returns are, and cost hardly any noise
    fine_points: int = 256  # where there is no noise
    variance: float = 0.05  # of an arm's estimate, in widths of the window: what the smallest batches are sized for
    certain: float = 0.55  # reliability of the arms' differences that later batches are sized for
    exact_certain: float = 0.8  # the same without noise, where sure batches cost few users
    uncertain: float = 0.2  # below it a batch's arms are not followed
    growth: float = 1.2  # of batches at most, and of the step while there is nothing to follow
    empty: float = 0.25  # of the window's width: if returns are below it on average, its upper half is not needed
    narrowing: float = 0.75  # of the window's width from batch to batch: what is less is not settled yet
    top_share: float = 0.02  # of returns at the window's highest point, which its upper end keeps to
    bottom_share: float = 0.04  # of returns at its lowest point, which its lower end keeps to
    pace: float = 2.0  # of the window's ends, in widths for each share too many
    narrowest: float = 0.0025  # of the range of returns: the least window
    memory: float = 0.2  # weight of a batch in running estimates and in the averaged policy
    slow_memory: float = 0.05  # weight in the policy that is averaged over more batches
    patience: float = 25.0  # batches without a better return, after which a search ends
    hopeless: float = 10.0  # batches after which it does if returns have fallen from the first and never risen
    slow: float = 0.1  # a search ends, too, if the second half of its users brought less of all that it has risen by
    min_track: int = 20  # batches that it has at least
    first_share: float = 0.5  # of all users left: with fewer the first search goes on even so
    restart_step: float = 0.2  # of the mean's length: the step where a search without noise goes on with more users
    trail: int = 4  # former means that are checked too, each so many updates after the one before
    explored: float = 0.35  # of all users, after which no search begins anew if one has found something
    explored_batches: float = 200.0  # or so many of the smallest batches, if they have more users
    reserve: float = 0.15  # of all users, for a check of what was found and to play it
    check_share: float = 0.5  # of the users left, in each batch of that check
    early_share: float = 0.1  # of the users that a search took, in each batch of an earlier check
    min_check: float = 200.0  # users of such a batch at least: returns differ by themselves, too
    batch_share: float = 0.02  # of the users left: a search that needs more in one batch ends


C = Constants()
