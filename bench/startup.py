"""How long a person waits for the first answer, in fresh processes whose files are already in memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import Figure, medians, seconds

REPEATS = 11


def run() -> list[Figure]:
    """Whole processes: `shufflerl --help`, `import shufflerl`, beside a Python that does nothing; and a first run."""
    script = str(Path(sys.executable).with_name("shufflerl"))
    commands = ([script, "--help"], [sys.executable, "-c", "import shufflerl"], [sys.executable, "-c", "pass"])
    for command in commands:
        start(command)
    helped, imported, nothing = medians(
        REPEATS,
        lambda _: seconds(lambda: start(commands[0])),
        lambda _: seconds(lambda: start(commands[1])),
        lambda _: seconds(lambda: start(commands[2])),
    )
    return [
        Figure.under(0.5, "shufflerl --help", "s", helped, nothing, "python -c pass"),
        Figure.under(0.3, "import shufflerl", "s", imported, nothing, "python -c pass"),
        Figure.under(25, "the first run on a machine, compiling included", "s of CPU", first_run(script)),
    ]


def first_run(script: str) -> float:
    """Seconds of CPU that `run riverswim --epsilon 1` takes where no kernel has been compiled before."""
    with tempfile.TemporaryDirectory() as empty:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start([script, "run", "riverswim", "--epsilon", "1"], NUMBA_CACHE_DIR=empty)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def start(command: list[str], **variables: str) -> None:
    """Run a process to its end."""
    subprocess.run(command, check=True, capture_output=True, env=os.environ | variables)
