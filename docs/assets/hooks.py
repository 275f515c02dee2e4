"""What the site adds to its pages: links into the repository become pages, pictures follow light and dark."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)\)")
_PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]*images/(?!reproduce|theorem)[^"]*\.svg)"\s*/?>')
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "sh", ".conf": "text"}


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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command line, and a page for every file or folder of the repository that a page links to."""
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    linked: set[str] = set()
    for file in files.documentation_pages():
        found = (_target(file.src_uri, link) for link in _OUTSIDE.findall(file.content_string))
        linked |= {path for path in found if path is not None}
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links into the repository to those pages, and every error back to all errors."""
    here = page.file.src_uri
    if here.startswith("errors/") and not page.is_index:
        markdown += "\n[All errors](index.md)\n"

    def led(match: re.Match[str]) -> str:
        path = _target(here, match[1])
        if path is None:
            return match[0]
        return f"]({posixpath.relpath(f'source/{path}.md', posixpath.dirname(here) or '.')})"

    return _OUTSIDE.sub(led, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put our own pictures into the page itself, where they take its colours."""

    def inlined(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), match[2]))
        return f'<div class="fig-scroll">{Path(config.docs_dir, path).read_text()}</div>'

    return _PICTURE.sub(inlined, html)
