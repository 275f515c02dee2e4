"""The thread that owns a server's state: requests queue for it, and so need no locks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Owner(ThreadPoolExecutor):
    """A pool of one thread, for calls from a loop."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name)

    async def run(self, action: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Call something in the thread, when its turn comes."""
        return await asyncio.wrap_future(self.submit(action, *args, **kwargs))

    @contextlib.asynccontextmanager
    async def lifespan(
        self, work: Callable[[], Coroutine[Any, Any, None]], close: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Work beside the requests; at the end stop that, close the state in its thread, and end the thread."""
        working = asyncio.create_task(work())
        try:
            yield
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
            await self.run(close)
            self.shutdown()
