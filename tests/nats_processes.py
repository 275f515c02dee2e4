"""Front ends of one shuffler over a NATS cluster, with a balancer before them, as real processes for tests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import threading
from pathlib import Path
from typing import Any

from shufflerl.network.demo import Role
from tests.network_processes import Processes, free_port


class Balancer:
    """Passes each connection on to a front end that answers, chosen at random."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._pass_on, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in random.sample(self.ports, len(self.ports)):
            with contextlib.suppress(OSError):
                back, forth = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            writer.close()
            return
        await asyncio.gather(_pump(reader, forth), _pump(back, writer))

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class FrontEnds(Processes):
    """A coordinator and front ends "front-0", "front-1", ...; "shuffler" is what stands before them."""

    def __init__(self, folder: Path, servers: str, *, fronts: int = 2, **options: Any) -> None:
        super().__init__(folder, **options)
        self.fronts = [f"front-{number}" for number in range(fronts)]
        self._servers = servers
        for name in self.fronts:
            self.ports[name] = free_port()
            (folder / name).mkdir()
            for secret in ("identity.pem", "enrolment.key"):  # many processes, one shuffler
                shutil.copy(folder / "shuffler" / secret, folder / name / secret)
        self._balancer = Balancer([self.ports[name] for name in self.fronts])
        self.ports["shuffler"] = self._balancer.port

    def start(self, name: str, crash_at: str = "") -> dict[str, Any]:
        if name not in self.fronts:
            return super().start(name, crash_at)
        place = self.folder / name
        common = ("--folder", str(place), "--listen", f"127.0.0.1:{self.ports[name]}", "--store", self._servers)
        key = ("--coordinator-key", str(self.keys["coordinator"]), "--min-batch-size", "1")
        return self._started(
            name, Role("shuffler", place, *common, *key, environment={"SHUFFLERL_CRASH_AT": crash_at}), crash_at
        )

    def stop(self) -> None:
        super().stop()
        self._balancer.close()
