"""What a report costs by each transport, and which is the cheaper: formulas with measured constants.

Tags cost by the message, somewhat more than C * lambda / n and the user's own; masked vectors by the counter, whatever
n is. So for few users vectors are cheaper, for many tags are. `python -m bench transports` measures what is predicted
here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shufflerl.counts import CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Problem
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import messages_per_report
from shufflerl.network.protocol.wire import Transport
from shufflerl.privacy.protocol import Protocol

#: Seconds of one core (2026, x86-64): to seal (80 µs) and open (47 µs) a short message; to draw a noise tag; for a byte
#: of a vector to be masked, sealed, opened when it arrives and when it is added, and unmasked; and what any report
#: takes, to randomize an episode, to seal its envelope and open it twice, and to verify its token.
MESSAGE_SECONDS = 127e-6
DRAW_SECONDS = 0.1e-6
BYTE_SECONDS = 3e-9
REPORT_SECONDS = 0.45e-3
#: Bytes that cost as much as a second of a core: what a device sends in one over a line of 80 Mbit/s.
BYTES_PER_SECOND = 1e7

_ENVELOPE = wire.TOKEN_BYTES + crypto.SEAL_BYTES


@dataclass(frozen=True)
class Cost:
    """Of one report, at all roles together: bytes that are sent, seconds of one core."""

    bytes: float
    core: float

    @property
    def seconds(self) -> float:
        """Both in one figure."""
        return self.core + self.bytes / BYTES_PER_SECOND

    def __str__(self) -> str:
        return f"{self.bytes / 1e3:,.1f} kB and {self.core * 1e3:,.2f} ms of a core"


def of_tags(protocol: Protocol) -> Cost:
    """A report of tags, padded as all are."""
    tags = messages_per_report(protocol)
    return Cost(_ENVELOPE + tags * wire.SEALED_TAG_BYTES, _common(protocol) + tags * MESSAGE_SECONDS)


def of_sums(protocol: Protocol) -> Cost:
    """A report of a masked vector."""
    vector = protocol.query.size * word_bytes(protocol)
    core = _common(protocol) + MESSAGE_SECONDS + vector * BYTE_SECONDS
    return Cost(_ENVELOPE + wire.SEALED_SEED_BYTES + vector, core)


def _common(protocol: Protocol) -> float:
    return REPORT_SECONDS + protocol.messages_per_user * DRAW_SECONDS


def word_bytes(protocol: Protocol) -> int:
    """Bytes of a counter in a masked vector; refused where sums could wrap."""
    return masking.word_bytes(protocol.users, protocol.noise.mean, protocol.query.size)


def cheaper(protocol: Protocol) -> Transport:
    """The transport that costs less; tags where sums could wrap."""
    try:
        sums = of_sums(protocol)
    except InvalidInputError:
        return Transport.tags
    return Transport.sums if sums.seconds < of_tags(protocol).seconds else Transport.tags


def switch_over(protocol: Protocol) -> int | None:
    """The fewest users from which on tags are the cheaper; None if masked sums are, for as many as can be summed."""
    low, high = 0, 2**31  # so many cannot be summed; in between, tags grow cheaper with every user and sums do not
    while high - low > 1:
        middle = (low + high) // 2
        if cheaper(replace(protocol, users=middle)) == Transport.tags:
            high = middle
        else:
            low = middle
    try:
        word_bytes(replace(protocol, users=high))
    except InvalidInputError:
        return None
    return high


def in_words(protocol: Protocol) -> str:
    """Both costs of a report, for a status line."""
    try:
        sums = str(of_sums(protocol))
    except InvalidInputError:
        sums = "more than can be summed"
    return f"a report costs {of_tags(protocol)} as tags, {sums} as a masked vector"


def compared(
    epsilon: float, delta: float, *, env: str | None, shape: tuple[int, int, int], users: int
) -> dict[str, Any]:
    """Both costs of a report with everything in it, and from how many users on tags are the cheaper."""
    from shufflerl import envs
    from shufflerl.privacy.accounting import Budget, calibrate

    problem = Problem(*shape, users) if env is None else envs.make(env, 0).problem(users)
    if not isinstance(problem, Problem):
        raise InvalidInputError(f"{env} has no states and actions; give an environment of ours, or its shape.")
    query = CountQuery.everything(problem)
    protocol = Protocol(query, users, calibrate(Budget(epsilon, delta), query.changed_counters))
    both = {"tags": of_tags(protocol), "sums": of_sums(protocol)}
    return {
        "counters": query.size,
        "users": users,
        "noise_mean": protocol.noise.mean,
        "word_bytes": word_bytes(protocol),
        **{
            name: {"bytes": cost.bytes, "core_seconds": cost.core, "seconds": cost.seconds}
            for name, cost in both.items()
        },
        "cheaper": str(cheaper(protocol)),
        "tags_cheaper_from_users": switch_over(protocol),
    }


def told(figures: dict[str, Any]) -> str:
    """The comparison for a reader."""
    after = figures["tags_cheaper_from_users"]
    rows = [
        f"  {name} {figures[name]['bytes'] / 1e3:12,.1f} kB {1e3 * figures[name]['core_seconds']:12,.2f} ms of a core "
        f"{1e3 * figures[name]['seconds']:12,.2f} ms in all"
        for name in ("tags", "sums")
    ]
    return "\n".join(
        [
            f"One report of {figures['users']:,} users on {figures['counters']:,} counters, noise of mean "
            f"{figures['noise_mean']:,.1f} on each; {BYTES_PER_SECOND / 1e6:g} MB count as a second.",
            *rows,
            f"Cheaper: {figures['cheaper']}. "
            + ("Sums are so for any number of users." if after is None else f"Tags are so from {after:,} users on."),
            "Tags bound what one user can falsify, masked sums do not: see docs/transports.md.",
        ]
    )
