"""The shuffler's store on NATS JetStream: many front ends share it, and any of them may die at any time.

Every attempt at a batch has a stream of its own with its key, its reports and its partial results; deleting the stream
deletes all of them. Reports are appended to a log in it, many to a message. The order of that log decides everything,
and is the same for all who read it: the first record that names an id counts, the one that brings the batch to n
different ids seals it, and what comes after that, or after a record that closes the log, is late. So no front end needs
to be asked, none decides alone, and a record that is sent twice because its acknowledgement was lost changes nothing.

A row says which streams a batch has, and changes by compare-and-set: the first release stands. Ids of a finished batch
are stored, sorted, before its row says so, and so before the run's next batch can be announced.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from shufflerl.errors import ContractError, StorageError
from shufflerl.network import faults, http
from shufflerl.network.broker import Broker, ConflictError, Follower, GoneError, Headers, Stored
from shufflerl.network.store import BatchId, BatchRow, Store
from shufflerl.network.wire import REPORT_ID_BYTES, Reason, State

#: Reports in one record: their ids go into its headers, of which a server takes 64 KB.
MOST_REPORTS = 1_000
#: Seconds for which what is known of rows is fresh enough to be asked about.
FRESH = 0.5
#: Seconds after which a stream that no row names was left behind by a process that died.
ABANDONED = 600.0
_IDS, _CLOSED, _RECORD = "Shufflerl-Ids", "Shufflerl-Closed", "Shufflerl-Record"
_DIGEST_BYTES = 8
_PAIR = REPORT_ID_BYTES + _DIGEST_BYTES
Verdicts = list[Reason | None]


class _Row(msgspec.Struct, frozen=True):
    """A batch as it is stored. `state` is open until it is released or aborted: the log says whether it is sealed."""

    users: int
    deadline: float
    reports: str
    state: State = State.open
    accepted: int = 0
    chunks: int = 0
    extensions: int = 0
    release: str = ""

    @property
    def over(self) -> bool:
        """Whether its reports are deleted."""
        return self.state != State.open


class _Log:
    """Who is in a batch, as its log says: folded from the records in their order."""

    def __init__(self, users: int) -> None:
        self.users = users
        self.members: dict[bytes, bytes] = {}
        self.records: list[tuple[int, list[int]]] = []
        self.closed = False
        self.verdicts: dict[str, asyncio.Future[Verdicts]] = {}

    @property
    def full(self) -> bool:
        """Whether the batch is sealed."""
        return len(self.members) == self.users

    def verdict(self, report: bytes, digest: bytes) -> Reason | None:
        """What a report would be told at the end of the log as it is."""
        there = self.members.get(report)
        if there is not None:
            return Reason.duplicate if there == digest else Reason.replayed
        return Reason.late if self.full or self.closed else None

    async def apply(self, record: Stored, _: str) -> None:
        """Take the next record."""
        pairs = base64.b64decode(record.headers.get(_IDS, ""))
        verdicts: Verdicts = []
        for start in range(0, len(pairs), _PAIR):
            report, digest = pairs[start : start + REPORT_ID_BYTES], pairs[start + REPORT_ID_BYTES : start + _PAIR]
            verdict = self.verdict(report, digest)
            if verdict is None:
                self.members[report] = digest
            verdicts.append(verdict)
        taken = [place for place, verdict in enumerate(verdicts) if verdict is None]
        if taken:
            self.records.append((record.sequence, taken))
        if _CLOSED in record.headers and not self.full:
            self.closed = True
        waiting = self.verdicts.get(record.headers.get(_RECORD, ""))
        if waiting is not None and not waiting.done():  # the same record again says nothing new
            waiting.set_result(verdicts)


class NatsStore(Store):
    """Servers as in nats://a:4222,nats://b:4222. Not to be used by two threads at once."""

    def __init__(
        self, servers: str, *, credentials: Path | None = None, authority: Path | None = None, name: str = "shufflerl"
    ) -> None:
        self._name = name
        self._rows: dict[BatchId, tuple[int, _Row]] = {}
        self._said: dict[BatchId, tuple[bytes, bytes]] = {}
        self._logs: dict[BatchId, tuple[_Log, Follower]] = {}
        self._spent: dict[bytes, tuple[set[BatchId], set[bytes]]] = {}
        self._fresh_at = 0.0
        self._broker = Broker(servers, credentials, authority)
        self._broker.run(self._begin())

    async def _begin(self) -> None:
        for stream in ("rows", "spent"):
            while True:
                try:
                    await self._broker.make(f"{self._name}-{stream}", newest_only=True)
                    break
                except StorageError as reason:
                    http.event("waits for the message broker", detail=str(reason))
        stream = f"{self._name}-rows"
        self._follower = Follower(self._broker, stream, f"{stream}.>", self._apply_row)
        await self._refresh()

    # Rows: followed by every front end, changed by compare-and-set.

    async def _apply_row(self, message: Stored, subject: str) -> None:
        _, kind, *rest = subject.split(".")
        if kind != "row":
            return
        task, number, attempt = rest
        await self._learn(
            BatchId(bytes.fromhex(task), int(number), int(attempt)),
            message.sequence,
            msgspec.msgpack.decode(message.value, type=_Row),
        )

    async def _learn(self, id: BatchId, sequence: int, row: _Row) -> None:
        if id not in self._said:
            said = await self._broker.get(f"{self._name}-rows", subject=f"{self._name}-rows.said.{row.reports}")
            if said is None:
                raise StorageError(f"The announcement of batch {id.number} is missing from the message broker.")
            self._said[id] = msgspec.msgpack.decode(said.value, type=tuple[bytes, bytes])
        if id in self._rows and self._rows[id][0] >= sequence:
            return
        self._rows[id] = sequence, row
        if row.over and id in self._logs:
            self._logs.pop(id)[1].stop()
        if row.over and self._follower.ready:  # whoever finished it may have died since
            self._broker.spawn(self._clean(row))

    async def _clean(self, row: _Row) -> None:
        """Delete the streams that a finished batch needs no more; `erase` finds those for which this fails."""
        for stream in _needless(row):
            try:
                await self._broker.drop(stream)
            except StorageError:
                return

    async def _refresh(self) -> None:
        """Know every row that is stored by now."""
        last = await self._broker.last(f"{self._name}-rows")
        await self._follower.until(lambda: self._follower.seen >= last)
        self._fresh_at = time.monotonic()

    async def _row(self, id: BatchId) -> _Row | None:
        if id not in self._rows:
            await self._refresh()  # another front end may just have stored it
        return self._rows[id][1] if id in self._rows else None

    async def _known(self, id: BatchId) -> _Row:
        row = await self._row(id)
        if row is None:
            raise ContractError(f"There is no batch {id.number}, attempt {id.attempt}, of this run.")
        return row

    def _over(self, id: BatchId) -> Callable[[], bool]:
        return lambda: id in self._rows and self._rows[id][1].over

    async def _change(self, id: BatchId, change: Callable[[_Row], _Row | None]) -> _Row:
        """Change a row as it is now, unless `change` says that there is nothing to do; the row as it then is."""
        while True:
            sequence, row = self._rows[id]
            new = change(row)
            if new is None:
                return row
            try:
                sequence = await self._broker.put(self._row_subject(id), msgspec.msgpack.encode(new), after=sequence)
            except ConflictError:
                await self._refresh()
            else:
                await self._learn(id, sequence, new)
                return new

    def _row_subject(self, id: BatchId) -> str:
        return f"{self._name}-rows.row.{_text(id)}"

    async def _shown(self, id: BatchId, row: _Row) -> BatchRow:
        accepted, state = row.accepted, row.state
        if not row.over and (log := await self._log(id, row)) is not None:
            accepted, state = len(log.members), State.sealed if log.full else State.open
        return self._show(id, row, state, accepted)

    def _show(self, id: BatchId, row: _Row, state: State, accepted: int) -> BatchRow:
        announcement, opening = self._said[id]
        counts = (accepted, row.chunks, row.extensions)
        return BatchRow(id, row.users, announcement, opening, row.deadline, state, *counts)

    # Logs: followed by every front end that is asked about the batch.

    async def _log(self, id: BatchId, row: _Row) -> _Log | None:
        """The log of a batch, read to its end at the first look and followed from then on; None once it is over."""
        if id not in self._logs:
            log = _Log(row.users)
            follower = Follower(self._broker, row.reports, f"{row.reports}.log", log.apply, headers_only=True)
            try:
                await follower.until(lambda: follower.ready or self._over(id)())
            except StorageError:
                follower.stop()
                raise
            if self._over(id)():
                follower.stop()
                return None
            self._logs[id] = log, follower
        return self._logs[id][0]

    async def _append(self, id: BatchId, row: _Row, log: _Log, headers: Headers, body: bytes) -> Verdicts:
        """Append a record and wait until it is seen in the log: what its reports are told is what the log then says."""
        name = secrets.token_hex(8)
        waiting: asyncio.Future[Verdicts] = asyncio.get_running_loop().create_future()
        log.verdicts[name] = waiting
        try:
            await self._broker.put(f"{row.reports}.log", body, headers | {_RECORD: name}, over=self._over(id))
            follower = self._logs[id][1] if id in self._logs else None
            if follower is None:
                raise GoneError("The batch is over.")
            await follower.until(lambda: waiting.done() or self._over(id)())
            if not waiting.done():
                raise GoneError("The batch is over.")
            return waiting.result()
        finally:
            del log.verdicts[name]

    async def _add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> Verdicts:
        row = await self._known(id)
        verdicts: Verdicts = [Reason.late] * len(reports)
        spent = await self._spent_ids(id.task)
        left = []
        for place, (report, _) in enumerate(reports):
            if report in spent:
                verdicts[place] = Reason.replayed
            else:
                left.append(place)
        log = None if row.over else await self._log(id, row)
        if log is None:
            return verdicts
        for places in self._records(left, reports):
            pairs = {place: (reports[place][0], _digest(reports[place][1])) for place in places}
            new = []
            for place, pair in pairs.items():
                verdicts[place] = log.verdict(*pair)
                if verdicts[place] is None:
                    new.append(place)
            if not new:
                continue
            headers = {_IDS: base64.b64encode(b"".join(b"".join(pairs[place]) for place in new)).decode()}
            body = msgspec.msgpack.encode([reports[place][1] for place in new])
            before = log.full
            for place, verdict in zip(new, await self._append(id, row, log, headers, body), strict=True):
                verdicts[place] = verdict
            if log.full and not before:
                faults.reached("seal")
        faults.reached("ingest")
        return verdicts

    def _records(self, places: list[int], reports: Sequence[tuple[bytes, bytes]]) -> Iterator[list[int]]:
        """Split reports so that each record is one message, if its reports allow."""
        record: list[int] = []
        size = 0
        for place in places:
            length = len(reports[place][1]) + 8
            if record and (len(record) == MOST_REPORTS or size + length > self._broker.largest):
                yield record
                record, size = [], 0
            record.append(place)
            size += length
        if record:
            yield record

    # Ids of finished batches.

    async def _spend(self, id: BatchId, log: _Log) -> None:
        """Store a finished batch's ids, sorted: who came when is not to be seen in them. Always the same bytes."""
        await self._broker.put(f"{self._name}-spent.{_text(id)}", b"".join(sorted(log.members)))

    async def _spent_ids(self, task: bytes) -> set[bytes]:
        batches, ids = self._spent.setdefault(task, (set(), set()))
        for id, (_, row) in list(self._rows.items()):
            if id.task == task and row.over and id not in batches:
                stream = f"{self._name}-spent"
                stored = await self._broker.get(stream, subject=f"{stream}.{_text(id)}")
                if stored is None:
                    raise StorageError(f"The ids of batch {id.number} are missing from the message broker.")
                size = REPORT_ID_BYTES
                ids.update(stored.value[start : start + size] for start in range(0, len(stored.value), size))
                batches.add(id)
        return ids

    # The contract.

    def create(self, row: BatchRow, key: bytes) -> BatchRow:
        """See `Store`."""
        return self._broker.run(self._create(row, key))

    async def _create(self, row: BatchRow, key: bytes) -> BatchRow:
        stream = self._new_stream()
        if await self._row(row.id) is None:
            await self._broker.make(stream)
            await self._broker.put(f"{stream}.key", key)
            said = msgspec.msgpack.encode((row.announcement, row.opening))
            await self._broker.put(f"{self._name}-rows.said.{stream}", said)
            new = _Row(row.users, row.deadline, stream)
            try:
                sequence = await self._broker.put(self._row_subject(row.id), msgspec.msgpack.encode(new), after=0)
                await self._learn(row.id, sequence, new)
            except ConflictError:  # another front end was faster, or our own acknowledgement was lost
                await self._refresh()
        there = await self._known(row.id)
        if there.reports != stream:
            await self._broker.drop(stream)
        return await self._shown(row.id, there)

    def _new_stream(self) -> str:
        return f"{self._name}-batch-{secrets.token_hex(12)}"

    def get(self, id: BatchId) -> BatchRow | None:
        """See `Store`."""
        followed = self._logs.get(id)
        if followed is None:
            return self._broker.run(self._get(id))
        (log, _), (_, row) = followed, self._rows[id]  # asked about every report: nothing is waited for
        return self._show(id, row, State.sealed if log.full else State.open, len(log.members))

    async def _get(self, id: BatchId) -> BatchRow | None:
        row = await self._row(id)
        return None if row is None else await self._shown(id, row)

    def latest(self, task: bytes) -> BatchRow | None:
        """See `Store`."""
        return self._broker.run(self._latest(task))

    async def _latest(self, task: bytes) -> BatchRow | None:
        await self._refresh()
        ids = [id for id in self._rows if id.task == task]
        return await self._get(max(ids, key=lambda id: (id.number, id.attempt))) if ids else None

    def unfinished(self) -> list[BatchRow]:
        """See `Store`."""
        return self._broker.run(self._unfinished())

    async def _unfinished(self) -> list[BatchRow]:
        if time.monotonic() > self._fresh_at + FRESH:
            await self._refresh()
        found = [await self._shown(id, row) for id, (_, row) in list(self._rows.items()) if not row.over]
        return [row for row in found if row.state in (State.open, State.sealed)]

    def key(self, id: BatchId) -> bytes | None:
        """See `Store`."""
        return self._broker.run(self._value(id, "key"))

    async def _value(self, id: BatchId, name: str) -> bytes | None:
        """What is stored of a batch that is not over."""
        row = await self._row(id)
        if row is None or row.over:
            return None
        try:
            stored = await self._broker.get(row.reports, subject=f"{row.reports}.{name}", over=self._over(id))
        except GoneError:
            return None
        return None if stored is None else stored.value

    def add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> Verdicts:
        """See `Store`."""
        while True:
            try:
                return self._broker.run(self._add(id, reports))
            except GoneError:
                continue  # it was released or aborted meanwhile, and its ids are known

    def reports(self, id: BatchId, first: int = 0, most: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """See `Store`."""
        log = self._broker.run(self._members(id))
        if log is None:
            return
        ids = islice(log.members, first, None)
        left = len(log.members) - first if most is None else min(most, len(log.members) - first)
        for sequence, taken in list(log.records):
            if first >= len(taken):
                first -= len(taken)
                continue
            if left <= 0:
                return
            row = self._rows[id][1]
            try:
                record = self._broker.run(self._broker.get(row.reports, sequence=sequence, over=self._over(id)))
            except GoneError:
                return
            envelopes = [] if record is None else msgspec.msgpack.decode(record.value, type=list[bytes])
            for place in taken[first : first + left]:
                yield next(ids), envelopes[place]
            left -= len(taken) - first
            first = 0

    async def _members(self, id: BatchId) -> _Log | None:
        row = await self._row(id)
        return None if row is None or row.over else await self._log(id, row)

    def keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        """See `Store`."""
        return self._broker.run(self._keep(id, name, value))

    async def _keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        row = await self._sealed(id, "has partial results")
        subject = f"{row.reports}.part.{name.encode().hex()}"
        try:
            await self._broker.put(subject, value, after=0, over=self._over(id))
            return value
        except ConflictError:
            there = await self._broker.get(row.reports, subject=subject, over=self._over(id))
            assert there is not None
            return there.value
        except GoneError:
            await self._sealed(id, "has partial results")
            raise

    async def _sealed(self, id: BatchId, what: str) -> _Row:
        row = await self._known(id)
        state = (await self._shown(id, row)).state
        if state != State.sealed:
            raise ContractError(f"Batch {id.number} is {state}; only a sealed batch {what}.")
        return row

    def kept(self, id: BatchId, name: str) -> bytes | None:
        """See `Store`."""
        return self._broker.run(self._value(id, f"part.{name.encode().hex()}"))

    def release(self, id: BatchId, chunks: Iterable[bytes]) -> None:
        """See `Store`."""
        row = self._broker.run(self._known(id))
        if row.state in (State.released, State.scrubbed):
            return
        self._broker.run(self._sealed(id, "is released"))
        stream, count = self._new_stream(), 0
        self._broker.run(self._broker.make(stream))
        for chunk in chunks:
            self._broker.run(self._broker.put(f"{stream}.{count}", chunk))
            count += 1
        faults.reached("release")
        self._broker.run(self._released(id, stream, count))

    async def _released(self, id: BatchId, stream: str, chunks: int) -> None:
        log = await self._members(id)
        if log is not None:
            await self._spend(id, log)
        row = await self._change(
            id,
            lambda row: (
                None
                if row.over
                else msgspec.structs.replace(
                    row, state=State.released, accepted=row.users, chunks=chunks, release=stream
                )
            ),
        )
        faults.reached("released")
        if row.release != stream:
            await self._broker.drop(stream)
        await self._broker.drop(row.reports)

    def chunk(self, id: BatchId, number: int) -> bytes | None:
        """See `Store`."""
        return self._broker.run(self._chunk(id, number))

    async def _chunk(self, id: BatchId, number: int) -> bytes | None:
        row = await self._known(id)
        if row.state != State.released or number >= row.chunks:
            return None
        stored = await self._broker.get(row.release, subject=f"{row.release}.{number}")
        return None if stored is None else stored.value

    def scrub(self, id: BatchId) -> None:
        """See `Store`."""
        self._broker.run(self._scrub(id))

    async def _scrub(self, id: BatchId) -> None:
        row = await self._known(id)
        if row.state not in (State.released, State.scrubbed):
            state = (await self._shown(id, row)).state
            raise ContractError(f"Batch {id.number} is {state}; only a released batch is scrubbed.")
        faults.reached("scrub")
        row = await self._change(
            id,
            lambda row: None if row.state == State.scrubbed else msgspec.structs.replace(row, state=State.scrubbed),
        )
        faults.reached("scrubbed")
        for stream in _needless(row):
            await self._broker.drop(stream)

    def abort(self, id: BatchId) -> None:
        """See `Store`."""
        self._broker.run(self._abort(id))

    async def _abort(self, id: BatchId) -> None:
        row = await self._known(id)
        log = None if row.over else await self._log(id, row)
        if log is not None:
            if not log.full and not log.closed:
                await self._append(id, row, log, {_CLOSED: "1"}, b"")
            if log.full:
                return
            await self._spend(id, log)
            accepted = len(log.members)
            row = await self._change(
                id,
                lambda row: None if row.over else msgspec.structs.replace(row, state=State.aborted, accepted=accepted),
            )
        for stream in _needless(row):
            await self._broker.drop(stream)

    def extend(self, id: BatchId, deadline: float) -> None:
        """See `Store`."""
        self._broker.run(self._extend(id, deadline))

    async def _extend(self, id: BatchId, deadline: float) -> None:
        row = await self._known(id)
        log = None if row.over else await self._log(id, row)
        if log is None or log.full:
            return
        if log.closed:  # whoever aborted it died before it was done
            await self._abort(id)
            return
        before = row.deadline
        await self._change(
            id,
            lambda row: (
                None
                if row.over or row.deadline != before  # another front end gave it time
                else msgspec.structs.replace(row, deadline=deadline, extensions=row.extensions + 1)
            ),
        )

    def erase(self) -> None:
        """See `Store`."""
        self._broker.run(self._sweep())

    async def _sweep(self) -> None:
        """Delete what processes that died have left behind."""
        await self._refresh()
        rows = [row for _, row in self._rows.values()]
        needless = {stream for row in rows for stream in _needless(row)}
        needed = {stream for row in rows for stream in (row.reports, row.release)} - needless
        for stream, made in (await self._broker.streams(f"{self._name}-batch-")).items():
            if stream in needless or (stream not in needed and made < time.time() - ABANDONED):
                await self._broker.drop(stream)

    def close(self) -> None:
        """See `Store`."""
        self._broker.close()


def _needless(row: _Row) -> list[str]:
    """Streams of a batch that must not be there any more."""
    streams = [row.reports] if row.over else []
    return [*streams, row.release] if row.state == State.scrubbed else streams


def _text(id: BatchId) -> str:
    return f"{id.task.hex()}.{id.number}.{id.attempt}"


def _digest(envelope: bytes) -> bytes:
    return hashlib.blake2b(envelope, digest_size=_DIGEST_BYTES).digest()
