"""The commands `sweep`, `compare` and `reproduce`: thin, like the rest of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shufflerl.options import AsJson

if TYPE_CHECKING:
    from rich.progress import TaskID

    from shufflerl.experiments.claims import Claim
    from shufflerl.experiments.compare import Group
    from shufflerl.experiments.engine import Progress


Workers = Annotated[
    int | None, typer.Option(help="How many runs at a time.", metavar="N", show_default="all processors")
]
On = Annotated[Literal["loky", "ray"], typer.Option(help="Processes of this machine, or a Ray cluster.")]


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep, as TOML; see docs/sweeps.md.", metavar="FILE")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results.", metavar="DIR", show_default="out/ and FILE's name")
    ] = None,
    workers: Workers = None,
    backend: On = "loky",
) -> None:
    """Run every combination in a file; run again, it goes on where it stopped. A changed file adds to what is there."""
    from shufflerl.experiments.engine import run_cells
    from shufflerl.experiments.sweep import read

    cells = read(file)
    folder = Path("out") / file.stem if out is None else out
    with _progress(folder) as tell:
        show = partial(tell, file.name, folder)
        end = run_cells(cells, folder, workers=workers, backend=backend, progress=show)
    more = f" {end.others} others are there too." if end.others else ""
    typer.echo(f"{end.done} cells in {folder}: {end.resumed} were there, {end.done - end.resumed} were run.{more}")


@contextmanager
def _progress(folder: Path) -> Iterator[Callable[[str, Path, Progress], None]]:
    """Bars with the time left, one for each name told of; a stop by the user ends in a sentence."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as ProgressBar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    # One cell may take long: time left is estimated over an hour, not over half a minute.
    with ProgressBar(*columns, console=console, speed_estimate_period=3600, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(name: str, where: Path, now: Progress) -> None:
            if name not in tasks:
                _say_what_is_there(now, where)
                tasks[name] = bar.add_task(name, total=now.cells, completed=now.done)
            bar.update(tasks[name], completed=now.done, total=now.cells)

        try:
            yield tell
        except KeyboardInterrupt:
            typer.echo(f"Stopped; what is done is in {folder}, and the same command goes on from there.", err=True)
            raise typer.Exit(130) from None


def _say_what_is_there(now: Progress, folder: Path) -> None:
    for path, reason in now.damaged.items():
        typer.echo(f"Damaged, will be recomputed: {path} ({reason})", err=True)
    if now.resumed:
        typer.echo(f"Resuming {folder}: {now.resumed} of {now.cells} cells are done already.", err=True)


def reproduce(
    quick: Annotated[bool, typer.Option("--quick", help="A small version, in under a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report.", metavar="DIR", show_default="out/reproduce[-quick]")
    ] = None,
    workers: Workers = None,
    backend: On = "loky",
) -> None:
    """Make every figure and table of the paper and ours, and say what holds; run again, it goes on where it stopped."""
    from shufflerl.experiments.figures.base import FULL, QUICK
    from shufflerl.experiments.reproduce import reproduce as run

    folder = out or Path("out") / ("reproduce-quick" if quick else "reproduce")
    with _progress(folder) as tell:
        size = QUICK if quick else FULL
        end = run(size, folder, workers=workers, backend=backend, tell=tell, show=_say_first_picture)
    _print_claims(end.claims)
    typer.echo(f"Report: {end.page}")


def _say_first_picture(path: Path) -> None:
    typer.echo(f"The paper's own figures: {path}")


def _print_claims(claims: tuple[Claim, ...]) -> None:
    """A line each; the report has the numbers."""
    for claim in claims:
        typer.echo(f"{claim.outcome.short:<17}  {claim.short}")


def compare(
    results: Annotated[Path, typer.Argument(help="The folder a sweep wrote.", metavar="RESULTS")],
    plot: Annotated[Path | None, typer.Option(help="Save a figure here: regret curves, or --y over --x.")] = None,
    x: Annotated[
        str | None,
        typer.Option(help="Axis: episodes, epsilon, X, A, H, batches, switches, or a parameter as learner.batches."),
    ] = None,
    y: Annotated[str, typer.Option(help="What is shown over --x, likewise.")] = "regret",
    facet: Annotated[str | None, typer.Option(help="A panel for each of its values, likewise.")] = None,
    log: Annotated[str, typer.Option(help="Logarithmic axes: x, y or xy.")] = "",
    band: Annotated[
        Literal["sd", "ci"], typer.Option(help="Bands of the figure: standard deviation, or 95% interval of the mean.")
    ] = "sd",
    table: Annotated[Path | None, typer.Option(help="Save the table here, as .csv, .md or .tex.")] = None,
    per_budget: Annotated[
        bool, typer.Option("--per-budget", help="Compare only settings of the same privacy budget.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the settings of a sweep: means, intervals, areas under the curve, paired tests."""
    from shufflerl.experiments import compare as comparison
    from shufflerl.experiments import store, tables

    if plot is not None:
        from shufflerl.plots import check_path

        check_path(plot)
    if table is not None:
        tables.check_path(table)
    runs = store.results(results)
    groups = comparison.compare(runs, per_budget=per_budget)
    if plot is not None:
        from shufflerl.experiments import chart
        from shufflerl.plots import save_figure

        drawn = chart.curves(groups, band) if x is None else chart.chart(runs, x, y=y, facet=facet, log=log, kind=band)
        save_figure(drawn, plot)
    if table is not None:
        tables.save(groups, table)
    if as_json:
        typer.echo(json.dumps({"groups": [group.as_dict() for group in groups]}, allow_nan=False))
    else:
        _print_groups(groups)
    for path, what in ((plot, "Figure"), (table, "Table")):
        if path is not None:
            typer.echo(f"{what} saved to {path}", err=as_json)


def _print_groups(groups: list[Group]) -> None:
    """One table for all, which fits 80 columns."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from shufflerl.experiments.tables import shown

    measures = {group.measure for group in groups}
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("", ratio=1, overflow="fold")
    for column in (measures.pop() if len(measures) == 1 else "mean", "95% interval", "switches", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        count = len(group.rows[0].seeds)
        table.add_row(f"[bold]{escape(group.title)}, {count} seed{'s' * (count > 1)}[/]")
        for row in group.rows:
            table.add_row(*shown(row, group.measure))
    Console().print(table)
    for group in groups:
        if len(group.rows) > 1 and group.least_p_possible > 0.05:
            typer.echo(
                f"So few seeds cannot show a difference among {len(group.rows)} settings:\n"
                f"the smallest p possible is {group.least_p_possible:.2g}. Use more seeds."
            )
    typer.echo("Intervals: 95% bootstrap. p: paired permutation test against the best of the")
    typer.echo("same problem, corrected for all its pairs (Holm).")
