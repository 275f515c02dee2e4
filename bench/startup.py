"""How long a person waits for the first answer, in fresh processes whose files are already in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.measure import Figure, medians, seconds

REPEATS = 11


def run() -> list[Figure]:
    """Whole processes: `shufflerl --help` and `import shufflerl`, beside a Python that does nothing."""
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
    ]


def start(command: list[str]) -> None:
    """Run a process to its end."""
    subprocess.run(command, check=True, capture_output=True)
