"""What the shuffler does with sealed reports: it opens their envelopes and permutes the tags of each group.

Its dummies are sealed tags like any others, and are permuted with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from shufflerl.arrays import IntArray
from shufflerl.errors import StorageError
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Agreement
from shufflerl.network.protocol.crypto import UnsealError
from shufflerl.network.protocol.wire import ProblemError, Reason
from shufflerl.network.shuffler import dummies
from shufflerl.network.stores.store import BatchId, BatchRow, Store
from shufflerl.privacy import randomness

#: Bytes of envelopes, or of dummies, that are spread at once.
SLICE_BYTES = 32 * 2**20
#: Tags that are permuted at once, about.
BUCKET_TAGS = 16 * wire.CHUNK_TAGS

Rows = NDArray[np.uint8]


def opened(agreement: Agreement, key: X25519PrivateKey, report: bytes, envelope: bytes) -> tuple[bytes, memoryview]:
    """A report's token and what its transport sends."""
    try:
        text = crypto.unseal(key, agreement.envelope_info(report), envelope)
    except UnsealError:
        raise ProblemError(
            Reason.undecryptable,
            "The envelope cannot be opened with this batch's key and report id; fetch the current batch.",
        ) from None
    return text[: wire.TOKEN_BYTES], memoryview(text)[wire.TOKEN_BYTES :]


@dataclass(frozen=True, eq=False)
class Tags:
    """Sealed tags rows[i], each with the number of its group, groups[i]."""

    groups: IntArray
    rows: Rows


def mixed(store: Store, batch: BatchRow, agreement: Agreement, key: X25519PrivateKey) -> Iterable[bytes]:
    """The sealed tags of a sealed batch, group by group, each group's in a uniformly random order, in chunks.

    A large batch is opened slice by slice, and any process with the same store may do any slice: each takes those that
    are left in an order of its own, and of a slice done twice the first result stands. A tag of a slice goes into a
    bucket of its group drawn uniformly and independently of all others; once all slices are there, each bucket is
    permuted uniformly. That is sorting all tags of a group by independent uniform keys, where the bucket is a key's
    first digit and the order within it is that of the rest: every order of the group is equally likely.
    """
    source, slices = agreement.source, _slices(store, batch, agreement, key)
    expected = batch.users * agreement.envelope_bytes + source.expected_dummies * wire.SEALED_TAG_BYTES
    if expected <= SLICE_BYTES:
        parts = [slice() for slice in slices]
        tags = Tags(np.concatenate([part.groups for part in parts]), np.concatenate([part.rows for part in parts]))
        return packed((group, permuted(rows)) for group, rows in enumerate(_into(tags, [1] * len(source.groups))))
    for number in randomness.permutation(len(slices)):
        if store.kept(batch.id, f"slice {number}") is None:
            where = spread(store, batch.id, slices[int(number)](), _buckets(agreement))
            store.keep(batch.id, f"slice {number}", where)
    return packed(gathered(store, batch.id, len(slices), _buckets(agreement)))


def _slices(store: Store, batch: BatchRow, agreement: Agreement, key: X25519PrivateKey) -> list[Callable[[], Tags]]:
    """How to have the tags of each slice of a batch: reports, and then dummies."""
    reports = max(1, SLICE_BYTES // agreement.envelope_bytes)
    some = max(1, SLICE_BYTES // (dummies.SLICE * wire.SEALED_TAG_BYTES))
    pieces = range(len(dummies.slices(agreement)))
    return [
        *(partial(_reports, store, batch, agreement, key, first, reports) for first in range(0, batch.users, reports)),
        *(partial(_dummies, store, batch.id, agreement, pieces[first : first + some]) for first in pieces[::some]),
    ]


def _reports(
    store: Store, batch: BatchRow, agreement: Agreement, key: X25519PrivateKey, first: int, count: int
) -> Tags:
    reports = list(store.reports(batch.id, first, count))
    if len(reports) != min(count, batch.users - first):
        raise StorageError(
            f"Batch {batch.id.number} was sealed with {batch.users} reports, but some are missing; it is damaged "
            "and is never released short. Begin another run with other users."
        )
    rows = _rows(b"".join(opened(agreement, key, report, envelope)[1] for report, envelope in reports))
    groups = np.repeat(np.arange(len(agreement.source.groups)), agreement.source.tags_per_group)
    return Tags(np.tile(groups, len(reports)), rows)


def _dummies(store: Store, id: BatchId, agreement: Agreement, pieces: range) -> Tags:
    rows = [_rows(_kept(store, id, dummies.name(piece))) for piece in pieces]
    groups = [dummies.slices(agreement)[piece][0] for piece in pieces]
    return Tags(np.repeat(groups, [len(some) for some in rows]), np.concatenate(rows))


def _buckets(agreement: Agreement) -> list[int]:
    """Over how many buckets the tags of each group are spread, so that each holds about what is permuted at once."""
    source = agreement.source
    mean = 0.0 if source.dummies is None else source.dummies.mean
    expected = (source.users * source.tags_per_group + mean * len(counters) for counters in source.groups)
    return [int(-(-tags // BUCKET_TAGS)) for tags in expected]


def _into(tags: Tags, buckets: Sequence[int]) -> list[Rows]:
    """The tags by bucket, each in one drawn uniformly among those of its group; `buckets` says how many it has."""
    drawn, first = np.empty(len(tags.rows), dtype=np.int64), 0
    for group, count in enumerate(buckets):
        ours = np.flatnonzero(tags.groups == group)
        drawn[ours] = first + randomness.uniform(count, len(ours))
        first += count
    ends = np.cumsum(np.bincount(drawn, minlength=first))
    return np.split(tags.rows[np.argsort(drawn, kind="stable")], ends[:-1])


def spread(store: Store, id: BatchId, tags: Tags, buckets: Sequence[int]) -> bytes:
    """Store a slice's tags by bucket, and say under which name and how many: who does the slice again takes another."""
    name, parts = secrets.token_hex(8), _into(tags, buckets)
    for bucket, rows in enumerate(parts):
        if len(rows):
            store.keep(id, f"{name} {bucket}", rows.tobytes())
    return msgspec.msgpack.encode((name, [len(rows) for rows in parts]))


def gathered(store: Store, id: BatchId, slices: int, buckets: Sequence[int]) -> Iterator[tuple[int, Rows]]:
    """Permute bucket after bucket: group and tags of each."""
    parts = [_kept(store, id, f"slice {number}") for number in range(slices)]
    slice_buckets = [msgspec.msgpack.decode(part, type=tuple[str, list[int]]) for part in parts]
    for bucket, group in enumerate(np.repeat(np.arange(len(buckets)), buckets).tolist()):
        tags = b"".join(_kept(store, id, f"{name} {bucket}") for name, counts in slice_buckets if counts[bucket])
        yield group, permuted(_rows(tags))


def _kept(store: Store, id: BatchId, name: str) -> bytes:
    value = store.kept(id, name)
    if value is None:
        raise StorageError(f"A partial result of batch {id.number} is missing; it is damaged.")
    return value


def permuted(rows: Rows) -> Rows:
    """Sealed tags in a uniformly random order."""
    return rows[randomness.permutation(len(rows))]


def packed(sections: Iterable[tuple[int, Rows]]) -> Iterator[bytes]:
    """The chunks of a release, from the tags of its groups in order; see `wire.sections`."""
    parts: list[bytes] = []
    room = wire.CHUNK_TAGS
    for group, tags in sections:
        rest = tags
        while len(rest):
            some, rest = rest[:room], rest[room:]
            parts += [wire.SECTION.pack(group, len(some)), some.tobytes()]
            room -= len(some)
            if room == 0:
                yield b"".join(parts)
                parts, room = [], wire.CHUNK_TAGS
    if parts:
        yield b"".join(parts)


def _rows(tags: bytes) -> Rows:
    return np.frombuffer(tags, dtype=np.uint8).reshape(-1, wire.SEALED_TAG_BYTES)
