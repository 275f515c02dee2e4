"""Opening and counting sealed tags and seeds, on as many cores as there are. Imports little: its workers start fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shufflerl.errors import LostWorkersError
from shufflerl.network import workers
from shufflerl.network.protocol import crypto, masking, wire

Result = TypeVar("Result")


class Counted(NamedTuple):
    """How often each counter was named, how many tags only filled up reports, and how many were left out."""

    counts: NDArray[np.int64]
    padding: int
    invalid: int


def count(key: bytes, info: bytes, group: range, chunk: bytes) -> Counted:
    """Open sealed tags of a group and count them, from its first counter on.

    What cannot be opened, or names no counter of this group, is left out: whoever sent it could else be counted twice
    in another.
    """
    private = crypto.box_key(key)
    length, found, padding, invalid = wire.SEALED_TAG_BYTES, [], 0, 0
    for start in range(0, len(chunk), length):
        try:
            tag = int.from_bytes(crypto.unseal(private, info, chunk[start : start + length]))
        except crypto.UnsealError:
            invalid += 1
            continue
        if tag in group:
            found.append(tag - group.start)
        elif tag == wire.PADDING:
            padding += 1
        else:
            invalid += 1
    return Counted(np.bincount(np.array(found, dtype=np.int64), minlength=len(group)), padding, invalid)


def open_seeds(key: bytes, info: bytes, chunk: bytes) -> list[bytes | None]:
    """The seeds of a chunk in their order; None for each that cannot be opened."""
    private = crypto.box_key(key)
    seeds: list[bytes | None] = []
    for start in range(0, len(chunk), wire.SEALED_SEED_BYTES):
        try:
            seeds.append(crypto.unseal(private, info, chunk[start : start + wire.SEALED_SEED_BYTES]))
        except crypto.UnsealError:
            seeds.append(None)
    return seeds


class Opener:
    """Opens chunks in this process, or in `workers` others if more than one."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def count_all(self, key: bytes, info: bytes, groups: Sequence[range], tags: Sequence[Sequence[bytes]]) -> Counted:
        """The counts of all sealed tags of each group together.

        Of a tag that is there twice one is left out: whoever hands tags over could else count one user's again and
        again, beyond any noise.
        """
        calls: list[tuple[bytes, bytes, range, bytes]] = []
        repeated = 0
        for group, given in zip(groups, tags, strict=True):
            rows = np.frombuffer(b"".join(given), dtype=f"V{wire.SEALED_TAG_BYTES}")
            once = np.unique(rows)
            repeated += len(rows) - len(once)
            calls += [(key, info, group, part) for part in _split(once.tobytes(), wire.SEALED_TAG_BYTES)]
        total, padding, invalid = np.zeros(groups[-1].stop, dtype=np.int64), 0, repeated
        for (_, _, group, _), result in zip(calls, self.starmap(count, calls), strict=True):
            total[group.start : group.stop] += result.counts
            padding, invalid = padding + result.padding, invalid + result.invalid
        return Counted(total, padding, invalid)

    def seeds(self, key: bytes, info: bytes, chunks: Iterable[bytes]) -> list[bytes | None]:
        """The seeds of all chunks in their order; None for each that cannot be opened, or was there before.

        Whoever hands seeds over could else have one user's vector added and unmasked again and again, as with tags.
        """
        parts = [part for chunk in chunks for part in _split(chunk, wire.SEALED_SEED_BYTES)]
        opened = [seed for some in self.starmap(open_seeds, [(key, info, part) for part in parts]) for seed in some]
        first = {seed: place for place, seed in reversed(list(enumerate(opened)))}
        return [seed if first[seed] == place else None for place, seed in enumerate(opened)]

    def masks(self, seeds: list[bytes], counters: int, size: int) -> masking.Words:
        """The masks of all seeds together."""
        share = -(-len(seeds) // self.workers)
        parts = [seeds[start : start + share] for start in range(0, len(seeds), share)]
        total = masking.zeros(counters, size)
        for some in self.starmap(masking.sum_of_masks, [(part, counters, size) for part in parts]):
            total += some
        return total

    def starmap(self, function: Callable[..., Result], calls: Sequence[tuple[object, ...]]) -> list[Result]:
        """What a function gives for each call, by all workers; one that has died is replaced at the next."""
        if self.workers == 1 or len(calls) < 2:
            return [function(*call) for call in calls]
        if self._pool is None:
            self._pool = workers.pool(self.workers)
        try:
            jobs = [self._pool.submit(function, *call) for call in calls]
            return [job.result() for job in jobs]
        except BrokenExecutor:
            self._pool = None  # who tries again gets another
            raise LostWorkersError("A process that opens messages has died; was there too little memory?") from None

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _split(chunk: bytes, size: int) -> list[bytes]:
    step = 2048 * size
    return [chunk[start : start + step] for start in range(0, len(chunk), step)]
