"""The command line: thin. Everything heavy is imported by the command that needs it, so that --help is instant."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shufflerl import __version__
from shufflerl.errors import MissingExtraError, ShuffleRLError
from shufflerl.experiments import commands
from shufflerl.network import commands as network_commands
from shufflerl.options import DELTA_HELP, AsJson, NoiseBy, count

if TYPE_CHECKING:
    from collections.abc import Callable

    from shufflerl.experiments.setting import Run, Setting
    from shufflerl.privacy.audit import System
    from shufflerl.registry import Registry

app = typer.Typer(
    name="shufflerl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def to_json(value: Any) -> str:
    """The value as JSON, which knows no infinity: null stands for it, as where no epsilon can be certified."""

    def finite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: finite(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [finite(item) for item in part]
        return None if isinstance(part, float) and math.isinf(part) else part

    return json.dumps(finite(value), allow_nan=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Online reinforcement learning under shuffle differential privacy."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def envs(as_json: AsJson = False) -> None:
    """List the environments and their parameters."""
    from shufflerl.envs import ENVIRONMENTS

    _list(ENVIRONMENTS, as_json)


@app.command()
def learners(as_json: AsJson = False) -> None:
    """List the learners and their parameters."""
    from shufflerl.learners import LEARNERS

    _list(LEARNERS, as_json)


@app.command()
def privatizers(as_json: AsJson = False) -> None:
    """List the privatizers and their parameters."""
    from shufflerl.privatizers import PRIVATIZERS

    _list(PRIVATIZERS, as_json)


def _list(registry: Registry, as_json: bool) -> None:
    rows = {name: {"summary": registry.summary(name)} | registry.describe(name) for name, _ in registry}
    if as_json:
        typer.echo(to_json(rows))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    for name, row in rows.items():
        defaults = [f"{key}={value}" for key, value in row["parameters"].items()]
        parameters = escape(", ".join([*row["required"], *defaults]))
        table.add_row(name, escape(row["summary"]) + (f"\n[dim]{parameters}[/]" if parameters else ""))
    Console().print(table)
    typer.echo("Your own: module:name, of a module in this folder or that Python finds.")


@app.command()
def run(
    env: Annotated[
        str, typer.Argument(help="Environment; `shufflerl envs` lists them, module:name is yours.", metavar="ENV")
    ],
    learner: Annotated[
        str | None,
        typer.Option(
            help="Learner; `shufflerl learners` lists them, module:name is yours.",
            show_default="that of tables",
        ),
    ] = None,
    privatizer: Annotated[
        str | None, typer.Option(help="Privatizer, likewise.", show_default="shuffle with --epsilon, none without")
    ] = None,
    episodes: Annotated[int, count("Episodes K, one user each; 1e6 is a number too.")] = 20_000,
    seeds: Annotated[int, count("How many seeds to run.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed; the others follow.", metavar="FIRST")] = 0,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of every user; not with `none`.")] = None,
    delta: Annotated[float | None, typer.Option(help=DELTA_HELP, show_default="1e-5")] = None,
    env_param: Annotated[
        list[str] | None, typer.Option(help="Environment parameter, repeatable.", metavar="K=V")
    ] = None,
    learner_param: Annotated[
        list[str] | None, typer.Option(help="Learner parameter, repeatable.", metavar="K=V")
    ] = None,
    privatizer_param: Annotated[
        list[str] | None, typer.Option(help="Privatizer parameter, repeatable.", metavar="K=V")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Save a figure of the regret curves here.", metavar="FILE")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print what the first seed did, stage by stage.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Tell the most telling of these stages in words.")] = False,
) -> None:
    """Run a learner on an environment and report its regret."""
    from shufflerl import checks
    from shufflerl.envs import ENVIRONMENTS
    from shufflerl.experiments.setting import Setting, summary
    from shufflerl.learners import DEFAULT, LEARNERS
    from shufflerl.privatizers import PRIVATIZERS

    learner = learner or DEFAULT
    if privatizer is None:
        privatizer = "none" if epsilon is None else "shuffle"
    if privatizer != "none" and delta is None:
        delta = 1e-5
    setting = Setting(
        env=env,
        learner=learner,
        privatizer=privatizer,
        episodes=episodes,
        epsilon=epsilon,
        delta=delta,
        env_parameters=ENVIRONMENTS.parse(env, env_param or ()),
        learner_parameters=LEARNERS.parse(learner, learner_param or ()),
        privatizer_parameters=PRIVATIZERS.parse(privatizer, privatizer_param or ()),
    )
    count, first = checks.whole("seeds", seeds, least=1), checks.whole("seed", seed, least=0)
    if plot is not None:
        from shufflerl.experiments.curves import check_plot, regret_curve

        check_plot(setting, first, plot)
    _tell_time(setting, first, count)
    runs = run_with_progress(setting, range(first, first + count), quiet=as_json)
    if plot is not None:
        regret_curve(setting, runs, plot)
    figures = summary(setting, runs)
    if as_json:
        typer.echo(to_json(figures))
    else:
        _print_summary(figures)
        if trace or explain:
            _print_stages(runs[0].records, table=trace, words=explain)
    if plot is not None:
        typer.echo(f"Figure saved to {plot}", err=as_json)


for command in (commands.sweep, commands.compare, commands.reproduce, *network_commands.COMMANDS):
    app.command()(command)


Horizon = Annotated[int, typer.Option(help="Steps in an episode, H.")]
Delta = Annotated[float, typer.Option(help=DELTA_HELP)]
Gamma = Annotated[float, typer.Option(help="Fraction of users assumed to add their noise, in (0, 1].")]
Source = Annotated[NoiseBy, typer.Option("--noise", help="Who adds it: all users together, or each server alone.")]
States = Annotated[int, typer.Option(help="Number of states, X.")]
Actions = Annotated[int, typer.Option(help="Number of actions, A.")]


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Privacy budget of every user.")] = 1.0,
    delta: Delta = 1e-5,
    horizon: Horizon = 6,
    states: States = 4,
    actions: Actions = 2,
    users: Annotated[int, count("Users in a batch; only the number of messages depends on it.")] = 1000,
    gamma: Gamma = 1.0,
    noise: Source = "users",
    as_json: AsJson = False,
) -> None:
    """Say how much noise a budget needs, by exact accounting and by the paper's constants."""
    from shufflerl.privacy.certificate import at_most
    from shufflerl.privacy.sizing import size_up

    figures = size_up(
        epsilon, delta, horizon=horizon, states=states, actions=actions, users=users, gamma=gamma, noise=noise
    )
    if as_json:
        typer.echo(to_json(figures))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "exact accounting", "the paper's constants", box=None, pad_edge=False)
    paper: dict[str, Any] = figures["paper"]
    table.add_row("[bold]budget epsilon[/]", *[at_most(figures["epsilon"])] * 2)
    rows: dict[str, tuple[str, Callable[[Any], str]]] = {
        "true_epsilon": ("true epsilon", at_most),
        "delta": ("delta", "{:g}".format),
        "changed_counters": ("counters a replaced user changes", "{:,}".format),
        # Rounded up: who announces what is printed keeps to the budget.
        "lambda": ("noise tags per counter (lambda)", lambda mean: f"{math.ceil(10 * mean) / 10:,.1f}"),
        "noise_sd": ("noise standard deviation", "{:,.1f}".format),
        "law": ("law of the noise tags", str),
        "messages_per_user": ("messages per user", "{:,.1f}".format),
    }
    for key, (label, text) in rows.items():
        table.add_row(f"[bold]{label}[/]", *(_figure(column[key], text) for column in (figures, paper)))
    Console().print(table)


def _figure(value: float | str | None, text: Callable[[Any], str]) -> str:
    if value is None:
        return "beyond what can be drawn"
    return "none can be certified" if value == math.inf else text(value)


@app.command()
def certify(
    poisson_mean: Annotated[
        float | None, typer.Option("--lambda", help="Mean number of Poisson noise tags per counter and batch.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Scale of discrete Laplace noise by the servers.")] = None,
    shift: Annotated[int | None, typer.Option(help="Where its dummies are cut: from 0 to twice this many.")] = None,
    delta: Delta = 1e-5,
    horizon: Horizon = 6,
    gamma: Gamma = 1.0,
    noise: Source = "users",
    participations: Annotated[int, typer.Option(help="Batches that one user may take part in.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print the certificate of a given noise in the shuffle model."""
    from shufflerl.privacy.sizing import certificate_of

    certificate = certificate_of(
        poisson_mean,
        delta,
        horizon=horizon,
        gamma=gamma,
        participations=participations,
        noise=noise,
        scale=scale,
        shift=shift,
    )
    if as_json:
        typer.echo(to_json(certificate.as_dict()))
    elif math.isinf(certificate.epsilon):
        typer.echo(
            f"No epsilon can be certified at delta {delta:g}: with so little noise a counter may be as low as it can "
            "be, which gives a user away, with a higher probability than delta. Use a larger lambda or shift, or delta."
        )
    else:
        typer.echo(str(certificate))


#: What the audit attacks.
AuditPath = Literal["all", "protocol", "servers", "tags", "sums", "servers-tags", "servers-sums"]


@app.command()
def audit(
    path: Annotated[
        AuditPath,
        typer.Option(
            help="The protocol in memory or the networked system by its transport, noise by users or by servers."
        ),
    ] = "all",
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget to audit at; unless given, 1, and 4 where every tag is sealed.")
    ] = None,
    delta: Delta = 1e-5,
    samples: Annotated[
        int | None, typer.Option(help="Transcripts of each of two neighbouring batches; of all paths, the protocol's.")
    ] = None,
    users: Annotated[int, typer.Option(help="Users of a batch.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Attack the system's own code and report the privacy loss that can be shown; fails if that exceeds the claim."""
    from shufflerl.privacy import audit as auditing
    from shufflerl.privacy.accounting import Budget

    in_memory: list[System] = [auditing.InMemory(), auditing.ServersInMemory()]
    systems = [system for system in in_memory if path in ("all", system.path)]
    missing = None
    try:
        systems += [] if systems and path != "all" else network_systems(path)
    except MissingExtraError as reason:
        if path != "all":
            raise
        missing = f"Not attacked: tags, sums, servers-tags, servers-sums. {reason}"
    reports = []
    for system in systems:
        budget = Budget(system.epsilon if epsilon is None else epsilon, delta)
        # What the protocol in memory plays in seconds would take the network's seals an hour.
        asked = samples if system is systems[0] else None
        reports.append(auditing.audit(budget, samples=asked, users=users, system=system))
        if not as_json:
            typer.echo(f"{reports[-1]}\n")
    passed = all(report.passed for report in reports)
    if as_json:
        each = [report.as_dict() for report in reports]
        typer.echo(to_json(each[0] | {"passed": passed, "audits": each, "not_attacked": missing}))
    elif missing is not None:
        typer.echo(missing)
    if not passed:
        raise typer.Exit(1)


def network_systems(path: AuditPath) -> list[System]:
    """The paths of the networked system that were asked for."""
    from shufflerl.network import check_installed

    check_installed()
    from shufflerl.network.audit import Network

    systems = [Network(transport, noise) for noise in ("users", "servers") for transport in ("tags", "sums")]
    return [system for system in systems if path in ("all", system.path)]


def _tell_time(setting: Setting, first: int, seeds: int) -> None:
    """Of a large problem, before it begins."""
    from shufflerl.experiments.setting import expected_seconds
    from shufflerl.learners import LEARNERS

    seconds = expected_seconds(setting, first)
    if seconds is not None and seconds * seeds > 10:
        sized = "batches" in LEARNERS.parameters(setting.learner)
        fewer = "--learner-param batches=10" if sized else "--learner ucbvi --learner-param batch=1000"
        long = f"{seconds * seeds:.0f} seconds" if seconds * seeds < 120 else f"{seconds * seeds / 60:.0f} minutes"
        typer.echo(
            f"A large problem: by its first batch this will take at most about {long}. Fewer and larger batches take "
            f"less, as with {fewer}.",
            err=True,
        )


def run_with_progress(setting: Setting, seeds: range, *, quiet: bool) -> list[Run]:
    """Run a setting once for each seed, beneath a bar of the episodes played."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shufflerl.compiling import when_compiling
    from shufflerl.experiments.setting import run_seeds

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(setting.env, total=setting.episodes * len(seeds))

        def show(seed: int, done: int, of: int) -> None:
            bar.update(task, completed=(seed - seeds[0]) * of + done, description=f"{setting.env}, seed {seed}")

        with when_compiling(lambda: bar.update(task, description="compiling (first run only)", refresh=True)):
            return list(run_seeds(setting, seeds, show))


def _print_summary(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from shufflerl.experiments.setting import described
    from shufflerl.privacy.certificate import at_most

    episodes, seeds, regret, seconds = (figures[key] for key in ("episodes", "seeds", "regret", "seconds"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_row("environment", described(figures["env"], figures["env_parameters"]))
    table.add_row("learner", described(figures["learner"], figures["learner_parameters"]))
    table.add_row("privatizer", described(figures["privatizer"], figures["privatizer_parameters"]))
    if (certificate := figures["certificate"]) is not None:
        guarantee = f"({at_most(certificate['epsilon'])}, {at_most(certificate['delta'], 6)})-differential privacy"
        table.add_row("guarantee", f"{guarantee}, {certificate['model']} model")
        table.add_row("noise", f"sd {certificate['noise_sd']:.4g} {certificate['noise_on']}")
    table.add_row("episodes", f"{episodes:,} x {seeds} seed{'s' * (seeds > 1)}")
    own = figures["own_units"]

    def owns(key: str, form: str) -> str:
        return "" if own is None else f", {own[key]:{form}} in its own units"

    if own is not None:
        table.add_row(
            "own units", f"rewards of {own['reward_low']:g} to {own['reward_high']:g}; inside they are 0 to 1"
        )
    if regret["mean"] is None:
        table.add_row("regret", "unknown: this environment has no transition table")
    else:
        spread = "" if regret["sd"] is None else f" ± {regret['sd']:,.1f} (standard deviation over seeds)"
        also = "" if own is None else f", {own['regret']['mean']:,.1f} in its own units"
        table.add_row("regret", f"{regret['mean']:,.1f}{spread}{also}")
        table.add_row("optimal value", f"{figures['optimal_value']:.4f} per episode{owns('optimal_value', '.4f')}")
    if (earned := figures["reward_per_episode"]) is not None:
        seen = " (what users got: the experimenter's figure, no part of the guarantee)" * (regret["mean"] is None)
        table.add_row("earned", f"{earned:.4f} per episode{owns('reward_per_episode', '.4f')}{seen}")
    table.add_row("policy switches", f"{figures['switches']['mean']:,.1f}")
    table.add_row("time", f"{seconds:.2f} s, {episodes * seeds / max(seconds, 1e-9):,.0f} episodes/s")
    Console().print(table)


def _print_stages(records: list[dict[str, Any]], *, table: bool, words: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from shufflerl.learners.stages import StageRecord

    console, stages = Console(), [StageRecord(**record) for record in records]
    if not stages:
        console.print("\nThis learner does not proceed in stages; there is nothing to trace.")
        return
    if table:
        titles = ("stage", "users", "log2 policies", "coverage", "radius", "best value", "eliminated")
        rows = Table(*titles, box=None, pad_edge=False, title="\nStages of the first seed", title_justify="left")
        for stage in stages:
            coverage = "" if stage.coverage_ratio is None else f"{stage.coverage_ratio:.3f}"
            radius = "per action" if stage.radius is None else f"{stage.radius:.4g}"
            gone = f"to 2^{stage.log2_policies - stage.eliminated:.1f}" if stage.eliminated else ""
            left = f"{stage.log2_policies:.1f}"
            rows.add_row(str(stage.stage), f"{stage.users:,}", left, coverage, radius, f"{stage.best_value:.4f}", gone)
        console.print(rows)
    if words:
        console.print(f"\n{max(stages, key=lambda stage: stage.eliminated).in_words()}", soft_wrap=True)


def without_colours(message: object) -> str:
    """A message without the colours that libraries put into their warnings."""
    return re.sub(r"\x1b\[[\d;]*m", "", str(message))


def main() -> None:
    """Run the command line; a mistake of the user's ends in one clear line, not in a traceback."""
    warnings.showwarning = lambda message, *_: print(f"shufflerl: warning: {without_colours(message)}", file=sys.stderr)
    try:
        app()
    except ShuffleRLError as error:
        sys.exit(f"shufflerl: {error}")
    except MemoryError:
        sys.exit("shufflerl: This needs more memory than there is; use fewer states, actions or steps.")
