"""What people see of a server: a page, its files, and events that keep it fresh.

Pages are plain files in `pages/`, each the content of `page.html`, with no script, style or address from elsewhere; the
browser is told to refuse any.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shufflerl.network import logs
from shufflerl.network.protocol.wire import ProblemError, Reason

#: Seconds between looks, and of silence after which a sign of life is sent: a page takes a longer one for the end.
EVERY, SILENCE = 0.5, 5.0
#: Pages that are kept fresh at once: watching must not take the place of working.
MAX_WATCHERS = 32
#: Milliseconds after which a page that lost the server comes back.
RETRY = 1000

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

#: What there is to see now, by name: parts that change apart are sent apart.
Look = Callable[[], Awaitable[dict[str, Any]]]


class LivePage:
    """Serves a page at `/` and keeps it fresh from `/v1/events`."""

    def __init__(self, page: str, look: Look) -> None:
        self._page, self._look = page, look
        self._files = {file.name: file.read_bytes() for file in (resources.files(__package__) / "pages").iterdir()}
        whole = self._files["page.html"].replace(b"{content}", self._files[page])
        self._files[page] = whole.replace(b"{role}", page.removesuffix(".html").encode())
        self._watchers = 0
        self._failed: str | None = None  # what was told and logged of a failure that lasts
        self._over = asyncio.Event()

    @property
    def routes(self) -> list[Route]:
        """Where it is served."""
        return [
            Route("/", lambda request: self._file(request, self._page)),
            Route("/pages/{name}", lambda request: self._file(request, request.path_params["name"])),
            Route("/v1/events", self._events),
        ]

    def close(self) -> None:
        """End all streams of events."""
        self._over.set()

    def _file(self, request: Request, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise ProblemError(Reason.not_found, f"There is no file {name[:80]!r} here.")
        headers = _HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_KINDS[name.rpartition(".")[2]], headers=headers)

    async def _events(self, _: Request) -> Response:
        if self._watchers >= MAX_WATCHERS:
            raise ProblemError(Reason.busy, f"{MAX_WATCHERS} pages are open already; close one, or come back later.")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        """Everything at once, then every part that changed."""
        sent: dict[str, bytes] = {}
        number, last = 0, time.monotonic()
        self._watchers += 1
        try:
            yield f"retry: {RETRY}\n\n".encode()
            while not self._over.is_set():
                parts = await self._parts()
                for name, body in parts.items():
                    if sent.get(name) != body:
                        number, last = number + 1, time.monotonic()
                        yield f"id: {number}\nevent: {name}\ndata: {body.decode()}\n\n".encode()
                sent = parts
                if time.monotonic() - last > SILENCE:
                    last = time.monotonic()
                    yield b"event: alive\ndata: {}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), EVERY)
        finally:
            self._watchers -= 1

    async def _parts(self) -> dict[str, bytes]:
        """All there is to see; where that fails, a part that says so, and one line in the log for as long as it does.

        Only what kind of failure it is goes to the page: its text may name what nobody else should see.
        """
        try:
            parts = {name: msgspec.json.encode(part) for name, part in (await self._look()).items()}
        except Exception as reason:  # whatever it is, a page must not stop without a word
            detail = f"What stands here cannot be kept fresh ({type(reason).__name__}); the server's log says more."
            if detail != self._failed:
                logs.log.exception("page failed")
            self._failed = detail
            return {"failed": msgspec.json.encode({"detail": detail})}
        self._failed = None
        return parts
