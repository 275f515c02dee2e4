"""Group commit: what comes in while the disk is busy is stored together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class GroupCommit:
    """Runs one function over everything that came in while it last ran: many requests, one fsync."""

    def __init__(self, store: Callable[[list[Any]], Awaitable[list[Any]]], max_items: int = 512) -> None:
        self._store = store
        self._max_items = max_items
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._running: asyncio.Task[None] | None = None

    async def submit(self, item: Any) -> Any:
        """The function's result for this item, once it is stored."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._drain())
        return await future

    @property
    def queued(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    async def _drain(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[: self._max_items], self._waiting[self._max_items :]
            try:
                results = await self._store([item for item, _ in group])
            except Exception as reason:
                for _, future in group:
                    if not future.done():
                        future.set_exception(reason)
            else:
                for (_, future), result in zip(group, results, strict=True):
                    if not future.done():  # its client may have gone
                        future.set_result(result)
        self._running = None
