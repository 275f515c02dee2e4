"""The documentation site: it builds strictly, needs nothing from outside, and has a page for everything it must."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from shufflerl import cli, errors
from shufflerl.network import agreement, coordinator, node, wire

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: What a browser fetches by itself, by element; links that a reader may follow are not among it.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "image": "href"}


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """One test, as building the site takes long."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    _fetches_nothing_from_outside(tmp_path)
    _has_every_command(tmp_path)
    _has_pages_for_links_into_the_repository(tmp_path)
    _has_pictures_that_follow_its_colours(tmp_path)
    assert '<a href="index.html">All errors</a>' in (tmp_path / "errors" / "late.html").read_text()


class _Fetches(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if (key := FETCHED.get(tag)) and (address := given.get(key)):
            self.found.append(address)


def _fetches_nothing_from_outside(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        parser = _Fetches()
        parser.feed(page.read_text())
        assert parser.found
        for address in parser.found:
            assert not re.match(r"(\w+:)?//", address), f"{page.relative_to(site)} fetches {address}"
            here = page.parent / address.split("#")[0].split("?")[0]
            assert page.name == "404.html" or here.exists(), f"{page.relative_to(site)} fetches {address}, not there"
        assert "mermaid" not in page.read_text()  # the theme would fetch the drawing program
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import\s|url\()['\"]?(?:\w+:)?//", sheet.read_text()), sheet


def _has_every_command(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text()
    names = [one.name or one.callback.__name__ for one in cli.app.registered_commands if one.callback is not None]
    assert len(names) > 15
    assert [name for name in names if f">shufflerl {name}<" not in page] == []


def _has_pages_for_links_into_the_repository(site: Path) -> None:
    assert "def learn(" in re.sub("<[^>]+>", "", (site / "source/src/shufflerl/loop.py.html").read_text())
    assert "source/src/shufflerl/loop.py.html" in (site / "tutorials/riverswim.html").read_text()


def _has_pictures_that_follow_its_colours(site: Path) -> None:
    page = (site / "concepts/trust.html").read_text()
    assert page.count('class="fig"') == 2
    assert "var(--ink)" in page


def _kinds(kind: type[Exception]) -> set[str]:
    return {kind.__name__}.union(*(_kinds(child) for child in kind.__subclasses__()))


def test_every_error_has_a_page_and_every_page_an_error() -> None:
    here = (errors, wire, agreement, node, coordinator)  # where the errors that users meet are defined
    ours = {name for name in _kinds(errors.ShuffleRLError) if any(hasattr(module, name) for module in here)}
    codes = ours | {"PrivacyWarning"} | {str(reason) for reason in wire.Reason}
    pages = {page.stem: page.read_text() for page in (DOCS / "errors").glob("*.md") if page.name != "index.md"}
    assert set(pages) == codes
    index = (DOCS / "errors" / "index.md").read_text()
    for code, text in pages.items():
        assert text.startswith(f"# `{code}`\n")
        assert [line for line in text.splitlines() if line.startswith("## ")] == [
            "## What it means",
            "## Why it happens",
            "## What to do",
        ]
        assert f"[`{code}`]({code}.md)" in index
    for reason in wire.Reason:
        problem = wire.ProblemError(reason, "").problem
        told = f"**{problem.title}.** HTTP status {problem.status}, problem type `{problem.type}`."
        assert told in " ".join(pages[reason].split())


def _drawn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "assets" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_script_draws() -> None:
    for draw in _drawn().PICTURES:
        picture = draw()
        assert (DOCS / "images" / f"{picture.name}.svg").read_text() == picture.text


def test_the_table_of_extras_names_them_all() -> None:
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", text, flags=re.MULTILINE)
    table = (DOCS / "install.md").read_text()
    assert "network" in extras
    assert [extra for extra in extras if f"| `{extra}` |" not in table] == []


def test_the_evidence_of_every_correction_exists() -> None:
    sections = re.split(r"^### (?=\d)", (DOCS / "corrections.md").read_text(), flags=re.MULTILINE)[1:]
    assert [int(section.split(".")[0]) for section in sections] == list(range(1, 12))
    for section in sections:
        linked = re.findall(r"\(\.\./(tests/\w+\.py)\)", section)
        named = re.findall(r"`(test_\w+)`", section)
        assert linked
        assert named
        tests = "".join((ROOT / path).read_text() for path in linked)
        assert [name for name in named if f"def {name}(" not in tests] == []
