"""Opening and counting sealed tags, on as many cores as there are. Imports little: its workers start fast."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.network import crypto, wire, workers


class Counted(NamedTuple):
    """How often each counter was named, and how many tags were no tags."""

    counts: NDArray[np.int64]
    invalid: int


def count(key: bytes, info: bytes, size: int, chunk: bytes) -> Counted:
    """Open the tags of a chunk and count them; what cannot be opened, or names no counter, is left out."""
    private = crypto.box_key(key)
    counts = np.zeros(size, dtype=np.int64)
    length, found, invalid = wire.SEALED_TAG_BYTES, [], 0
    for start in range(0, len(chunk), length):
        try:
            tag = int.from_bytes(crypto.unseal(private, info, chunk[start : start + length]))
        except crypto.UnsealError:
            invalid += 1
            continue
        if tag < size:
            found.append(tag)
        else:
            invalid += 1
    counts += np.bincount(np.array(found, dtype=np.int64), minlength=size)
    return Counted(counts, invalid)


class Opener:
    """Counts chunks in this process, or in `workers` others if more than one."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def count_all(self, key: bytes, info: bytes, size: int, chunks: Iterable[bytes]) -> Counted:
        """The counts of all chunks together."""
        parts = [part for chunk in chunks for part in self._split(chunk)]
        if self.workers > 1 and len(parts) > 1:
            if self._pool is None:
                self._pool = workers.pool(self.workers)
            jobs = [self._pool.submit(count, key, info, size, part) for part in parts]
            results = [job.result() for job in jobs]
        else:
            results = [count(key, info, size, part) for part in parts]
        total = np.zeros(size, dtype=np.int64)
        for result in results:
            total += result.counts
        return Counted(total, sum(result.invalid for result in results))

    def _split(self, chunk: bytes) -> list[bytes]:
        step = 2048 * wire.SEALED_TAG_BYTES
        return [chunk[start : start + step] for start in range(0, len(chunk), step)]

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
