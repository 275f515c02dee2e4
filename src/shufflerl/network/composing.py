"""What a fleet's workers do: play one episode and seal its report."""

from __future__ import annotations

import functools
import json
import os
from typing import Any, NamedTuple

from shufflerl.network import wire
from shufflerl.network.reporting import (
    Checked,
    Invitation,
    check_environment,
    check_signatures,
    play,
    randomize_episode,
    seal_report,
)
from shufflerl.network.wire import OpenBatch

#: Where a test wants the true and the sent counts of every batch written. Never set outside of tests: it is the very
#: thing that must not be known.
RECORD = "SHUFFLERL_TEST_RECORD"


class Composed(NamedTuple):
    """A sealed report; in tests also the tags that are in it, and the true ones among them."""

    report: bytes
    tags: list[int]
    true: list[int]


def check(env: str, parameters: dict[str, Any], batch: bytes, invitation: Invitation) -> None:
    """Refuse a batch that nodes with this environment cannot play, before any is charged for it; runs in a worker."""
    check_environment(_environment(env, json.dumps(parameters)), checked_batch(batch, invitation).agreement)


def compose(env: str, parameters: dict[str, Any], batch: bytes, invitation: Invitation, token: bytes) -> Composed:
    """Play one episode and seal its report; runs in a worker."""
    checked = checked_batch(batch, invitation)
    episode = play(_environment(env, json.dumps(parameters)), checked.agreement)
    tags = randomize_episode(checked.agreement, episode)
    report = wire.encode(seal_report(checked, tags, token))
    if RECORD not in os.environ:
        return Composed(report, [], [])
    return Composed(report, tags.tolist(), checked.agreement.protocol.query.tags(episode)[0].tolist())


@functools.lru_cache(maxsize=4)
def _environment(name: str, parameters: str) -> Any:
    from shufflerl.envs.gym import tabular_env

    return tabular_env(name, **json.loads(parameters))


@functools.lru_cache(maxsize=4)
def checked_batch(batch: bytes, invitation: Invitation) -> Checked:
    """The batch a fleet was given, its signatures checked once per process."""
    return check_signatures(invitation, wire.decode(OpenBatch, batch))
