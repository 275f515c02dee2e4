"""The command line in the process of the tests."""

from __future__ import annotations

import sys

import pytest

from shufflerl import cli


def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int = 80
) -> tuple[object, str, str]:
    """Run it: exit code or message, and what it said on stdout and on stderr."""
    monkeypatch.setattr(sys, "argv", ["shufflerl", *arguments])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err
