"""Roles that start at once: forked from a process that has imported all they need, and is forked from nothing else.

Most of a role's start is imports, and tests that kill roles start them over and over. The command line and all that it
does are those of `python -m shufflerl`, which the demonstration and the pages start as it is.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from shufflerl import cli
from shufflerl.network import faults
from shufflerl.network.demo import Role

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "dp_accounting.pld.privacy_loss_distribution",
        "pytest",  # what pytest started as, and each forked process imports again
        "shufflerl.learners.optimistic",
        "shufflerl.learners.sdp_pe",
        "shufflerl.network.coordinator.app",
        "shufflerl.network.stores.nats_store",
        "shufflerl.network.shuffler.app",
        "tests.support.warm",
    ]
)


class _Process:
    """A forked process with as much of `subprocess.Popen` as a role needs."""

    def __init__(self, arguments: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = FORKS.Process(target=_run, args=(arguments, theirs, log, environment))
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        ours.close()
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode


def _run(arguments: tuple[str, ...], stdout: Connection, log: Path, environment: dict[str, str]) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    os.environ.update(environment)
    importlib.reload(faults)  # which reads them
    sys.argv = ["shufflerl", *arguments]
    cli.main()


class WarmRole(Role):
    """A role, forked."""

    def __init__(self, name: str, folder: Path, *arguments: str, environment: dict[str, str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._log = self.log.open("ab")
        self.process = _Process((name, *arguments), self.log, environment)  # type: ignore[assignment]
