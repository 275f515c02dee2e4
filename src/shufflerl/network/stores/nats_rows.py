"""What a shuffler's front ends on NATS know of batches: rows that each of them follows, changed by compare-and-set."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shufflerl.errors import ContractError, StorageError
from shufflerl.network.protocol.wire import State
from shufflerl.network.stores.broker import Broker, ConflictError, Follower, Stored
from shufflerl.network.stores.store import BatchId, BatchRow

#: Seconds for which what is known is fresh enough to act on without asking.
FRESH = 0.5


class Row(msgspec.Struct, frozen=True):
    """A batch as it is stored. `state` is open until it is released or aborted: its log says whether it is sealed.

    `reports` and `release` name streams.
    """

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
        """Whether its reports are, or are to be, deleted."""
        return self.state != State.open

    def needs(self, stream: str) -> bool:
        """Whether a stream of this batch may be of use: until it is over, it may become the release."""
        return not self.over or (self.state == State.released and stream == self.release)


class Rows:
    """Every row there is. `finished` is told of each row that is over or scrubbed from now on, whoever changed it."""

    def __init__(self, broker: Broker, stream: str, finished: Callable[[BatchId, Row], None]) -> None:
        self._broker = broker
        self._stream = stream
        self.finished = finished
        self._rows: dict[BatchId, tuple[int, Row]] = {}
        self._papers: dict[BatchId, tuple[bytes, bytes]] = {}
        self._fresh_at = 0.0
        self._begun = False

    async def begin(self) -> None:
        """Read what is stored, and follow it from then on."""
        await self._broker.make(self._stream, newest_only=True)
        self.follower = Follower(self._broker, self._stream, self._apply)
        await self.refresh()
        self._begun = True

    def all(self) -> dict[BatchId, Row]:
        """What is known."""
        return {id: row for id, (_, row) in self._rows.items()}

    def known(self, id: BatchId) -> Row:
        """A batch that is known here."""
        return self._rows[id][1]

    def over(self, id: BatchId) -> bool:
        """Whether a batch is known to be over."""
        return id in self._rows and self._rows[id][1].over

    def shown(self, id: BatchId, state: State, accepted: int) -> BatchRow:
        """A row for those who ask the store."""
        row, (announcement, opening) = self.known(id), self._papers[id]
        return BatchRow(
            id=id,
            users=row.users,
            announcement=announcement,
            opening=opening,
            deadline=row.deadline,
            state=state,
            accepted=accepted,
            chunks=row.chunks,
            extensions=row.extensions,
        )

    async def refresh(self, age: float = 0.0) -> None:
        """Know every row that was stored by now, or by so many seconds ago."""
        if time.monotonic() < self._fresh_at + age:
            return
        now, last = time.monotonic(), await self._broker.last(self._stream)
        await self.follower.until(lambda: self.follower.seen >= last)
        self._fresh_at = now

    async def find(self, id: BatchId) -> Row | None:
        """Look a batch up; one that is not known may have been stored by another front end just now."""
        if id not in self._rows:
            await self.refresh()
        return self._rows[id][1] if id in self._rows else None

    async def get(self, id: BatchId) -> Row:
        """A batch that must be there."""
        row = await self.find(id)
        if row is None:
            raise ContractError(f"There is no batch {id.number}, attempt {id.attempt}, of this run.")
        return row

    async def create(self, id: BatchId, row: Row, announcement: bytes, opening: bytes) -> None:
        """Store a row unless there is one. The announcement comes first, so that no row is without."""
        papers = msgspec.msgpack.encode((announcement, opening))
        await self._broker.put(f"{self._stream}.said.{row.reports}", papers)
        try:
            sequence = await self._broker.put(self._subject(id), msgspec.msgpack.encode(row), after=0)
        except ConflictError:  # another front end was faster, or our own acknowledgement was lost
            await self.refresh()
        else:
            await self._learn(id, sequence, row)

    async def change(self, id: BatchId, change: Callable[[Row], Row | None]) -> Row:
        """Change a row as it is now, unless `change` says that there is nothing to do; the row as it then is."""
        while True:
            sequence, row = self._rows[id]
            new = change(row)
            if new is None:
                return row
            try:
                sequence = await self._broker.put(self._subject(id), msgspec.msgpack.encode(new), after=sequence)
            except ConflictError:
                await self.refresh()
            else:
                await self._learn(id, sequence, new)
                return new

    def _subject(self, id: BatchId) -> str:
        return f"{self._stream}.row.{name_of(id)}"

    async def _apply(self, message: Stored, subject: str) -> None:
        kind, *name = subject.removeprefix(f"{self._stream}.").split(".")
        if kind == "row":
            id = BatchId(bytes.fromhex(name[0]), int(name[1]), int(name[2]))
            await self._learn(id, message.sequence, msgspec.msgpack.decode(message.value, type=Row))

    async def _learn(self, id: BatchId, sequence: int, row: Row) -> None:
        if id not in self._papers:
            papers = await self._broker.get(self._stream, subject=f"{self._stream}.said.{row.reports}")
            if papers is None:
                raise StorageError(f"The announcement of batch {id.number} is missing from the message broker.")
            self._papers[id] = msgspec.msgpack.decode(papers.value, type=tuple[bytes, bytes])
        if id in self._rows and self._rows[id][0] >= sequence:
            return
        self._rows[id] = sequence, row
        if row.over and self._begun:
            self.finished(id, row)


def name_of(id: BatchId) -> str:
    """A batch in a subject."""
    return f"{id.task.hex()}.{id.number}.{id.attempt}"
