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
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)\)")
#: Figures of measurements keep their own white ground.
_PICTURE = re.compile(r"!\[[^\]]*\]\(((?:\.\./)*images/(?!reproduce|theorem)[^)]*\.svg)\)")
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
    linked: set[str] = set()
    for page in sorted(docs.rglob("*.md")):
        here = page.relative_to(docs).as_posix()
        text = page.read_text()
        linked |= {path for link in _OUTSIDE.findall(text) if (path := _target(here, link)) is not None}
        page.write_text(_completed(here, text))
    for path in sorted(linked):
        page = docs / "source" / f"{path}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_source_page(path))


def _completed(here: str, text: str) -> str:
    """A page with its links led to pages of the site, and its pictures in it, where they take its colours."""

    def led(match: re.Match[str]) -> str:
        path = _target(here, match[1])
        if path is None:
            return match[0]
        return f"]({posixpath.relpath(f'source/{path}.md', posixpath.dirname(here) or '.')})"

    def inlined(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        return f'<div class="fig-scroll">{(ROOT / "docs" / path).read_text().strip()}</div>'

    if here.startswith("errors/") and here != "errors/index.md":
        text += "\n[All errors](index.md)\n"
    return _PICTURE.sub(inlined, _OUTSIDE.sub(led, text))


def _target(page: str, link: str) -> str | None:
    """The file or folder of the repository that a link of a page leads to, if that is outside of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).exists() else path


def _source_page(path: str) -> str:
    """A page that shows a file, or the files of a folder."""
    here = ROOT / path
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
