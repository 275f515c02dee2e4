"""What the roles say to each other: versioned messages with a schema, and problems (RFC 9457) when they may not.

Messages are MessagePack maps, decoded strictly: a field too many, a wrong type or length, another version is refused.
What is signed travels as the very bytes that were signed. `docs/wire.md` has every message with test vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from shufflerl.errors import ContractError, ShuffleRLError

VERSION = 2
MEDIA_TYPE = f"application/vnd.shufflerl.v{VERSION}+msgpack"

#: Random bytes that name a run.
TASK_BYTES = 16
REPORT_ID_BYTES = 16
#: A token: random bytes, and the enrolment key's signature of them.
NONCE_BYTES = 16
TOKEN_BYTES = NONCE_BYTES + 64
#: A tag in clear: a counter's number, big-endian. All tags are equally long, so that their length tells nothing.
TAG_BYTES = 4
#: The tag that names no counter: where users add noise, with these every report is as long as any other of its batch.
PADDING = 2 ** (8 * TAG_BYTES) - 1
#: A sealed tag: HPKE's encapsulated key (32), the tag, and the authentication code (16).
SEALED_TAG_BYTES = 32 + TAG_BYTES + 16
#: Sealed tags per chunk of a release, in sections: the number of a group, how many tags of it follow, and these.
CHUNK_TAGS = 16_384
SECTION = struct.Struct(">II")
#: What a masked vector's stream is made from: a key of AES-128 and the first block of its counter.
SEED_BYTES = 16 + 16
#: A sealed seed: HPKE's encapsulated key (32), the seed, and the authentication code (16).
SEALED_SEED_BYTES = 32 + SEED_BYTES + 16
#: Sealed seeds per chunk, and bytes of a sum per chunk of its release.
CHUNK_SEEDS = 8_192
CHUNK_BYTES = 851_968
#: No batch, attempt or count is larger: 2^53 survives every JSON reader.
MAX_NUMBER = 2**53 - 1

TaskId = Annotated[bytes, msgspec.Meta(min_length=TASK_BYTES, max_length=TASK_BYTES)]
ReportId = Annotated[bytes, msgspec.Meta(min_length=REPORT_ID_BYTES, max_length=REPORT_ID_BYTES)]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
#: Steps of an episode: who announces more would have nodes play for ever.
MAX_STEPS = 100_000
Horizon = Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
Version = Annotated[int, msgspec.Meta(ge=1, le=VERSION)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""

    version: Version = VERSION


class OfAttempt(Message, frozen=True, kw_only=True):
    """Base of what the coordinator says of one attempt at one batch of a run."""

    task: TaskId
    batch: Number
    attempt: Number


class Signed(Message, frozen=True, kw_only=True):
    """Bytes and an Ed25519 signature over their purpose and them."""

    payload: bytes
    signature: Signature


class Transport(StrEnum):
    """How reports travel: every tag sealed by itself, or all counted in one masked vector; see docs/transports.md."""

    tags = "tags"
    sums = "sums"


class _Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="law"):
    """The law of noise on one counter."""


class Poisson(_Law, frozen=True, kw_only=True, tag="poisson"):
    """Poisson counts."""

    mean: float


class Laplace(_Law, frozen=True, kw_only=True, tag="laplace"):
    """Whole numbers z of probability in proportion to exp(-|z|/scale)."""

    scale: float


class TruncatedLaplace(_Law, frozen=True, kw_only=True, tag="truncated laplace"):
    """The same given that |z| <= shift, with the shift added: from 0 to 2*shift."""

    scale: float
    shift: Positive


class _NoiseBy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="by"):
    """Who adds the noise of a batch, and of which law."""


class NoiseByUsers(_NoiseBy, frozen=True, kw_only=True, tag="users"):
    """`mean` is that of all users' noise tags on one counter together; each adds 1/users of it."""

    mean: float


class NoiseByServers(_NoiseBy, frozen=True, kw_only=True, tag="servers"):
    """The shuffler adds `dummies` to every counter, the coordinator its `own` noise to the counts it has opened."""

    dummies: Poisson | TruncatedLaplace
    own: Poisson | Laplace


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="of", omit_defaults=True):
    """Which counters are asked for, and so what policies are played."""


class Counts(_Asked, frozen=True, kw_only=True, tag="counts"):
    """Transitions and rewards of these steps; policies are tables of actions[h, x].

    `support` are the possible transitions[h, x, a, x'] as packed bits.
    """

    horizon: Positive
    states: Positive
    actions: Positive
    transitions: list[Number]
    rewards: list[Number]
    support: bytes | None = None


class Returns(_Asked, frozen=True, kw_only=True, tag="returns"):
    """Each policy's returns of up to `horizon` steps, at each of these points (see `returns.ReturnQuery`).

    `family` is that of all policies, as `policies.describe` has it. Returns lie in [low, high], where that is known.
    """

    family: dict[str, int | str | list[int]]
    horizon: Horizon
    points: list[float]
    low: float | None = None
    high: float | None = None


class Steps(_Asked, frozen=True, kw_only=True, tag="steps"):
    """State, action and reward of one step, drawn at random out of `horizon`; policies are scores[x, a].

    The counters are those of the rewards of a problem of one step.
    """

    horizon: Horizon
    states: Positive
    actions: Positive


class Announcement(OfAttempt, frozen=True, kw_only=True):
    """A batch the coordinator asks for; signed by it, relayed by the shuffler, checked by every node.

    `policies` are little-endian: actions[m, h, x] of tables as 16-bit whole numbers, scores[m, x, a] and numbers[m, i]
    of networks as 32-bit floating-point ones, and none of them is infinite or nan. `tag_key` is the coordinator's HPKE
    key for this batch. `attempt` grows when the batch came to nothing and is asked again. Of masked vectors up to
    `excludable` may be left out of the sum, and with them the noise that their users added.
    """

    users: Positive
    query: Counts | Returns | Steps
    policies: bytes
    weights: list[float]
    noise: NoiseByUsers | NoiseByServers
    tag_key: Key
    transport: Transport
    excludable: Number
    #: The share of all tokens that may take part, by lot (see `Agreement.draws`); where it is not said, all may.
    drawn: Share | msgspec.UnsetType = msgspec.UNSET


class Opening(Message, frozen=True, kw_only=True):
    """The shuffler's own HPKE key for one announced batch, and how often it gave that more time; signed by it.

    The latter is said where users are drawn by lot and it is not zero: twice as many are drawn each time.
    """

    announcement: Digest
    envelope_key: Key
    extensions: Positive | msgspec.UnsetType = msgspec.UNSET


class OpenBatch(Message, frozen=True, kw_only=True):
    """What a node fetches: an `Announcement` signed by the coordinator and an `Opening` signed by the shuffler."""

    announcement: Signed
    opening: Signed


class Report(Message, frozen=True, kw_only=True):
    """One user's report: its id and an envelope sealed to the shuffler, with a token and what its transport sends."""

    report_id: ReportId
    envelope: bytes


class Upload(Message, frozen=True, kw_only=True):
    """Reports for one batch. Sending the same again changes nothing."""

    batch: Number
    attempt: Number
    reports: Annotated[list[Report], msgspec.Meta(min_length=1, max_length=256)]


class Action(StrEnum):
    """What the coordinator may ask of a batch: the sealed seeds of a sealed one; a released one, or its deletion.

    `finish` deletes a release like `scrub`, and says that its batch was the last: the run is over.
    """

    seeds = "seeds"
    collect = "collect"
    scrub = "scrub"
    finish = "finish"


class Command(OfAttempt, frozen=True, kw_only=True):
    """The coordinator's request about a full batch; signed by it."""

    action: Action
    chunk: Number = 0


class Exclusion(OfAttempt, frozen=True, kw_only=True):
    """Which seeds, by their place in the order they were handed over in, cannot be opened; signed by the coordinator.

    Said once for a batch, also if there are none: the shuffler sums the reports that are left.
    """

    positions: list[Number]


class State(StrEnum):
    """Where a batch is. Only open takes reports; each state leads to the next, and open also to aborted.

    Of a run only the last batch is finished instead of scrubbed, and says that the run is over.
    """

    open = "open"
    sealed = "sealed"
    released = "released"
    scrubbed = "scrubbed"
    finished = "finished"
    aborted = "aborted"


class BatchStatus(Message, frozen=True, kw_only=True):
    """What anyone may know of a batch at the shuffler."""

    batch: Number
    attempt: Number
    state: State
    users: Positive
    accepted: Number
    chunks: Number
    extensions: Number
    seconds_left: float


class Reason(StrEnum):
    """Why something was refused; also the label of the counters of refused reports."""

    malformed = "malformed"
    unsupported_version = "unsupported-version"
    oversized = "oversized"
    too_many_messages = "too-many-messages"
    undecryptable = "undecryptable"
    unauthorized = "unauthorized"
    not_drawn = "not-drawn"
    duplicate = "duplicate"
    replayed = "replayed"
    late = "late"
    unknown_batch = "unknown-batch"
    conflict = "conflict"
    below_minimum = "below-minimum"
    not_released = "not-released"
    gone = "gone"
    not_found = "not-found"
    not_allowed = "not-allowed"
    too_slow = "too-slow"
    busy = "busy"
    unreachable = "unreachable"
    storage = "storage"
    failed = "failed"


_ABOUT: dict[Reason, tuple[int, str]] = {
    Reason.malformed: (400, "The message cannot be read"),
    Reason.unsupported_version: (400, "The message has a version that is not spoken here"),
    Reason.oversized: (413, "The message is too long"),
    Reason.too_many_messages: (400, "The batch asks for longer reports than are taken here"),
    Reason.undecryptable: (400, "The envelope was not sealed to this batch"),
    Reason.unauthorized: (403, "The token or signature is not valid here"),
    Reason.not_drawn: (403, "This token is not drawn for the batch"),
    Reason.duplicate: (200, "This very report is in already"),
    Reason.replayed: (409, "This token has been used in this run"),
    Reason.late: (409, "The batch takes no more reports"),
    Reason.unknown_batch: (404, "There is no such batch"),
    Reason.conflict: (409, "This contradicts what was announced before"),
    Reason.below_minimum: (403, "The batch asks fewer users than are mixed here"),
    Reason.not_released: (409, "The batch is not released yet"),
    Reason.gone: (410, "The batch has been scrubbed"),
    Reason.not_found: (404, "There is nothing here"),
    Reason.not_allowed: (405, "This cannot be done here"),
    Reason.too_slow: (408, "The message did not arrive in time"),
    Reason.busy: (503, "There are too many requests at once"),
    Reason.unreachable: (503, "The shuffler cannot be reached"),
    Reason.storage: (507, "The store cannot be written"),
    Reason.failed: (503, "A step of the run failed"),
}


class ProblemDetail(msgspec.Struct, frozen=True):
    """RFC 9457, as JSON of type application/problem+json."""

    type: str
    title: str
    status: int
    detail: str


class ProblemError(ShuffleRLError):
    """Something that is refused, with a reason that programs can read and a sentence that people can."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    @property
    def problem(self) -> ProblemDetail:
        """The error as it is sent."""
        status, title = _ABOUT[self.reason]
        return ProblemDetail(f"urn:shufflerl:problem:{self.reason}", title, status, self.detail)


class Verdict(StrEnum):
    """What became of one report."""

    accepted = "accepted"
    duplicate = "duplicate"
    refused = "refused"


class Outcome(msgspec.Struct, frozen=True):
    """What became of one report of an upload, and why if it was not accepted just now."""

    report_id: ReportId
    verdict: Verdict
    problem: ProblemDetail | None = None


class Outcomes(Message, frozen=True, kw_only=True):
    """One outcome per report of an upload, in its order."""

    outcomes: list[Outcome]


AnyMessage = TypeVar("AnyMessage", bound=Message)


class _Head(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_head = msgspec.msgpack.Decoder(_Head)
# Bytes that are no text, where a name should be, raise an error of their own.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """The message's bytes; equal messages have equal bytes."""
    return _encoder.encode(message)


def decode(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """The message of that kind in these bytes, or a problem that says what is wrong with them."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: AnyMessage = decoder.decode(data)
        return message
    except _UNREADABLE as reason:
        try:
            version = _head.decode(data).version
        except _UNREADABLE:
            version = VERSION
        if version != VERSION:
            raise ProblemError(
                Reason.unsupported_version,
                f"This is a {kind.__name__} of version {version}; version {VERSION} is spoken here. Update the older.",
            ) from None
        raise ProblemError(Reason.malformed, f"This is not a {kind.__name__} of version {VERSION}: {reason}.") from None


def sections(chunk: bytes) -> Iterator[tuple[int, memoryview]]:
    """The sections of a chunk of a release: the number of a group and sealed tags of it."""
    rest = memoryview(chunk)
    while rest:
        if len(rest) < SECTION.size:
            raise ContractError("A chunk of a release ends within the head of a section. Is this its shuffler?")
        group, count = SECTION.unpack_from(rest)
        rest, size = rest[SECTION.size :], count * SEALED_TAG_BYTES
        if len(rest) < size:
            raise ContractError("A chunk of a release ends within a section. Is this its shuffler?")
        yield group, rest[:size]
        rest = rest[size:]


def task_from_text(text: str) -> bytes:
    """A task's id from the 32 hexadecimal digits that stand in addresses and files."""
    try:
        task = bytes.fromhex(text)
    except ValueError:
        task = b""
    if len(task) != TASK_BYTES or task.hex() != text:
        raise ProblemError(Reason.malformed, f"{text[:80]!r} is not a task; expected 32 hexadecimal digits.")
    return task
