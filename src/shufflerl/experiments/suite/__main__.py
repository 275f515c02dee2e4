"""Run the suite and write its table and figure; run again, it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shufflerl.errors import ShuffleRLError
from shufflerl.experiments import store
from shufflerl.experiments.engine import Progress, run_cells
from shufflerl.experiments.suite import definition, show
from shufflerl.experiments.suite.analysis import analyse, ranking


def main(
    out: Annotated[Path, typer.Option(help="Folder of results, table and figure.", metavar="DIR")] = Path("out/suite"),
    workers: Annotated[int | None, typer.Option(help="How many runs at a time.", show_default="all processors")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of every cell.")] = 100,
    episodes: Annotated[list[int], typer.Option(help="K; may be given several times.")] = list(definition.EPISODES),  # noqa: B006
    contenders: Annotated[
        list[str], typer.Option("--contender", help="Learner; may be given several times.", show_default="all")
    ] = list(definition.CONTENDERS),  # noqa: B006
    tuning: Annotated[
        bool, typer.Option("--tuning", help="Instead, rank UCBVI's constants on the tuning environments.")
    ] = False,
) -> None:
    """Compare the learners over all environments and budgets; with --tuning, choose a rival's constants."""
    try:
        if tuning:
            for steps in episodes:
                folder = out / f"tuning-{steps}"
                run_cells(definition.tuning_cells(steps, seeds), folder, workers=workers, progress=_say)
                for epsilon, choices in ranking(store.results(folder)).items():
                    for parameters, score in choices[:3]:
                        typer.echo(f"K = {steps:,}, {show.budget(epsilon):12} {score:6.3f}  {parameters}")
        else:
            results = out / "results"
            cells = definition.cells(episodes=episodes, contenders=contenders, seeds=seeds)
            run_cells(cells, results, workers=workers, progress=_say)
            report = analyse(store.results(results))
            table, figure = show.save(report, out)
            typer.echo(f"{table.read_text()}\nFigure: {figure}")
    except ShuffleRLError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def _say(now: Progress) -> None:
    if now.done % max(1, now.cells // 20) == 0:
        typer.echo(f"{now.done} of {now.cells} cells", err=True)


if __name__ == "__main__":
    typer.run(main)
