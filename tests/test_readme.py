"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("optimal value 0.4758, regret ")
    assert "-differential privacy in the shuffle model" in printed
    assert 0 < names["history"].total_regret < 1000  # type: ignore[attr-defined]


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
