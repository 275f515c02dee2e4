"""What a fleet's workers do: play one episode and seal its report."""

from __future__ import annotations

import functools
import json
from typing import Any

from shufflerl.network.node.reporting import (
    Checked,
    Environment,
    Invitation,
    check_environment,
    check_signatures,
    make_report,
    play,
)
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import OpenBatch


def check(env: str, parameters: dict[str, Any], batch: bytes, invitation: Invitation) -> None:
    """Refuse a batch that nodes with this environment cannot play, before any is charged for it; runs in a worker."""
    check_environment(_environment(env, json.dumps(parameters)), checked_batch(batch, invitation).agreement)


def compose(
    env: str | Environment, parameters: dict[str, Any], batch: bytes, invitation: Invitation, token: bytes
) -> bytes:
    """Play one episode, in an environment or in that of a name, and seal its report; runs in a worker."""
    checked = checked_batch(batch, invitation)
    played = _environment(env, json.dumps(parameters)) if isinstance(env, str) else env
    return wire.encode(make_report(checked, play(played, checked.agreement), token))


@functools.lru_cache(maxsize=4)
def _environment(name: str, parameters: str) -> Any:
    from shufflerl.envs.gym import device_env

    return device_env(name, **json.loads(parameters))


@functools.lru_cache(maxsize=4)
def checked_batch(batch: bytes, invitation: Invitation) -> Checked:
    """The batch a fleet was given, its signatures checked once per process."""
    return check_signatures(invitation, wire.decode(OpenBatch, batch))
