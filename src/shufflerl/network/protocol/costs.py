"""What a report costs by each transport, and which is the cheaper: formulas with measured constants.

Tags cost by the message: the user's own, and either its noise, somewhat more than C * lambda / n, or its share of the
shuffler's dummies. Masked vectors cost by the counter, whatever n is. So for few users vectors are cheaper, for many
tags are. `python -m bench transports` measures what is predicted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shufflerl.counts import CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Problem
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import NoiseBy, mechanism
from shufflerl.network.protocol.sources import Source, Users, source
from shufflerl.network.protocol.wire import Transport

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


def of_tags(source: Source) -> Cost:
    """A report of tags, padded where that is done, and its share of the batch's dummies, which the shuffler seals."""
    tags = source.tags_per_report
    core = _common(source) + (tags + source.expected_dummies / source.users) * MESSAGE_SECONDS
    return Cost(_ENVELOPE + tags * wire.SEALED_TAG_BYTES, core)


def of_sums(source: Source) -> Cost:
    """A report of a masked vector."""
    vector = source.query.size * word_bytes(source)
    core = _common(source) + MESSAGE_SECONDS + vector * BYTE_SECONDS
    return Cost(_ENVELOPE + wire.SEALED_SEED_BYTES + vector, core)


def _common(source: Source) -> float:
    drawn = source.protocol.messages_per_user if isinstance(source, Users) else 0.0
    return REPORT_SECONDS + drawn * DRAW_SECONDS


def word_bytes(source: Source) -> int:
    """Bytes of a counter in a masked vector; refused where sums could wrap."""
    return masking.word_bytes(*source.count_range)


def cheaper(source: Source) -> Transport:
    """The transport that costs less; tags where sums could wrap."""
    try:
        sums = of_sums(source)
    except InvalidInputError:
        return Transport.tags
    return Transport.sums if sums.seconds < of_tags(source).seconds else Transport.tags


def switch_over(source: Source) -> int | None:
    """The fewest users from which on tags are the cheaper; None if masked sums are, for as many as can be summed."""
    low, high = 0, 2**31  # so many cannot be summed; in between, tags grow cheaper with every user and sums do not
    while high - low > 1:
        middle = (low + high) // 2
        if cheaper(source.of(middle)) == Transport.tags:
            high = middle
        else:
            low = middle
    try:
        word_bytes(source.of(high))
    except InvalidInputError:
        return None
    return high


def in_words(source: Source) -> str:
    """Both costs of a report, for a status line."""
    try:
        sums = str(of_sums(source))
    except InvalidInputError:
        sums = "more than can be summed"
    return f"a report costs {of_tags(source)} as tags, {sums} as a masked vector"


def compared(
    epsilon: float, delta: float, *, env: str | None, shape: tuple[int, int, int], users: int, noise: NoiseBy
) -> dict[str, Any]:
    """Both costs of a report with everything in it, and from how many users on tags are the cheaper."""
    from shufflerl import envs
    from shufflerl.privacy.accounting import Budget

    problem = Problem(*shape, users) if env is None else envs.make(env, 0).problem(users)
    if not isinstance(problem, Problem):
        raise InvalidInputError(f"{env} has no states and actions; give an environment of ours, or its shape.")
    query = CountQuery.everything(problem)
    adding = source(query, users, mechanism(noise, Budget(epsilon, delta)).noise(query))
    both = {"tags": of_tags(adding), "sums": of_sums(adding)}
    return {
        "counters": query.size,
        "users": users,
        "noise": noise,
        "noise_sd": adding.noise(users).sd,
        "messages": adding.tags_per_report,
        "dummies": adding.expected_dummies,
        "word_bytes": word_bytes(adding),
        **{
            name: {"bytes": cost.bytes, "core_seconds": cost.core, "seconds": cost.seconds}
            for name, cost in both.items()
        },
        "cheaper": str(cheaper(adding)),
        "tags_cheaper_from_users": switch_over(adding),
    }


def as_text(figures: dict[str, Any]) -> str:
    """The comparison for a reader."""
    after = figures["tags_cheaper_from_users"]
    rows = [
        f"  {name} {figures[name]['bytes'] / 1e3:12,.1f} kB {1e3 * figures[name]['core_seconds']:12,.2f} ms of a core "
        f"{1e3 * figures[name]['seconds']:12,.2f} ms in all"
        for name in ("tags", "sums")
    ]
    return "\n".join(
        [
            f"One report of {figures['users']:,} users on {figures['counters']:,} counters, noise by "
            f"{figures['noise']} of a deviation of {figures['noise_sd']:,.1f} on each; "
            f"{BYTES_PER_SECOND / 1e6:g} MB count as a second.",
            *rows,
            f"Cheaper: {figures['cheaper']}. "
            + ("Sums are so for any number of users." if after is None else f"Tags are so from {after:,} users on."),
            "Tags bound what one user can falsify, masked sums do not: see docs/transports.md.",
        ]
    )
