"""Figures that several pages show: pages have what the file has, and the file has what the code gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import figures, poisoning
from shufflerl.experiments.cells import Cell, run_cell
from shufflerl.experiments.figures import batches
from shufflerl.experiments.figures.base import lost_at_random
from shufflerl.experiments.figures.lines import OPTIMISTIC, SDP_PE, Line

FIGURES = figures.load()
#: Of lines whose runs take a moment; the others learn from the same counts.
QUICK = ("optimistic/1", "optimistic, no privacy", "SDP-PE/1", "UCBVI-JDP, planning rarely/1")
AGAIN = "docs/figures.json is of other code: `python -m bench.figures` measures it anew and writes the pages"


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.name)
def test_a_page_has_the_figures_of_the_file(page: Path) -> None:
    text = page.read_text()
    assert figures.written(text, FIGURES) == text, "`python -m bench.figures --pages` writes it anew"
    assert not re.search(r"^<!-- \w+: ", text, flags=re.MULTILINE), "a figure begins a line, which ends the paragraph"


def test_never_learning_is_one_figure_everywhere() -> None:
    never = figures.number(FIGURES["riverswim"]["values"]["never learning"]["mean"])
    assert never == figures.number(figures.EPISODES * lost_at_random(figures.ENV))
    for page in figures.pages():
        marked = re.sub(r"<!-- \w+: [^>]* -->[\d,.]+", "", page.read_text())
        assert never not in marked, f"{page}: {never} without <!-- riverswim: never learning -->"


@pytest.mark.parametrize("name", QUICK)
def test_the_first_seed_is_what_the_code_gives(name: str) -> None:
    shown = FIGURES["riverswim"]["values"][name]["first"]
    run = run_cell(Cell(figures.setting_of(FIGURES, name), figures.SEEDS[0]))
    assert run.regret == pytest.approx(shown, rel=1e-4), AGAIN


@pytest.mark.parametrize(("source", "share"), [("servers", 0.01), ("users", 0.001)])
def test_the_first_seed_with_liars_is_what_the_code_gives(source: str, share: float) -> None:
    shown = FIGURES["poisoning"]["values"][f"riverswim/{source}/{share:.1%}"]
    setting = poisoning.setting("riverswim", source, attack=shown["attack"], share=share)
    regret = run_cell(Cell(setting, poisoning.SEEDS[0])).regret
    assert regret == pytest.approx(shown["first"], rel=1e-4), AGAIN


def test_the_first_seed_by_lot_is_what_the_code_gives() -> None:
    shown = FIGURES["poisoning"]["values"]["riverswim/servers/1.0% by lot"]
    regret = run_cell(Cell(poisoning.by_lot(0.01), poisoning.SEEDS[0])).regret
    assert regret == pytest.approx(shown["first"], rel=1e-4), AGAIN


@pytest.mark.parametrize(("line", "count"), [(OPTIMISTIC, 3), (OPTIMISTIC, 10), (SDP_PE, 5)])
def test_the_first_seed_in_few_batches_is_what_the_code_gives(line: Line, count: int) -> None:
    shown = FIGURES["batches"]["values"][figures.batches_name(line, 1.0, 20_000, count)]
    run = run_cell(Cell(batches.setting(line, 1.0, 20_000, count), figures.BATCHES_SEEDS[0]))
    assert run.regret == pytest.approx(shown["first"], rel=1e-4), AGAIN
    assert run.batches == count
    assert run.distinct == pytest.approx(shown["distinct"], abs=1)


def test_intervals_hold_their_means() -> None:
    values = [own for part in FIGURES.values() for own in part["values"].values() if "low" in own]
    assert len(values) > 30
    assert all(own["low"] <= own["mean"] <= own["high"] for own in values)


def test_numbers_and_tables_are_written_where_they_stand() -> None:
    estimate = {"mean": 1234.4, "low": 1200.1, "high": 1299.6}
    known = {"riverswim": {"values": {"a/1": estimate, "b": {"mean": 8.26}}}}
    before = "x <!-- riverswim: a/1 -->9, <!-- riverswim: a/1 interval -->9 [8, 9] (<!-- riverswim: a/1 / b -->1 times)"
    after = figures.written(before, known)
    assert re.sub("<!--.*?-->", "", after) == "x 1,234, 1,234 [1,200, 1,300] (149 times)\n"
    assert figures.written(after, known) == after
    for old in ("| old |\n\n", "", "| old |\n"):
        table = figures.written(f"<!-- table costs -->\n\n{old}after\n", FIGURES)
        assert "| old |" not in table
        assert table.endswith("| nobody |\n\nafter\n")
