"""The shuffler's store on NATS JetStream: many front ends share it, and any of them may die at any time.

Every attempt at a batch has a stream of its own with its key, its reports (`nats_log`) and its partial results; a
release has another. Deleting a stream deletes all that is in it, from the servers' own logs too. A row (`nats_rows`)
names a batch's streams and changes by compare-and-set: the first release stands.
Streams are called after their batch: once that is over, whatever its row does not name is deleted, whoever made it, and
can never be named any more. The ids of a finished batch are stored before its row says that it is finished, and so
before the run's next batch can be announced.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shufflerl.errors import ContractError, StorageError
from shufflerl.network import faults, logs
from shufflerl.network.protocol.wire import REPORT_ID_BYTES, Reason, State
from shufflerl.network.stores.broker import Broker, ConflictError, GoneError
from shufflerl.network.stores.nats_log import Log, Verdicts
from shufflerl.network.stores.nats_rows import FRESH, Row, Rows, name_of
from shufflerl.network.stores.store import RELEASED, BatchId, BatchRow, Store


class NatsStore(Store):
    """Servers as in nats://a:4222,nats://b:4222. Not to be used by two threads at once."""

    def __init__(
        self, servers: str, *, credentials: Path | None = None, authority: Path | None = None, name: str = "shufflerl"
    ) -> None:
        self._batches, self._spent = f"{name}-batch-", f"{name}-spent"
        self.logs: dict[BatchId, Log] = {}
        self._ids: dict[bytes, tuple[set[BatchId], set[bytes]]] = {}
        self.broker = Broker(servers, credentials, authority)
        self.rows = Rows(self.broker, f"{name}-rows", self._finished)
        self.broker.run(self._begin())

    async def _begin(self) -> None:
        while True:
            try:
                await self.broker.make(self._spent, newest_only=True)
                await self.rows.begin()
                return
            except StorageError as reason:
                logs.event("waits for the message broker", detail=str(reason))

    def create(self, row: BatchRow, key: bytes) -> BatchRow:
        """See `Store`."""
        return self.broker.run(self._create(row, key))

    async def _create(self, row: BatchRow, key: bytes) -> BatchRow:
        there = await self.rows.find(row.id)
        if there is None:
            stream = await self._new_stream(row.id)
            await self.broker.put(f"{stream}.key", key)
            new = Row(row.users, row.deadline, stream)
            await self.rows.create(row.id, new, row.announcement, row.opening)
            there = await self.rows.get(row.id)
            if there.reports != stream:
                await self.broker.drop(stream)
        return await self._shown(row.id, there)

    def _prefix(self, id: BatchId) -> str:
        """How the names of a batch's streams begin; what follows has no `-`."""
        return f"{self._batches}{name_of(id).replace('.', '-')}-"

    async def _new_stream(self, id: BatchId) -> str:
        """Names are never used twice, so that nothing can get into a stream made anew in the place of another."""
        stream = f"{self._prefix(id)}{secrets.token_hex(12)}"
        await self.broker.make(stream)
        return stream

    def get(self, id: BatchId) -> BatchRow | None:
        """See `Store`."""
        log = self.logs.get(id)
        if log is not None:  # asked about every report: nothing is waited for
            return self.rows.shown(id, log.state, len(log.members))
        return self.broker.run(self._get(id))

    async def _get(self, id: BatchId) -> BatchRow | None:
        row = await self.rows.find(id)
        return None if row is None else await self._shown(id, row)

    async def _shown(self, id: BatchId, row: Row) -> BatchRow:
        log = await self._log(id, row)
        if log is None:
            row = self.rows.known(id)
            return self.rows.shown(id, row.state, row.accepted)
        return self.rows.shown(id, log.state, len(log.members))

    async def _log(self, id: BatchId, row: Row) -> Log | None:
        """The log of a batch; None once that is over."""
        if row.over:
            return None
        if id not in self.logs:
            log = Log(self.broker, row.reports, row.users, lambda: self.rows.over(id))
            with contextlib.suppress(GoneError):
                await log.begin()
                if self.rows.over(id):  # `_finished` was told meanwhile, and will not be again
                    log.stop()
                else:
                    self.logs[id] = log
        return self.logs.get(id)

    def latest(self, task: bytes) -> BatchRow | None:
        """See `Store`."""
        return self.broker.run(self._latest(task))

    async def _latest(self, task: bytes) -> BatchRow | None:
        await self.rows.refresh()
        ids = [id for id in self.rows.all() if id.task == task]
        return await self._get(max(ids, key=lambda id: (id.number, id.attempt))) if ids else None

    def unfinished(self) -> list[BatchRow]:
        """See `Store`."""
        return self.broker.run(self._unfinished())

    async def _unfinished(self) -> list[BatchRow]:
        await self.rows.refresh(FRESH)
        found = [await self._shown(id, row) for id, row in self.rows.all().items() if not row.over]
        return [row for row in found if row.state in (State.open, State.sealed)]

    def key(self, id: BatchId) -> bytes | None:
        """See `Store`."""
        return self.broker.run(self._key(id))

    async def _key(self, id: BatchId) -> bytes | None:
        key = await self._value(id, "key")
        row = await self.rows.find(id)
        if key is None and row is not None and not row.over:  # None would say that the batch takes no reports any more
            raise StorageError(f"The key of batch {id.number} is missing from the message broker.")
        return key

    async def _value(self, id: BatchId, name: str) -> bytes | None:
        """What is stored with the reports of a batch."""
        row = await self.rows.find(id)
        if row is None or row.over:
            return None
        with contextlib.suppress(GoneError):
            stored = await self.broker.get(
                row.reports, subject=f"{row.reports}.{name}", over=lambda: self.rows.over(id)
            )
            return None if stored is None else stored.value
        return None

    # Reports.

    def add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> Verdicts:
        """See `Store`."""
        while True:
            with contextlib.suppress(GoneError):  # it was finished meanwhile, which the next look will show
                return self.broker.run(self._add(id, reports))

    async def _add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> Verdicts:
        log = await self._log(id, await self.rows.get(id))
        spent = await self._spent_ids(id.task)
        if log is None:
            return [Reason.replayed if report in spent else Reason.late for report, _ in reports]
        verdicts = iter(await log.add([report for report in reports if report[0] not in spent]))
        return [Reason.replayed if report in spent else next(verdicts) for report, _ in reports]

    async def _spent_ids(self, task: bytes) -> set[bytes]:
        """Ids in finished batches of a run. Whoever knows an open batch knows all that were finished before it."""
        batches, ids = self._ids.setdefault(task, (set(), set()))
        for id, row in self.rows.all().items():
            if id.task == task and row.over and id not in batches:
                stored = await self.broker.get(self._spent, subject=f"{self._spent}.{name_of(id)}")
                if stored is None:
                    raise StorageError(f"The ids of batch {id.number} are missing from the message broker.")
                starts = range(0, len(stored.value), REPORT_ID_BYTES)
                ids.update(stored.value[start : start + REPORT_ID_BYTES] for start in starts)
                batches.add(id)
        return ids

    async def spend(self, id: BatchId, log: Log) -> None:
        """Store the ids of a batch whose membership is final: sorted, so that who came when is not to be seen."""
        if not log.final:
            raise StorageError(f"Who is in batch {id.number} is not decided yet; it is tried again.")
        await self.broker.put(f"{self._spent}.{name_of(id)}", b"".join(sorted(log.members)))

    def reports(self, id: BatchId, first: int = 0, count: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """See `Store`."""
        log = self.broker.run(self._members(id))
        if log is not None:
            yield from log.read(first, count)

    async def _members(self, id: BatchId) -> Log | None:
        row = await self.rows.find(id)
        return None if row is None else await self._log(id, row)

    # Partial results and releases.

    def keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        """See `Store`."""
        return self.broker.run(self._keep(id, name, value))

    async def _keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        row = await self._unfinished_row(id)
        subject = f"{row.reports}.part.{name.encode().hex()}"
        try:
            await self.broker.put(subject, value, after=0, over=lambda: self.rows.over(id))
            return value
        except ConflictError:
            there = await self._value(id, subject.removeprefix(f"{row.reports}."))
            if there is not None:
                return there
        except GoneError:
            pass
        await self._unfinished_row(id)
        raise StorageError(f"A partial result of batch {id.number} could not be read back; it is tried again.")

    async def _unfinished_row(self, id: BatchId) -> Row:
        row = await self.rows.get(id)
        if row.over:
            raise ContractError(f"Batch {id.number} is {row.state}; only an unfinished one has partial results.")
        return row

    async def _state(self, id: BatchId) -> State:
        return (await self._shown(id, await self.rows.get(id))).state

    def kept(self, id: BatchId, name: str) -> bytes | None:
        """See `Store`."""
        return self.broker.run(self._value(id, f"part.{name.encode().hex()}"))

    def release(self, id: BatchId, chunks: Iterable[bytes]) -> None:
        """See `Store`."""
        state = self.broker.run(self._state(id))
        if state in RELEASED:
            return
        if state != State.sealed:
            raise ContractError(f"Batch {id.number} is {state}; only a sealed batch is released.")
        stream, count = self.broker.run(self._new_stream(id)), 0
        try:
            for count, chunk in enumerate(chunks, 1):
                put = self.broker.put(f"{stream}.{count - 1}", chunk, over=lambda: self.rows.over(id))
                self.broker.run(put)
        except StorageError as reason:
            self.broker.run(self._later(self.broker.drop(stream)))
            if isinstance(reason, GoneError):  # another front end's release stands
                return
            raise
        faults.reached("release")
        self.broker.run(self._release(id, stream, count))

    async def _release(self, id: BatchId, stream: str, chunks: int) -> None:
        log = await self._members(id)
        if log is not None:
            await self.spend(id, log)

        def released(row: Row) -> Row | None:
            final = replace(row, state=State.released, accepted=row.users, chunks=chunks, release=stream)
            return None if row.over else final

        row = await self.rows.change(id, released)
        faults.reached("released")
        await self._drop(id, row)  # ours too, if another front end's stands

    def chunk(self, id: BatchId, number: int) -> bytes | None:
        """See `Store`."""
        return self.broker.run(self._chunk(id, number))

    async def _chunk(self, id: BatchId, number: int) -> bytes | None:
        row = await self._ended(id)
        if row.state != State.released or number >= row.chunks:
            return None
        with contextlib.suppress(GoneError):
            stored = await self.broker.get(
                row.release,
                subject=f"{row.release}.{number}",
                over=lambda: self.rows.known(id).state != State.released,
            )
            return None if stored is None else stored.value
        return None

    async def _ended(self, id: BatchId) -> Row:
        """The row of a batch that whoever asks believes to be over: another front end may have ended it just now."""
        row = await self.rows.get(id)
        if not row.over:
            await self.rows.refresh()
        return self.rows.known(id)

    def scrub(self, id: BatchId, *, last: bool = False) -> None:
        """See `Store`."""
        self.broker.run(self._scrub(id, State.finished if last else State.scrubbed))

    async def _scrub(self, id: BatchId, final: State) -> None:
        row = await self._ended(id)
        if row.state not in RELEASED:
            state = await self._state(id)
            raise ContractError(f"Batch {id.number} is {state}; only a released batch is scrubbed.")
        faults.reached("scrub")
        row = await self.rows.change(
            id, lambda row: None if row.state in (final, State.finished) else replace(row, state=final)
        )
        faults.reached("scrubbed")
        await self._drop(id, row)

    # Batches that do not fill.

    def abort(self, id: BatchId) -> None:
        """See `Store`."""
        self.broker.run(self._abort(id))

    async def _abort(self, id: BatchId) -> None:
        row = await self.rows.get(id)
        log = await self._log(id, row)
        if log is not None:
            try:
                await log.close()
            except GoneError:  # another front end has finished it; this log may not have been read to its end
                return
            if log.state == State.sealed:
                return
            await self.spend(id, log)
            final = {"state": State.aborted, "accepted": len(log.members)}
            row = await self.rows.change(id, lambda row: None if row.over else replace(row, **final))
        await self._drop(id, row)

    def extend(self, id: BatchId, deadline: float, *, before: float) -> None:
        """See `Store`."""
        self.broker.run(self._extend(id, deadline, before))

    async def _extend(self, id: BatchId, deadline: float, before: float) -> None:
        row = await self.rows.get(id)
        log = await self._log(id, row)
        if log is None or log.state == State.sealed:
            return
        if log.closed:  # whoever aborted it died before that was done
            await self._abort(id)
            return

        def extended(row: Row) -> Row | None:
            if row.over or row.deadline != before:  # another front end has given it time
                return None
            return replace(row, deadline=deadline, extensions=row.extensions + 1)

        await self.rows.change(id, extended)

    # Deleting.

    def _finished(self, id: BatchId, row: Row) -> None:
        """Forget a batch that is over, and see to it that its streams go: whoever finished it may have died since."""
        log = self.logs.pop(id, None)
        if log is not None:
            log.stop()

        self.broker.spawn(self._quietly(self._drop(id, row)))

    async def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin some deleting that nobody waits for."""
        self.broker.spawn(self._quietly(work))

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(StorageError):  # the next start finds it
            await work

    async def _drop(self, id: BatchId, row: Row) -> None:
        """Delete the streams that a batch does not need any more, whoever made them."""
        for stream in await self.broker.streams(self._prefix(id)):
            if not row.needs(stream):
                await self.broker.drop(stream)

    def erase(self) -> None:
        """See `Store`."""
        self.broker.run(self._sweep())

    async def _sweep(self) -> None:
        """Delete what processes that died have left behind."""
        await self.rows.refresh()
        rows = {self._prefix(id): row for id, row in self.rows.all().items()}
        for stream in await self.broker.streams(self._batches):
            row = rows.get(stream[: stream.rindex("-") + 1])
            if row is not None and not row.needs(stream):
                await self.broker.drop(stream)

    def close(self) -> None:
        """See `Store`."""
        self.broker.close()
