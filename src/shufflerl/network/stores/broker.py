"""NATS JetStream for code that is not asynchronous: values of any size, compare-and-set, and streams that are followed.

A loop in a thread of its own holds the connection. Every operation here may be repeated, so each is tried again while
servers fail over, and ends as `StorageError` when that takes longer than `PATIENCE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import ssl
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header, RawStreamMsg, StorageType, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network import logs

REPLICAS = 3
#: The oldest server that is taken.
OLDEST = (2, 12)
#: Seconds for which an operation is tried again. A new leader is elected in less than ten.
PATIENCE = 12.0
#: Seconds to wait for one answer.
ANSWER = 3.0
#: Seconds between signs of life of a stream that is followed.
HEARTBEAT = 1.0
#: Bytes of a message that are left for its headers.
HEADROOM = 72 * 1024
_PIECES = "Shufflerl-Pieces"
_WRONG_SEQUENCE, _NO_STREAM = 10071, 10059

Result = TypeVar("Result")
Headers = dict[str, str]


class ConflictError(Exception):
    """Somebody else wrote there first."""


class GoneError(StorageError):
    """The stream was deleted, as its batch is over."""


@dataclass(frozen=True)
class Stored:
    """A message of a stream."""

    sequence: int
    headers: Headers
    value: bytes


class Broker:
    """A connection to a cluster. Its coroutines run in its own thread, by `run`."""

    def __init__(self, servers: str, credentials: Path | None = None, authority: Path | None = None) -> None:
        """Connect to comma-separated servers, waiting for them; `authority` has signed their certificates."""
        self._options = connection_options(servers, credentials, authority)
        self._loop = _new_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self.thread.start()
        self.client = Client()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self.run(self._connect())
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do some work in the connection's thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin some work, from the connection's thread; closing ends it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self) -> None:
        """Connect, however long that takes; `StorageError` if the servers do not want us."""
        warned = connected = False

        async def failed(reason: Exception) -> None:
            """What matters of later errors is said by the operations that meet them."""
            nonlocal warned
            if "authorization violation" in str(reason).lower() and not connected:
                raise StorageError("The message broker refuses the user; check the credentials given for `store`.")
            if not warned and not self.client.is_connected:
                warned = True
                logs.event("waits for the message broker", detail=explanation(reason))

        async def lost() -> None:
            logs.event("lost the message broker")

        async def back() -> None:
            logs.event("the message broker is back")

        self.client = Client()
        await self.client.connect(
            **self._options,
            error_cb=failed,
            disconnected_cb=lost,
            reconnected_cb=back,
            connect_timeout=2,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # seconds; fractions work
            max_reconnect_attempts=-1,
            ping_interval=2,
            max_outstanding_pings=2,
            pending_size=64 * 2**20,
        )
        connected = True
        version = self.client.connected_server_version
        if (version.major, version.minor) < OLDEST:
            await self.client.close()
            raise StorageError(
                f"The message broker is NATS server {version.major}.{version.minor}; "
                f"{OLDEST[0]}.{OLDEST[1]} or later is needed, on all of its servers."
            )
        self.jetstream: JetStreamContext = self.client.jetstream(timeout=ANSWER)

    @property
    def largest(self) -> int:
        """Bytes of a value that go into one message; larger ones are stored in pieces."""
        return max(1, self.client.max_payload - HEADROOM)

    async def insist(self, action: Callable[[], Awaitable[Result]], over: Callable[[], bool] = lambda: False) -> Result:
        """Do something until it succeeds, is `over` (`GoneError`), or patience ends (`StorageError`)."""
        deadline = self._loop.time() + PATIENCE
        while True:
            try:
                return await action()
            except (NatsError, OSError, TimeoutError) as reason:
                code = reason.err_code if isinstance(reason, APIError) else None
                if code == _WRONG_SEQUENCE:
                    raise ConflictError from None
                if isinstance(reason, NotFoundError) and code != _NO_STREAM:  # a new stream is not known everywhere yet
                    raise
                if over():
                    raise GoneError("The batch is over, and what was stored of it is deleted.") from None
                if self.client.is_closed:  # for good, by an error that the client does not know
                    await self._connect()
                if self._loop.time() > deadline:
                    raise StorageError(
                        f"The message broker does not answer ({explanation(reason)}); are two of its three servers up? "
                        "It is tried again."
                    ) from None
            await asyncio.sleep(0.1)

    async def make(self, stream: str, *, newest_only: bool = False) -> None:
        """Make a stream for the subjects below its name, on three servers' disks; one that is there already is kept."""
        config = StreamConfig(
            name=stream,
            subjects=[f"{stream}.>"],
            storage=StorageType.FILE,
            num_replicas=REPLICAS,
            max_msgs_per_subject=1 if newest_only else -1,
            allow_direct=True,
        )
        await self.insist(lambda: self.jetstream.add_stream(config))

    async def drop(self, stream: str) -> None:
        """Delete a stream, its files and the log of its replicas; one that is gone is gone."""

        async def delete() -> None:
            with contextlib.suppress(NotFoundError):
                await self.jetstream.delete_stream(stream)

        await self.insist(delete)

    async def streams(self, prefix: str) -> list[str]:
        """All streams whose name begins so, also those whose servers do not answer."""
        found: list[str] = []

        async def page() -> bool:
            """Read on; whether there is more."""
            answer = await self.client.request("$JS.API.STREAM.NAMES", b'{"offset": %d}' % len(found), ANSWER)
            page = json.loads(answer.data)
            if "error" in page:
                raise APIError(**page["error"])
            found.extend(page["streams"] or [])
            return bool(page["streams"]) and len(found) < page["total"]

        while await self.insist(page):
            pass
        return [name for name in found if name.startswith(prefix)]

    async def last(self, stream: str, over: Callable[[], bool] = lambda: False) -> int:
        """The number of the stream's last message, as its leader knows it."""

        async def ask() -> int:
            info = await self.jetstream.stream_info(stream)
            if info.cluster is None or not info.cluster.leader:  # a server that led answers on, and knows nothing new
                raise APIError(code=503, description="no leader")
            return int(info.state.last_seq)

        return await self.insist(ask, over)

    async def put(
        self,
        subject: str,
        value: bytes,
        headers: Headers | None = None,
        *,
        after: int | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Store a value of any size on most replicas' disks; its number in the stream.

        With `after`, only if the last message of this subject has that number (0: there is none), else
        `ConflictError`. Large values are stored in pieces first, and are there once the message that names them is.
        """
        headers = dict(headers or {})
        if len(value) > self.largest:
            pieces = [value[start : start + self.largest] for start in range(0, len(value), self.largest)]
            name = f"{subject}.piece.{secrets.token_hex(8)}"
            for number, piece in enumerate(pieces):
                await self.put(f"{name}.{number}", piece, over=over)
            headers[_PIECES] = f"{name} {len(pieces)}"
            value = b""
        if after is not None:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE] = str(after)
        ack = await self.insist(lambda: self.jetstream.publish(subject, value, headers=headers), over)
        return ack.seq

    async def get(
        self,
        stream: str,
        *,
        subject: str | None = None,
        sequence: int | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> Stored | None:
        """The last value of a subject as the leader knows it, or the message of a number."""

        async def read() -> RawStreamMsg:
            if sequence is not None:
                with contextlib.suppress(NotFoundError):
                    return await self.jetstream.get_msg(stream, sequence, direct=True)
                # This replica may be behind: the leader is not.
            return await self.jetstream.get_msg(stream, sequence, subject)

        try:
            message = await self.insist(read, over)
        except NotFoundError:
            return None
        headers, value = message.headers or {}, message.data or b""
        if (pieces := headers.get(_PIECES)) is not None:
            name, _, count = pieces.partition(" ")
            parts = [await self.get(stream, subject=f"{name}.{number}", over=over) for number in range(int(count))]
            if None in parts:  # never a part of a value: ids that are missing would be taken twice
                raise StorageError("A piece of a value is missing from the message broker; it is tried again.")
            value = b"".join(part.value for part in parts if part is not None)
        return Stored(message.seq or 0, headers, value)

    def close(self) -> None:
        """End the connection and its thread; nothing that was stored depends on it."""

        async def end() -> None:
            while self._tasks:  # one that ends may begin another
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                await self.client.close()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()
        # A connection that was being made anew just then belongs to nobody: it ends with the loop, which may object.
        with warnings.catch_warnings(), contextlib.suppress(OSError):
            warnings.simplefilter("ignore", ResourceWarning)
            self._loop.close()

    # Following.

    async def deliver(self, follower: Follower) -> None:
        """Hand a follower what it has not seen, in order and without gaps, until something goes wrong."""
        inbox = self.client.new_inbox()
        heard = await self.client.subscribe(inbox, pending_msgs_limit=-1, pending_bytes_limit=-1)
        try:
            config = ConsumerConfig(
                deliver_subject=inbox,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=follower.seen + 1,
                ack_policy=AckPolicy.NONE,
                max_deliver=1,
                idle_heartbeat=HEARTBEAT,
                headers_only=follower.headers_only,
                num_replicas=1,
                mem_storage=True,
                inactive_threshold=30,
            )
            await self.jetstream.add_consumer(follower.stream, config)
            expected = 1
            while True:
                message: Msg = await heard.next_msg(timeout=3 * HEARTBEAT)
                if not message.reply:  # a sign of life, which says how many messages were sent
                    if int((message.headers or {}).get("Nats-Last-Consumer", 0)) >= expected:
                        return
                    continue
                facts = message.metadata
                if facts.sequence.consumer != expected:
                    return
                expected += 1
                await follower.apply(
                    Stored(facts.sequence.stream, message.headers or {}, message.data), message.subject
                )
                follower.saw(facts.sequence.stream)
        finally:
            with contextlib.suppress(NatsError):
                await heard.unsubscribe()


class Follower:
    """Sees every message of a stream in its order, once, whatever servers do; from the broker's thread."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        apply: Callable[[Stored, str], Awaitable[None]],
        *,
        headers_only: bool = False,
    ) -> None:
        self.stream, self.apply, self.headers_only = stream, apply, headers_only
        self.seen = 0
        self._broker = broker
        self._moved = asyncio.Event()
        self._delivery: asyncio.Task[None] | None = None
        self._task = broker.spawn(self._follow())

    async def _follow(self) -> None:
        while True:
            self._delivery = asyncio.ensure_future(self._one_delivery())
            try:
                await asyncio.wait([self._delivery])
            finally:
                self._delivery.cancel()
            await asyncio.sleep(0.05)

    async def _one_delivery(self) -> None:
        with contextlib.suppress(NatsError, OSError, TimeoutError, StorageError):
            await self._broker.deliver(self)

    def saw(self, sequence: int) -> None:
        """Note how far the stream was seen."""
        self.seen = sequence
        self._moved.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was seen makes something true; `StorageError` if it takes too long."""
        for _ in range(int(PATIENCE)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while not condition():
                        self._moved.clear()
                        await self._moved.wait()
                    return
            if self._delivery is not None:
                self._delivery.cancel()  # its server may be gone: ask another
        raise StorageError("The message broker does not deliver; are two of its three servers up? It is tried again.")

    def stop(self) -> None:
        """See no more."""
        self._task.cancel()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # it is not to be had on every system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def connection_options(servers: str, credentials: Path | None, authority: Path | None) -> dict[str, Any]:
    """What a connection to such servers is made with."""
    addresses = [urlsplit(one.strip()) for one in servers.split(",")]
    if not all(one.scheme in ("nats", "tls") and one.hostname and _port(one) for one in addresses):
        raise InvalidInputError(
            "A server in `store` is not nats:// or tls:// with a name and a port; expected addresses such as "
            "nats://a.example:4222,nats://b.example:4222."
        )
    options: dict[str, Any] = {"servers": [f"{one.scheme}://{one.netloc.rpartition('@')[2]}" for one in addresses]}
    if addresses[0].username is not None:
        options["user"] = unquote(addresses[0].username)
        options["password"] = unquote(addresses[0].password or "")
    for name, path in (("store_credentials", credentials), ("store_authority", authority)):
        if path is not None and not path.is_file():
            raise InvalidInputError(f"{name} is {path}, which is not a file.")
    if credentials is not None:
        if b"BEGIN NATS USER JWT" not in credentials.read_bytes():
            raise InvalidInputError(
                f"store_credentials is {credentials}, which has no NATS USER JWT; expected the file that `nsc` made."
            )
        options["user_credentials"] = str(credentials)
    if authority is not None:
        try:
            options["tls"] = ssl.create_default_context(cafile=authority)
        except ssl.SSLError:
            raise InvalidInputError(
                f"store_authority is {authority}, which is not a certificate; expected one in PEM."
            ) from None
    return options


def _port(address: SplitResult) -> int | None:
    try:
        return address.port
    except ValueError:
        return None


def explanation(reason: Exception) -> str:
    """What went wrong, without addresses: they may hold a password."""
    if isinstance(reason, APIError) and reason.description:
        return str(reason.description)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {reason.verify_message}; check `store_authority`"
    if isinstance(reason, ServiceUnavailableError):
        return "JetStream is off, or has no leader"
    return type(reason).__name__
