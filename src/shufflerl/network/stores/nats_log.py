"""The log of a batch on NATS, whose order decides who is in the batch.

Front ends append records of many reports each. The first record that names an id counts, the one that brings the batch
to n different ids seals it, and what comes after that, or after a record that closes the log, is late. All who read the
log come to the same verdicts, so none decides alone; and a record that is sent twice, because its acknowledgement was
lost, changes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from shufflerl.errors import StorageError
from shufflerl.network import faults
from shufflerl.network.protocol.wire import REPORT_ID_BYTES, Reason, State
from shufflerl.network.stores.broker import Broker, Follower, GoneError, Headers, Stored

#: Reports in one record: their ids go into its headers, of which a server takes 64 KB.
MAX_REPORTS = 1_000
_IDS, _CLOSED, _RECORD = "Shufflerl-Ids", "Shufflerl-Closed", "Shufflerl-Record"
_DIGEST_BYTES = 8
_PAIR_BYTES = REPORT_ID_BYTES + _DIGEST_BYTES
Verdicts = list[Reason | None]


class Log:
    """A batch of `users` reports in a stream, until its batch is `over` and the stream deleted."""

    def __init__(self, broker: Broker, stream: str, users: int, over: Callable[[], bool]) -> None:
        self.users = users
        self.closed = False
        self.members: dict[bytes, bytes] = {}
        self._broker, self._stream, self._over = broker, stream, over
        self._records: list[tuple[int, list[int]]] = []
        self._verdicts: dict[str, asyncio.Future[Verdicts]] = {}
        self._follower = Follower(broker, stream, self._apply, headers_only=True)

    async def begin(self) -> None:
        """Read the log to its end; it is followed from then on. `GoneError` if its batch is over."""
        try:
            last = await self._broker.last(self._stream, self._over)
            await self._follower.until(lambda: self._follower.seen >= last or self._over())
            if self._follower.seen < last:
                raise GoneError("The batch is over.")
        except StorageError:
            self.stop()
            raise

    def stop(self) -> None:
        """Follow it no more."""
        self._follower.stop()

    @property
    def state(self) -> State:
        """Whether membership is frozen."""
        return State.sealed if len(self.members) == self.users else State.open

    @property
    def final(self) -> bool:
        """Whether membership can never change, by a seal or because the log is closed."""
        return self.closed or self.state == State.sealed

    def verdict(self, report: bytes, digest: bytes) -> Reason | None:
        """The verdict on a report at the end of the log as it is."""
        there = self.members.get(report)
        if there is not None:
            return Reason.duplicate if there == digest else Reason.replayed
        return Reason.late if self.final else None

    async def _apply(self, record: Stored, subject: str) -> None:
        if subject != f"{self._stream}.log":
            return
        pairs = base64.b64decode(record.headers.get(_IDS, ""))
        verdicts: Verdicts = []
        taken = []
        for place, start in enumerate(range(0, len(pairs), _PAIR_BYTES)):
            pair = pairs[start : start + _PAIR_BYTES]
            report, digest = pair[:REPORT_ID_BYTES], pair[REPORT_ID_BYTES:]
            verdicts.append(self.verdict(report, digest))
            if verdicts[-1] is None:
                self.members[report] = digest
                taken.append(place)
        if taken:
            self._records.append((record.sequence, taken))
        if _CLOSED in record.headers and self.state == State.open:
            self.closed = True
        waiting = self._verdicts.get(record.headers.get(_RECORD, ""))
        if waiting is not None and not waiting.done():  # the same record again says nothing new
            waiting.set_result(verdicts)

    async def close(self) -> None:
        """Take no more reports, unless the batch is sealed."""
        if not self.final:
            await self._append({_CLOSED: "1"}, b"")

    async def add(self, reports: Sequence[tuple[bytes, bytes]]) -> Verdicts:
        """Append reports; the verdict on each is what the log says once it is in."""
        verdicts: Verdicts = []
        for record in self._split(reports):
            pairs = [(report, _digest(envelope)) for report, envelope in record]
            known = [self.verdict(*pair) for pair in pairs]
            new = [place for place, verdict in enumerate(known) if verdict is None]
            if new:
                before = self.state
                ids = b"".join(b"".join(pairs[place]) for place in new)
                body = msgspec.msgpack.encode([record[place][1] for place in new])
                found = await self._append({_IDS: base64.b64encode(ids).decode()}, body)
                for place, verdict in zip(new, found, strict=True):
                    known[place] = verdict
                if self.state != before:
                    faults.reached("seal")
            verdicts += known
        faults.reached("ingest")
        return verdicts

    def _split(self, reports: Sequence[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Records that fit into a message each; a report that does not is alone in its record."""
        record: list[tuple[bytes, bytes]] = []
        size = 0
        for report in reports:
            length = len(report[1]) + 8
            if record and (len(record) == MAX_REPORTS or size + length > self._broker.largest):
                yield record
                record, size = [], 0
            record.append(report)
            size += length
        if record:
            yield record

    async def _append(self, headers: Headers, body: bytes) -> Verdicts:
        """Append a record, and wait until it is seen in the log. `GoneError` if the batch is over first."""
        name = secrets.token_hex(8)
        waiting: asyncio.Future[Verdicts] = asyncio.get_running_loop().create_future()
        self._verdicts[name] = waiting
        try:
            await self._broker.put(f"{self._stream}.log", body, headers | {_RECORD: name}, over=self._over)
            await self._follower.until(lambda: waiting.done() or self._over())
            if not waiting.done():
                raise GoneError("The batch is over.")
            return waiting.result()
        finally:
            del self._verdicts[name]

    def read(self, first: int, count: int | None) -> Iterator[tuple[bytes, bytes]]:
        """Reports in the log's order, from another thread; an end before all are there if the batch is over."""
        left = len(self.members) - first if count is None else min(count, len(self.members) - first)
        ids = islice(list(self.members), first, None)
        for sequence, taken in list(self._records):
            places, first = taken[first:], max(0, first - len(taken))
            if not places or left <= 0:
                continue
            try:
                record = self._broker.run(self._broker.get(self._stream, sequence=sequence, over=self._over))
            except GoneError:
                return
            if record is None:
                return
            envelopes = msgspec.msgpack.decode(record.value, type=list[bytes])
            for place in places[:left]:
                yield next(ids), envelopes[place]
            left -= len(places)


def _digest(envelope: bytes) -> bytes:
    """Enough to tell bytes that were sent again from others."""
    return hashlib.blake2b(envelope, digest_size=_DIGEST_BYTES).digest()
