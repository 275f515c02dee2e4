"""The command line: thin. Everything heavy is imported by the command that needs it, so that --help is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shufflerl import __version__
from shufflerl.errors import ShuffleRLError

if TYPE_CHECKING:
    from shufflerl.experiment import Run, Setting

app = typer.Typer(
    name="shufflerl",
    help="Online reinforcement learning under shuffle differential privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def envs(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the environments and their parameters."""
    from shufflerl.envs import ENVIRONMENTS

    if as_json:
        rows = {name: {"summary": entry.summary} | ENVIRONMENTS.describe(name) for name, entry in ENVIRONMENTS}
        typer.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("environment", "what it is", "parameters", box=None, pad_edge=False)
    for name, entry in ENVIRONMENTS:
        described = ENVIRONMENTS.describe(name)
        defaults = [f"{key}={value}" for key, value in described["parameters"].items()]
        table.add_row(f"[bold]{name}[/]", entry.summary, ", ".join([*described["required"], *defaults]))
    Console().print(table)


@app.command()
def run(
    env: Annotated[str, typer.Argument(help="Environment; `shufflerl envs` lists them.", metavar="ENV")],
    learner: Annotated[str, typer.Option(help="Learner.")] = "ucbvi",
    privatizer: Annotated[str, typer.Option(help="Privatizer.")] = "none",
    episodes: Annotated[int, typer.Option(help="Episodes K, one user each.")] = 20_000,
    seeds: Annotated[int, typer.Option(help="How many seeds to run.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed; the others follow.", metavar="FIRST")] = 0,
    env_param: Annotated[
        list[str] | None, typer.Option(help="Environment parameter, repeatable.", metavar="K=V")
    ] = None,
    learner_param: Annotated[
        list[str] | None, typer.Option(help="Learner parameter, repeatable.", metavar="K=V")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Save a figure of the regret curves here.", metavar="FILE")] = None,
) -> None:
    """Run a learner on an environment and report its regret."""
    from shufflerl import checks
    from shufflerl.envs import ENVIRONMENTS
    from shufflerl.experiment import Setting, summary
    from shufflerl.learners import LEARNERS
    from shufflerl.privatizers import PRIVATIZERS

    PRIVATIZERS.entry(privatizer)
    setting = Setting(
        env=env,
        learner=learner,
        privatizer=privatizer,
        episodes=episodes,
        env_parameters=ENVIRONMENTS.parse(env, env_param or ()),
        learner_parameters=LEARNERS.parse(learner, learner_param or ()),
    )
    count, first = checks.whole("seeds", seeds, least=1), checks.whole("seed", seed, least=0)
    runs = _run_with_progress(setting, range(first, first + count), quiet=as_json)
    figures = summary(setting, runs)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _print_summary(figures)
    if plot is not None:
        from shufflerl.plots import regret_curve

        regret_curve(setting, runs, plot)
        typer.echo(f"Figure saved to {plot}", err=as_json)


def _run_with_progress(setting: Setting, seeds: range, *, quiet: bool) -> list[Run]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shufflerl.experiment import run_seeds

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(setting.env, total=setting.episodes * len(seeds))

        def show(seed: int, done: int, of: int) -> None:
            bar.update(task, completed=(seed - seeds[0]) * of + done, description=f"{setting.env}, seed {seed}")

        return list(run_seeds(setting, seeds, show))


def _print_summary(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    episodes, seeds, regret, seconds = (figures[key] for key in ("episodes", "seeds", "regret", "seconds"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_row("environment", _with_parameters(figures["env"], figures["env_parameters"]))
    table.add_row("learner", _with_parameters(figures["learner"], figures["learner_parameters"]))
    table.add_row("privatizer", figures["privatizer"])
    table.add_row("episodes", f"{episodes:,} x {seeds} seed{'s' * (seeds > 1)}")
    if regret["mean"] is None:
        table.add_row("regret", "unknown: this environment has no transition table")
    else:
        spread = "" if regret["sd"] is None else f" ± {regret['sd']:,.1f} (standard deviation over seeds)"
        table.add_row("regret", f"{regret['mean']:,.1f}{spread}")
        table.add_row("optimal value", f"{figures['optimal_value']:.4f} per episode")
    table.add_row("earned", f"{figures['reward_per_episode']:.4f} per episode")
    table.add_row("policy switches", f"{figures['switches']['mean']:,.1f}")
    table.add_row("time", f"{seconds:.2f} s, {episodes * seeds / max(seconds, 1e-9):,.0f} episodes/s")
    Console().print(table)


def _with_parameters(name: str, parameters: dict[str, Any]) -> str:
    chosen = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return f"{name} ({chosen})" if chosen else name


def main() -> None:
    """Run the command line; a mistake of the user's ends in one clear line, not in a traceback."""
    try:
        app()
    except ShuffleRLError as error:
        sys.exit(f"shufflerl: {error}")
