"""The shuffler's own noise: dummies, sealed to the coordinator like any tag while the batch fills.

How many a counter gets is drawn once for a batch, slice by slice. A slice is a few counters of one group, and any
process may do any of them, knowing the announcement alone: each takes those that are left in an order of its own, and
of a slice done twice the first that was stored stands. Drawn again, dummies could be averaged away. Sealed dummies are
stored with the batch, and deleted with it.
"""

from __future__ import annotations

import functools

from shufflerl.arrays import IntArray
from shufflerl.network import faults
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import Agreement, parse_announcement
from shufflerl.network.protocol.sources import Source
from shufflerl.network.stores.store import BatchId, Store
from shufflerl.privacy import randomness
from shufflerl.privacy.protocol import noise_counts

#: Dummies of a slice, about: a tenth of a second of one core.
SLICE = 1_024


def slices(agreement: Agreement) -> tuple[tuple[int, range], ...]:
    """The group and the counters of every slice; none where no dummies are sealed."""
    return () if agreement.transport == wire.Transport.sums else _slices(agreement.source, SLICE)


@functools.lru_cache(maxsize=8)
def _slices(source: Source, dummies: int) -> tuple[tuple[int, range], ...]:
    if source.dummies is None:
        return ()
    size = max(1, int(dummies / source.dummies.mean))
    return tuple(
        (group, counters[first : first + size])
        for group, counters in enumerate(source.groups)
        for first in range(0, len(counters), size)
    )


def missing(store: Store, id: BatchId, agreement: Agreement) -> list[int]:
    """Slices that are not stored, in random order: processes that share a store hardly ever do the same."""
    order = randomness.permutation(len(slices(agreement)))
    return [int(number) for number in order if store.kept(id, name(int(number))) is None]


def sealed(payload: bytes, number: int) -> bytes:
    """Draw the dummies of a slice and seal them; all that it takes is the announcement, so that workers can."""
    agreement = parse_announcement(payload)
    law, (_, counters) = agreement.source.dummies, slices(agreement)[number]
    assert law is not None
    key, info = crypto.public_box_key(agreement.announcement.tag_key), agreement.tag_info
    return b"".join(
        crypto.seal(key, info, tag.to_bytes(wire.TAG_BYTES))
        for tag, count in zip(counters, noise_counts(law, len(counters)).tolist(), strict=True)
        for _ in range(count)
    )


def keep(store: Store, id: BatchId, number: int, tags: bytes) -> None:
    """Store a slice, unless somebody has."""
    store.keep(id, name(number), tags)
    faults.reached("dummies")


def name(number: int) -> str:
    """What a slice is stored as."""
    return f"dummies {number}"


def added(store: Store, id: BatchId, agreement: Agreement) -> masking.Words:
    """What the shuffler adds to a sum of vectors: nothing where users add the noise; drawn once for a batch."""
    counters, size = agreement.query.size, agreement.word_bytes
    if agreement.source.dummies is None:
        return masking.zeros(counters, size)
    if (there := store.kept(id, "noise")) is None:
        there = store.keep(id, "noise", drawn_dummies(agreement.source).astype(f"<u{size}").tobytes())
        faults.reached("noise")
    return masking.words(there, size)


def drawn_dummies(source: Source) -> IntArray:
    """How many dummies of each counter, drawn anew."""
    assert source.dummies is not None
    return noise_counts(source.dummies, source.query.size)
