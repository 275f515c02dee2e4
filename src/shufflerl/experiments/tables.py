"""Comparisons as tables: for the terminal, and as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from shufflerl.errors import InvalidInputError
from shufflerl.experiments.compare import Group, Row
from shufflerl.experiments.store import write_whole

COLUMNS = ("problem", "setting", "seeds", "mean", "low", "high", "sd", "area", "switches", "p")


def figures(groups: Sequence[Group]) -> list[list[str]]:
    """A row per setting under `COLUMNS`, numbers in full."""
    return [[group.title, row.label, *_numbers(row)] for group in groups for row in group.rows]


def _numbers(row: Row) -> list[str]:
    area = None if row.area is None else row.area.mean
    numbers = (row.score.mean, row.score.low, row.score.high, row.sd, area, row.switches, row.adjusted)
    return [str(len(row.seeds)), *("" if number is None else f"{number:.6g}" for number in numbers)]


def shown(row: Row, measure: str) -> tuple[str, ...]:
    """A row for people: label, mean, interval, switches, p."""
    form = ",.1f" if measure == "regret" else ".4f"
    low, high = row.score.low, row.score.high
    between = "" if low is None or high is None else f"{low:{form}} to {high:{form}}"
    p = "best" if row.adjusted is None else f"{row.adjusted:.2g}" if row.adjusted >= 1e-3 else "<0.001"
    return row.label, f"{row.score.mean:{form}}", between, f"{row.switches:,.1f}", p


def text(groups: Sequence[Group], suffix: str) -> str:
    """All groups as .csv (numbers in full), .md or .tex."""
    if suffix == ".csv":
        sink = io.StringIO()
        csv.writer(sink, lineterminator="\n").writerows([COLUMNS, *figures(groups)])
        return sink.getvalue()
    lines: list[str] = []
    for group in groups:
        head = ("setting", group.measure, "95% interval", "switches", "p")
        rows = [shown(row, group.measure) for row in group.rows]
        lines += _markdown(group.title, head, rows) if suffix == ".md" else _latex(group.title, head, rows)
    return "\n".join(lines) + "\n"


def _markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ("---", *["---:"] * (len(head) - 1))
    return [f"**{title}**", "", *(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)), ""]


def _latex(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def escaped(cells: Sequence[str]) -> str:
        words = (cell.replace("%", r"\%").replace("_", r"\_").replace("ε", r"$\varepsilon$") for cell in cells)
        return " & ".join(word.replace("<", "$<$") for word in words) + r" \\"

    return [
        rf"% {title}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\hline",
        escaped(head),
        r"\hline",
        *map(escaped, rows),
        r"\hline",
        r"\end{tabular}",
        "",
    ]


SUFFIXES = (".csv", ".md", ".tex")


def check_path(path: Path) -> None:
    """Refuse a kind of file that no table is written as."""
    if path.suffix not in SUFFIXES:
        raise InvalidInputError(f"Cannot write {path.name!r}. Use a name ending in {', '.join(SUFFIXES)}.")


def save(groups: Sequence[Group], path: Path) -> None:
    """Write the table, whole or not at all."""
    write_whole(path, text(groups, path.suffix).encode())
