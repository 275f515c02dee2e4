"""The whole reproduction: choose constants, run what the figures ask for, measure the machine, write the report.

The paper's own figures are run and drawn first, so that there is something to look at while the rest is run.

A folder holds `tuning/` and `runs/`, each a sweep's folder of its own, `timings/` with what was measured of this
machine, `figures/`, `summary.json` and `report.html`. Run again, it goes on where it stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shufflerl.errors import PrivacyWarning, StateMismatchError
from shufflerl.experiments import report, store, tuning
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.engine import Progress, run_cells
from shufflerl.experiments.figures import FIGURES
from shufflerl.experiments.figures.base import Evidence, Figure, Runs, Size
from shufflerl.experiments.figures.lines import SDP_PE
from shufflerl.experiments.measuring import measure

TUNING, RUNS, TIMINGS = "tuning", "runs", "timings"

#: Called with the name of a phase, its folder and how far it is.
Tell = Callable[[str, Path, Progress], None]


def reproduce(
    size: Size,
    folder: Path,
    *,
    workers: int | None = None,
    backend: str = "loky",
    tell: Tell = lambda *_: None,
    show: Callable[[Path], None] = lambda _: None,
    figures: Sequence[Figure] = FIGURES,
) -> report.Reproduction:
    """Run what `folder` does not hold yet, then write every figure and the report into it.

    The paper's own figures come first, as one picture, which `show` is called with.
    """
    refuse_foreign(folder)

    def run(name: str, cells: list[Cell]) -> Runs:
        run_cells(
            in_order(cells),
            folder / name,
            workers=workers,
            backend=backend,
            progress=partial(tell, name, folder / name),
        )
        return Runs(store.results(folder / name, cells))

    def evidence(figures: Sequence[Figure]) -> Evidence:
        families = list(dict.fromkeys(own for figure in figures for own in figure.families(size)))
        tuned = run(TUNING, tuning.cells(families, size)) if families else Runs(())
        chosen = tuning.choose(families, size, tuned)
        # Figures share cells; each is run once.
        cells = {cell.key: cell for figure in figures for cell in figure.cells(size, chosen)}
        return Evidence(size, run(RUNS, list(cells.values())), chosen)

    with warnings.catch_warnings():
        # Figures run far more users than their delta is meant for, so that the noise is the same at every K.
        warnings.simplefilter("ignore", PrivacyWarning)
        if papers := [figure for figure in figures if figure.panels]:
            show(report.write_overview(papers, evidence(papers), folder))  # before anything else is run
        found = evidence(figures)
        points = [point for figure in figures for point in figure.points(size)]
        timings = measure(points, folder / TIMINGS, partial(tell, TIMINGS, folder / TIMINGS)) if points else ()
        return report.write(figures, replace(found, timings=timings), folder)


def refuse_foreign(folder: Path) -> None:
    """StateMismatchError if a folder holds something else, such as the results of a sweep."""
    ours = {TUNING, RUNS, TIMINGS, report.FIGURES, report.SUMMARY, report.PAGE}
    names = store.listed(folder)
    strange = [name for name in names if name not in ours and not name.startswith(".")]
    if store.MANIFEST in names or (strange and not ours & set(names)):
        raise StateMismatchError(
            f"{folder} holds other files ({strange[0]}, ...) and no reproduction; choose a new or empty folder for it."
        )


def in_order(cells: list[Cell]) -> list[Cell]:
    """One cell of every kind, then those of other learners than the one that takes longest to compile, then its own.

    A kind is a learner with options that choose its code. On a cold cache workers then compile different things, and
    none of them waits for what another is compiling.
    """
    kinds: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        options = (value for value in cell.setting.learner_parameters.values() if isinstance(value, str))
        kinds.setdefault((cell.setting.learner, *options), cell)
    first = list(kinds.values())
    keys = {cell.key for cell in first}
    rest = [cell for cell in cells if cell.key not in keys]
    return first + sorted(rest, key=lambda cell: cell.setting.learner == SDP_PE.learner)
