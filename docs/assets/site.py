"""`python docs/assets/site.py FOLDER`: build the documentation site into a folder, strictly.

Pages are completed in a copy before they are built: the command line gets its reference, links into the repository
become pages, every error leads back to all errors, and pictures follow light and dark.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([\w./-]+)(#[\w-]+)?\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(((?:\.\./)*images/[^)]*\.svg)\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "sh", ".conf": "text"}


def main(site: Path) -> int:
    """Build the site; what is wrong is printed, and the exit code says that something is."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name).resolve()
        shutil.copy(ROOT / "zensical.toml", project)
        (project / "src").symlink_to(ROOT / "src")
        complete(project / "docs")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        code = subprocess.run(command, cwd=project, check=False).returncode
        if code == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(project / "site", site)
    return code


def complete(docs: Path) -> None:
    """Copy docs/ to a folder and add what the site has beside it."""
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("__pycache__"))
    (docs / "reference" / "cli.md").write_text(_command_line())
    for page in sorted((docs / "errors").glob("*.md")):
        if page.name != "index.md":
            page.write_text(f"{page.read_text()}\n[All errors](index.md)\n")
    linked: set[str] = set()
    for page in sorted(docs.rglob("*.md")):
        here = page.relative_to(docs).as_posix()
        text = _PICTURE.sub(partial(_inlined, here), page.read_text())
        page.write_text(_led(text, f"docs/{here}", here, linked))
    shown: set[str] = set()
    while linked > shown:
        path = min(linked - shown)
        shown.add(path)
        page = docs / "source" / f"{path}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_source_page(path, linked))


def _inlined(here: str, picture: re.Match[str]) -> str:
    """A drawing in the page itself, where it takes the page's colours; figures of plots keep their white ground."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), picture[1]))
    drawing = (ROOT / "docs" / path).read_text().strip()
    return f'<div class="fig-scroll">{drawing}</div>' if 'class="fig"' in drawing else picture[0]


def _led(text: str, file: str, page: str, linked: set[str]) -> str:
    """A text of a file of the repository, shown by a page of the site, with its links led to pages of the site.

    Files and folders outside of docs/ are added to those that are linked.
    """

    def led(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        if path.startswith("docs/"):
            there = path.removeprefix("docs/")
        else:
            linked.add(path)
            there = f"source/{path}.md"
        return f"]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{match[2] or ''})"

    return _LINK.sub(led, text)


def _source_page(path: str, linked: set[str]) -> str:
    """A page that shows a file, or the files of a folder; Markdown as it reads."""
    here = ROOT / path
    if here.suffix == ".md":
        return _led(here.read_text(), path, f"source/{path}.md", linked)
    files = [here] if here.is_file() else sorted(one for one in here.iterdir() if one.is_file())
    shown = [f"# `{path}`\n"]
    for file in files:
        if len(files) > 1:
            shown.append(f"## `{file.name}`\n")
        shown.append(f"````` {_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n`````\n")
    return "\n".join(shown)


def _command_line() -> str:
    """The reference of the command line, as typer writes it from the commands themselves."""
    command = [sys.executable, "-m", "typer", "shufflerl.cli", "utils", "docs", "--name", "shufflerl"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text.replace("# `shufflerl`", "# The command line", 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
