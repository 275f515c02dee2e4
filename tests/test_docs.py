"""The documentation site: it builds strictly, needs nothing from outside, and has a page for everything it must."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import shufflerl
from shufflerl import cli, errors
from shufflerl.network.coordinator import coordinator
from shufflerl.network.node import node
from shufflerl.network.protocol import agreement, wire

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: What a browser fetches by itself, by element; links that a reader may follow are not among it.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "image": "href"}


@pytest.mark.slow(15)
def test_the_site(tmp_path: Path) -> None:
    """One test, as building the site takes long."""
    command = [sys.executable, str(DOCS / "assets" / "site.py"), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    _fetches_nothing_from_outside(tmp_path)
    _has_every_command(tmp_path)
    _has_pages_for_links_into_the_repository(tmp_path)
    _has_pictures_that_follow_its_colours(tmp_path)
    _shows_fields_and_signatures(tmp_path)
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


def test_the_readme_says_where_to_find_it() -> None:
    """Every function of its table is defined in the file that it links, and nothing of the code is off its map."""
    find_it, map_of_code = re.split(r"\n## (?:Find it|Map of the code)\n", (ROOT / "README.md").read_text())[1:]
    links = re.findall(r"\[`([\w.]+)`\]\(src/(\S+)\.py\)", find_it)
    assert len(links) >= 12
    for name, path in links:
        owner: Any = importlib.import_module(path.replace("/", "."))
        for part in name.split(".") if name != path.rpartition("/")[2] else ():
            assert part in vars(owner), f"{path}.py does not define {name}"
            owner = vars(owner)[part]
    source = ROOT / "src" / "shufflerl"
    here = {*source.iterdir(), *(source / "network").iterdir()} - {source / "network"}
    here = {path for path in here if path.suffix in ("", ".py") and not re.search("__|_kernels", path.name)}
    linked = {ROOT / path for path in re.findall(r"\]\((src/\S+)\)", map_of_code)}
    assert here <= linked, here - linked


def test_every_page_is_in_the_navigation() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("errors/")} | {"errors/index.md", "reference/cli.md"}
    named = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(named) == sorted(pages)


def _words(page: Path) -> int:
    """Words of a page that are read: without code, and without where links lead."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return len(re.findall(r"[\w']+", re.sub(r"\]\([^)]*\)", "]", text)))


def test_every_page_is_read_in_five_minutes() -> None:
    """At 250 words a minute."""
    long = {page.relative_to(DOCS).as_posix(): n for page in DOCS.rglob("*.md") if (n := _words(page)) > 1250}
    assert not long


def _has_pages_for_links_into_the_repository(site: Path) -> None:
    assert "def learn(" in re.sub("<[^>]+>", "", (site / "source/src/shufflerl/loop.py.html").read_text())
    assert "source/src/shufflerl/loop.py.html" in (site / "tutorials/riverswim.html").read_text()


def _has_pictures_that_follow_its_colours(site: Path) -> None:
    page = (site / "concepts/trust.html").read_text()
    assert page.count('class="fig"') == 2
    assert "var(--ink)" in page
    plots = [page for page in site.rglob("*.html") if "Matplotlib v" in page.read_text()]
    assert plots == []  # they keep their white ground, as pictures


def _documented() -> list[ModuleType]:
    """The modules of the reference."""
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return [importlib.import_module(name) for name in re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)]


def _exported() -> list[Any]:
    """Classes and functions that packages name in __all__."""
    walked = pkgutil.walk_packages(shufflerl.__path__, "shufflerl.")
    packages = [shufflerl, *(importlib.import_module(one.name) for one in walked if one.ispkg)]
    return [getattr(package, name) for package in packages for name in getattr(package, "__all__", [])]


def _defined(module: ModuleType) -> list[Any]:
    """What a module defines for others."""
    named = [one for name, one in vars(module).items() if not name.startswith("_")]
    return [one for one in named if getattr(one, "__module__", None) == module.__name__]


def _expected(value: Any) -> set[str]:
    """Names of the parameters and fields of a class or function."""
    fields = {name for name in getattr(value, "__annotations__", {}) if inspect.isclass(value)}
    ours = inspect.isfunction(value) or dataclasses.is_dataclass(value) or "__init__" in vars(value)
    made = ours and not getattr(value, "_is_protocol", False)
    parameters = set(inspect.signature(value).parameters) if made else set()
    return {name for name in fields | parameters if not name.startswith("_")}


def _shows_fields_and_signatures(site: Path) -> None:
    """Of every public class and function of the modules in the reference, and of all that packages export."""
    sections: dict[str, str] = {}
    for page in (site / "reference").glob("*.html"):
        text = re.sub(r'<details class="mkdocstrings-source.*?</details>', "", page.read_text(), flags=re.DOTALL)
        parts = re.split(r'<h\d id="(shufflerl[\w.]*)"', text)
        sections |= dict(zip(parts[1::2], parts[2::2], strict=True))
    values = [*_exported(), *(one for module in _documented() for one in _defined(module))]
    values = [one for one in values if inspect.isclass(one) or inspect.isfunction(one)]
    assert len(values) > 250
    missing = []
    for value in values:
        name = f"{value.__module__}.{value.__qualname__}"
        shown = re.sub("<[^>]+>", "", sections.get(name, ""))
        words = set(re.findall(r"(\w+)(?=[:=,)\s])", shown))
        missing += [name] if name not in sections else [f"{name}: {one}" for one in _expected(value) - words]
    assert not missing, missing


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
        linked = re.findall(r"\(\.\./(tests/[\w/]+\.py)\)", section)
        named = re.findall(r"`(test_\w+)`", section)
        assert linked
        assert named
        tests = "".join((ROOT / path).read_text() for path in linked)
        assert [name for name in named if f"def {name}(" not in tests] == []


def test_the_version_is_the_same_everywhere() -> None:
    """In the package, its metadata, the citation and the changelog, whose date is the citation's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[0] == (shufflerl.__version__, str(citation["date-released"]))
    assert project["version"] == citation["version"] == shufflerl.__version__


def test_the_changelog_has_versions_and_categories() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert versions[0].startswith("Unreleased\n")
    numbers = [tuple(map(int, version.split()[0].split("."))) for version in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)
    for version in versions:
        order = [name for name in ("Added", "Changed", "Removed", "Fixed", "Security") if f"### {name}\n" in version]
        assert re.findall(r"^### (.+)$", version, flags=re.MULTILINE) == order
    dates = [version.splitlines()[0].split(" - ")[1] for version in versions[1:]]
    assert dates == sorted(dates, reverse=True)


def test_the_workflow_tests_every_python_that_the_package_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert workflow["strategy"]["matrix"]["python"] == named
    assert {"run": "make test"} in workflow["steps"]


def test_hooks_are_programs_of_ours() -> None:
    """Nothing is fetched: every hook is local, and what it calls is in the environment that `make install` makes."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [one["repo"] for one in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        assert hook["language"] == "system"
        assert (Path(sys.executable).parent / Path(hook["entry"].split()[0]).name).exists(), hook["entry"]


def test_research_notes_say_when_and_against_what_they_were_measured() -> None:
    index = (ROOT / "research" / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[[^]]+\]\((\S+)\) \| \d+ \w+ 20\d\d \| ([0-9a-f]{7}) \|$", index, flags=re.MULTILINE))
    pages = {page.name: page.read_text() for page in (ROOT / "research").glob("*.md") if page.name != "README.md"}
    assert set(rows) == set(pages)
    for name, text in pages.items():
        assert re.match(r"# .+\n\n\d+ \w+ 20\d\d, against", text), name
        assert rows[name] in text
