"""Streams of random numbers. One integer may seed everything: each role draws a stream of its own from it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shufflerl import checks
from shufflerl.errors import InvalidInputError

Seed = int | np.random.SeedSequence
Role = Literal["environment", "users", "noise", "learner"]

#: A role's place is its spawn key: the streams of an integer are those that SeedSequence(integer).spawn gives in order.
ROLES: tuple[Role, ...] = ("environment", "users", "noise", "learner")


def stream(seed: Seed, role: Role, restart: int = 0) -> np.random.Generator:
    """The generator of a role, independent of the other roles' of the same seed.

    `restart`, where not 0, gives yet another stream: for a process that takes up where another with the same seed left.

    >>> bool(stream(0, "users").random() == stream(0, "learner").random())
    False
    """
    if not isinstance(seed, np.random.SeedSequence):
        try:
            seed = np.random.SeedSequence(checks.whole("seed", seed, least=0))
        except InvalidInputError as reason:
            raise InvalidInputError(f"{str(reason)[:-1]}, or a numpy.random.SeedSequence.") from None
    place = (ROLES.index(role), restart) if restart else (ROLES.index(role),)
    return np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *place)))
