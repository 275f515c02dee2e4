"""What both servers share: problems as answers, bodies with limits, servers that listen."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network import logs
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import Message, ProblemError, Reason
from shufflerl.network.web import openapi
from shufflerl.network.web.watching import LivePage

#: Seconds a client has to send a whole body.
BODY_SECONDS = 20.0
#: Seconds a client has to send the head of a request.
HEADER_SECONDS = 10.0

#: Connections that may wait to be accepted.
BACKLOG = 2048


def message(body: Message, status: int = 200) -> Response:
    """A message as an answer."""
    return Response(wire.encode(body), status, media_type=wire.MEDIA_TYPE)


def as_json(body: Any, status: int = 200) -> Response:
    """JSON as an answer; bytes in it are base64."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def problem(error: ProblemError) -> Response:
    """A problem as an answer (RFC 9457)."""
    detail = error.problem
    return Response(msgspec.json.encode(detail), detail.status, media_type="application/problem+json")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, if it is not too long and does not take too long to come."""
    detail = f"The body has more than {max_bytes:,} bytes; send fewer reports at once."
    too_long = ProblemError(Reason.oversized, detail)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise ProblemError(Reason.too_slow, f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
    except ClientDisconnect:
        raise ProblemError(Reason.malformed, "The connection ended before the body did.") from None
    return b"".join(parts)


def application(
    role: str,
    routes: list[Route],
    page: LivePage,
    trouble: Callable[[], ProblemError | None],
    lifespan: Callable[[], AbstractAsyncContextManager[None]],
) -> Starlette:
    """A server of these routes, its page, and what operators may ask of both roles."""

    async def healthy(_: Request) -> Response:
        return as_json({"status": "alive"})

    async def ready(_: Request) -> Response:
        reason = trouble()
        return as_json({"status": "ready"}) if reason is None else problem(reason)

    async def interface(_: Request) -> Response:
        return as_json(openapi.OF[role])

    operators = [Route("/healthz", healthy), Route("/readyz", ready), Route("/openapi.json", interface)]
    app = Starlette(routes=[*routes, *operators, *page.routes], lifespan=lambda _: lifespan())
    app.state.watching = page
    answers_problems(app, role)
    return app


def answers_problems(app: Starlette, role: str) -> None:
    """Turn every error into a problem: the sender's as what it is, the disk's as one to try again."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return problem(error)

    async def stored(_: Request, error: Exception) -> Response:
        logs.log.error("storage", extra={"fields": {"detail": str(error)}})
        return problem(ProblemError(Reason.storage, "The message could not be stored; send the same bytes again."))

    async def routed(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = Reason.not_allowed if error.status_code == 405 else Reason.not_found
        answer = problem(ProblemError(reason, f"This is a {role}, which has no such address; see its /openapi.json."))
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(ProblemError, refused)
    app.add_exception_handler(StorageError, stored)
    app.add_exception_handler(HTTPException, routed)


class _Patient(HttpToolsProtocol):
    """Ends connections that take too long to say what they want: header bytes that trickle in would hold them open."""

    _asking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        if self._asking is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_headers()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._asking = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets on all addresses of a host; port 0 takes a free one."""
    with contextlib.ExitStack() as stack:
        try:
            sockets, absent = [], None
            for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                try:
                    made = socket.create_server(address[:2], family=family, backlog=BACKLOG)
                    sockets.append(stack.enter_context(made))
                except OSError as reason:
                    if reason.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    absent = reason  # such as IPv6 of "localhost" where there is none: another may be there
            if not sockets and absent is not None:
                raise absent
        except OSError as reason:
            code = reason.errno or 0
            why = os.strerror(code) if code > 0 else reason.strerror  # of names that nobody knows
            raise InvalidInputError(
                f"Nothing can listen at {host}:{port} ({why}); set `listen` to an address of this machine and a port "
                "that no other process has."
            ) from None
        yield sockets


def serve(app: Starlette, sockets: list[socket.socket], ready: Callable[[int], None]) -> None:
    """Serve until told to stop (SIGTERM or Ctrl-C), then finish what is under way; `ready` is told the port."""
    logs.to_standard_error()
    server(app, ready).run(sockets)


def server(app: Starlette, ready: Callable[[int], None]) -> uvicorn.Server:
    """A server that is not running yet."""
    config = uvicorn.Config(
        app,
        http=_Patient,
        access_log=False,  # an access log would hold addresses
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=10,
        limit_concurrency=2000,
        backlog=BACKLOG,
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            app.state.watching.close()  # these answers end only when they are told to
            await super().shutdown(sockets=sockets)

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                ready(self.servers[0].sockets[0].getsockname()[1])

    return Server(config)
