"""What the shuffler does with masked vectors: it hands over their sealed seeds in random order, and adds up the rest.

Between sealing and release a batch passes these partial results, each kept once and found again after a crash:

- `order`: a random key, by which reports are put in a random order that says nothing of who sent which; in this order
  the sealed seeds are offered to the coordinator, `seeds 0`, `seeds 1`, ...;
- `exclusion`: which of them the coordinator cannot open. The first stands: two sums of different reports would give the
  difference away. More than the announcement allows are never summed: the batch is released empty;
- `noise`: what the shuffler adds itself, where the servers add the noise; see `dummies`;
- `sum 0`, `sum 1`, ...: sums of slices with the ids of their reports, so that no report is added twice, in whatever
  order the store hands them out and whichever process goes on.

One vector at a time is in memory, and the running sum.
"""

from __future__ import annotations

import hmac
import itertools
import secrets

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shufflerl.errors import ContractError, StorageError
from shufflerl.network import faults
from shufflerl.network.protocol import masking, wire
from shufflerl.network.protocol.agreement import Agreement
from shufflerl.network.protocol.wire import ProblemError, Reason
from shufflerl.network.shuffler import dummies, mixing
from shufflerl.network.stores.store import BatchId, BatchRow, Store

#: Reports per slice whose sum is kept: a crash costs the work of one slice.
SLICE = 256

_ID = wire.REPORT_ID_BYTES
_ROW = _ID + wire.SEALED_SEED_BYTES


def released(store: Store, batch: BatchRow, agreement: Agreement, key: X25519PrivateKey) -> list[bytes] | None:
    """Bring a sealed batch on; the chunks of its release, or None while the coordinator has yet to say what to exclude.

    No chunks where it would exclude more than was announced: what the others' noise is worth was computed without
    those, and nothing is summed.
    """
    id = batch.id
    _offer(store, id, agreement, key)
    kept = store.kept(id, "exclusion")
    if kept is None:
        return None
    positions: list[int] = msgspec.msgpack.decode(kept)
    if len(positions) > agreement.announcement.excludable:
        return []
    excluded = _reports_at(store, id, positions)
    total = None
    while total is None:
        total = _summed(store, id, agreement, key, excluded)
    faults.reached("sum")
    data = (total + dummies.added(store, id, agreement)).tobytes()
    return [data[start : start + wire.CHUNK_BYTES] for start in range(0, len(data), wire.CHUNK_BYTES)]


def _offer(store: Store, id: BatchId, agreement: Agreement, key: X25519PrivateKey) -> None:
    """Keep the sealed seeds in the order of a random key, each after its report's id."""
    users = agreement.batch.users
    if _offered(store, id, users):
        return
    order = store.keep(id, "order", secrets.token_bytes(32))
    faults.reached("order")
    rows = []
    for report, envelope in store.reports(id):
        sealed = mixing.opened(agreement, key, report, envelope)[1][: wire.SEALED_SEED_BYTES]
        rows.append((hmac.digest(order, report, "sha256"), report + sealed.tobytes()))
    if len(rows) != users:
        raise _damaged(id, users, len(rows))
    rows.sort()
    for number, start in enumerate(range(0, users, wire.CHUNK_SEEDS)):
        store.keep(id, f"seeds {number}", b"".join(row for _, row in rows[start : start + wire.CHUNK_SEEDS]))
        faults.reached("seeds")


def _offered(store: Store, id: BatchId, users: int) -> bool:
    return store.kept(id, f"seeds {(users - 1) // wire.CHUNK_SEEDS}") is not None


def seeds(store: Store, id: BatchId, chunk: int) -> bytes | None:
    """A chunk of the sealed seeds, without anything that tells whose they are."""
    kept = store.kept(id, f"seeds {chunk}")
    if kept is None:
        return None
    return np.frombuffer(kept, dtype=np.uint8).reshape(-1, _ROW)[:, _ID:].tobytes()


def exclude(store: Store, id: BatchId, users: int, positions: list[int]) -> None:
    """Note which seeds the coordinator cannot open. Said again it changes nothing; anything else is refused."""
    if positions != sorted(set(positions)) or (positions and positions[-1] >= users):
        raise ProblemError(Reason.malformed, f"The positions are not increasing numbers below {users}.")
    if not _offered(store, id, users):
        raise ProblemError(Reason.not_released, f"The seeds of batch {id.number} have not been handed over yet.")
    encoded = msgspec.msgpack.encode(positions)
    if store.keep(id, "exclusion", encoded) != encoded:
        raise ProblemError(
            Reason.conflict,
            f"What batch {id.number} excludes was said before, and otherwise; the first stands, as two sums of "
            "different reports would give users away.",
        )
    faults.reached("exclude")


def _reports_at(store: Store, id: BatchId, positions: list[int]) -> set[bytes]:
    reports: set[bytes] = set()
    for chunk, some in itertools.groupby(positions, lambda position: position // wire.CHUNK_SEEDS):
        kept = store.kept(id, f"seeds {chunk}")
        if kept is None:
            raise ContractError(f"The seeds of batch {id.number} are gone; only a sealed batch has them.")
        starts = (_ROW * (position % wire.CHUNK_SEEDS) for position in some)
        reports.update(kept[start : start + _ID] for start in starts)
    return reports


def _summed(
    store: Store, id: BatchId, agreement: Agreement, key: X25519PrivateKey, excluded: set[bytes]
) -> masking.Words | None:
    """The sum of all vectors but the excluded; None if another process kept a slice first, whose sum then counts."""
    counters, size = agreement.query.size, agreement.word_bytes
    total, done, number = masking.zeros(counters, size), set(excluded), 0
    while (part := store.kept(id, f"sum {number}")) is not None:
        reports, vector = part[: -counters * size], part[-counters * size :]
        done.update(reports[start : start + _ID] for start in range(0, len(reports), _ID))
        total += masking.words(vector, size)
        number += 1
    some, ids = masking.zeros(counters, size), list[bytes]()
    for report, envelope in store.reports(id):
        if report in done:
            continue
        add(some, agreement, key, report, envelope)
        ids.append(report)
        if len(ids) == SLICE:
            ours = b"".join([*ids, some.tobytes()])
            if store.keep(id, f"sum {number}", ours) != ours:
                return None
            faults.reached("slice")
            total += some
            some[:] = 0
            done.update(ids)
            ids, number = [], number + 1
    done.update(ids)
    if len(done) != agreement.batch.users:
        raise _damaged(id, agreement.batch.users, len(done))
    return total + some


def add(total: masking.Words, agreement: Agreement, key: X25519PrivateKey, report: bytes, envelope: bytes) -> None:
    """Open an envelope and add the masked vector in it."""
    _, body = mixing.opened(agreement, key, report, envelope)
    total += masking.words(body[wire.SEALED_SEED_BYTES :], agreement.word_bytes)


def _damaged(id: BatchId, users: int, stored: int) -> StorageError:
    return StorageError(
        f"Batch {id.number} was sealed with {users} reports, but {stored} are stored; it is damaged and is never "
        "released short. Begin another run with other users."
    )
