"""Pages that run: the code they show is run, and the output they show is what it gave.

A block `python` runs in one namespace per page, `sh` in one shell per page, both in an empty folder. A block with
title="NAME" is a file of that name. A block `text` right after one that ran is its output; "..." in it stands for
anything, for what differs from run to run. `python -m tests.pages PAGE ...` writes the outputs of today into pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

#: Seconds a page's shell has in all.
SECONDS = 600.0
_MARK = "--- the block has run ---"
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str | None
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page that have a language, in order."""
    found = _FENCE.finditer(page)
    return [Block(one[1], one[2] or None, one[3], page[: one.start()].count("\n") + 1) for one in found]


def same(shown: str, printed: str) -> bool:
    """Whether what a page shows is what was printed, up to spaces at the ends of lines and what "..." leaves out."""
    tidy = ["\n".join(line.rstrip() for line in text.strip("\n").splitlines()) for text in (shown, printed)]
    pattern = ".*?".join(re.escape(part) for part in tidy[0].split("..."))
    return re.fullmatch(pattern, tidy[1], flags=re.DOTALL) is not None


class Shell:
    """A bash that stops at the first command that fails; it and what it started end with it."""

    def __init__(self, folder: Path) -> None:
        here = str(Path(sys.executable).parent)
        self._process = subprocess.Popen(
            ["bash", "-e"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"},
            start_new_session=True,
        )
        self._clock = threading.Timer(SECONDS, self._end, [signal.SIGKILL])
        self._clock.start()

    def run(self, text: str) -> str:
        """What the commands print."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{text}\necho '{_MARK}'\n")
        self._process.stdin.flush()
        printed = ""
        for line in self._process.stdout:
            if line.endswith(f"{_MARK}\n"):
                return printed + line.removesuffix(f"{_MARK}\n")
            printed += line
        raise AssertionError(f"a command failed, or took more than {SECONDS:g} s; the last output was:\n{printed}")

    def _end(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.cancel()
        self._end(signal.SIGTERM)
        self._process.communicate()


def run_page(page: Path, folder: Path) -> list[tuple[Block, str]]:
    """Run a page in a folder that is the current one: its blocks of output, and what was printed in truth."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, shown = "", []
    sys.path_importer_cache.pop(".", None)  # of the folder of a page before
    with Shell(folder) as shell:
        for block in blocks(page.read_text()):
            if block.title is not None:
                (folder / block.title).write_text(block.text)
            elif block.language == "sh":
                printed = shell.run(block.text)
            elif block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
                printed = said.getvalue()
            elif block.language == "text":
                shown.append((block, printed))
    return shown


def update(page: Path) -> None:
    """Write what was printed into a page, where that is not what it shows."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = run_page(page, Path(folder))
    text = page.read_text()
    for block, printed in found:
        if not same(block.text, printed):
            was, now = block.text.splitlines(), [line.rstrip() for line in printed.strip("\n").splitlines()]
            kept = [old if same(old, new) else new for old, new in zip_longest(was, now, fillvalue="")][: len(now)]
            text = text.replace(f"```text\n{block.text}```", "```text\n" + "\n".join(kept) + "\n```", 1)
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name).resolve())
