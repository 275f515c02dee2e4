"""The pages that show code and output run as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import pages

DOCS = Path(__file__).parent.parent / "docs"
#: What runs: pages that teach. Others show commands that take long, or need more than one machine.
RUN = [
    *sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.name != "index.md"),
    DOCS / "start.md",
    DOCS / "privacy-officer.md",
    DOCS / "poisoning.md",
    DOCS / "concepts" / "trust.md",
    DOCS / "operate" / "sizing.md",
]


@pytest.mark.slow(8)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a page may add its folder
    shown = pages.run_page(page, tmp_path)
    assert shown
    for block, printed in shown:
        assert pages.same(block.text, printed), (
            f"{page}:{block.line} shows other output than this, which `python -m tests.pages` writes:\n{printed}"
        )


def _page(folder: Path, text: str) -> Path:
    (folder / "page.md").write_text(text)
    return folder / "page.md"


def test_blocks_share_names_a_shell_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
```python
x = 6
```
```toml title="a.toml"
b = 7
```
```sh
c=8
```
```sh
cat a.toml; echo $c
```
```text
b = 7
8
```
```python
print(x * 7)
```
```text
42
```
"""
    shown = pages.run_page(_page(tmp_path, text), tmp_path)
    assert [printed for _, printed in shown] == ["b = 7\n8\n", "42\n"]
    assert all(pages.same(block.text, printed) for block, printed in shown)


def test_a_command_that_fails_fails_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="before it"):
        pages.run_page(_page(tmp_path, "```sh\necho before it; false; echo after\n```\n"), tmp_path)


def test_output_is_compared_but_for_what_is_left_out() -> None:
    assert pages.same("a ... c\n", "a b b c  \n")
    assert pages.same("a\n...\nz", "a\nb\nc\nz\n")
    for shown, printed in (("a", "b"), ("a", "a\nb"), ("a ... c", "a b d"), ("", "a"), ("a.c", "abc")):
        assert not pages.same(shown, printed)


def test_outputs_are_written_into_a_page_where_they_differ(tmp_path: Path) -> None:
    text = "```python\nprint('a 1')\nprint('b 2')\n```\n\n```text\na ...\nb 3\n```\n"
    page = _page(tmp_path, text)
    pages.update(page)
    assert page.read_text() == text.replace("b 3", "b 2")
