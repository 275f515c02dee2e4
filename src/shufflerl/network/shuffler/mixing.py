"""What the shuffler does with sealed reports: it opens their envelopes and permutes all tags of a batch."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from shufflerl.errors import StorageError
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Agreement
from shufflerl.network.protocol.crypto import UnsealError
from shufflerl.network.protocol.wire import ProblemError, Reason
from shufflerl.network.stores.store import BatchId, BatchRow, Store
from shufflerl.privacy import randomness

#: Bytes of envelopes that are opened at once.
SLICE_BYTES = 32 * 2**20
#: Tags that are permuted at once, about.
BUCKET_TAGS = 16 * wire.CHUNK_TAGS


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


def mixed(store: Store, batch: BatchRow, agreement: Agreement, key: X25519PrivateKey) -> Iterable[bytes]:
    """The sealed tags of a sealed batch in a uniformly random order, in chunks.

    A large batch is opened slice by slice, and any process with the same store may do any slice: each takes those that
    are left in an order of its own, and of a slice done twice the first result stands. A tag of a slice goes into a
    bucket drawn uniformly and independently of all others; once all slices are there, each bucket is permuted
    uniformly. That is sorting all tags by independent uniform keys, where the bucket is a key's first digit and the
    order within it is that of the rest: every order of the batch is equally likely.
    """
    size = max(1, SLICE_BYTES // agreement.envelope_bytes)
    starts = range(0, batch.users, size)
    if len(starts) == 1:
        return permuted(_opened_slice(store, batch, agreement, key, 0, size))
    buckets = -(-batch.users * agreement.envelope_bytes // (BUCKET_TAGS * wire.SEALED_TAG_BYTES))
    for number in randomness.permutation(len(starts)):
        if store.kept(batch.id, f"slice {number}") is None:
            tags = _opened_slice(store, batch, agreement, key, starts[int(number)], size)
            store.keep(batch.id, f"slice {number}", _spread(store, batch.id, tags, buckets))
    return _gathered(store, batch.id, len(starts), buckets)


def _opened_slice(
    store: Store, batch: BatchRow, agreement: Agreement, key: X25519PrivateKey, first: int, size: int
) -> bytes:
    reports = list(store.reports(batch.id, first, size))
    if len(reports) != min(size, batch.users - first):
        raise StorageError(
            f"Batch {batch.id.number} was sealed with {batch.users} reports, but some are missing; it is damaged "
            "and is never released short. Begin another run with other users."
        )
    return b"".join(opened(agreement, key, report, envelope)[1] for report, envelope in reports)


def _spread(store: Store, id: BatchId, tags: bytes, buckets: int) -> bytes:
    """Store a slice's tags by bucket, and say under which name and how many: who does the slice again takes another."""
    rows = _rows(tags)
    drawn = randomness.uniform(buckets, len(rows))
    rows = rows[np.argsort(drawn, kind="stable")]
    counts, name = np.bincount(drawn, minlength=buckets), secrets.token_hex(8)
    for bucket, end in enumerate(np.cumsum(counts)):
        if counts[bucket]:
            store.keep(id, f"{name} {bucket}", rows[end - counts[bucket] : end].tobytes())
    return msgspec.msgpack.encode((name, counts.tolist()))


def _gathered(store: Store, id: BatchId, slices: int, buckets: int) -> Iterator[bytes]:
    """Permute bucket after bucket."""
    parts = [_kept(store, id, f"slice {number}") for number in range(slices)]
    spread = [msgspec.msgpack.decode(part, type=tuple[str, list[int]]) for part in parts]
    for bucket in range(buckets):
        yield from permuted(b"".join(_kept(store, id, f"{name} {bucket}") for name, counts in spread if counts[bucket]))


def _kept(store: Store, id: BatchId, name: str) -> bytes:
    value = store.kept(id, name)
    if value is None:
        raise StorageError(f"A partial result of batch {id.number} is missing; it is damaged.")
    return value


def permuted(tags: bytes) -> list[bytes]:
    """Sealed tags in a uniformly random order, in chunks."""
    rows = _rows(tags)
    mixed = rows[randomness.permutation(len(rows))]
    return [mixed[first : first + wire.CHUNK_TAGS].tobytes() for first in range(0, len(mixed), wire.CHUNK_TAGS)]


def _rows(tags: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(tags, dtype=np.uint8).reshape(-1, wire.SEALED_TAG_BYTES)
