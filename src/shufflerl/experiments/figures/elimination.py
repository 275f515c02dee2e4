"""The constants of the proof, closer: the policies left, the first elimination and the price of budgets against K.

The documentation's figure, no part of a reproduction: `python -m shufflerl.experiments.figures [OUT]` draws it in a
minute and prints its table.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.counts import CountQuery
from shufflerl.errors import InvalidInputError, PrivacyWarning
from shufflerl.estimation import precision
from shufflerl.experiments.figures.base import lost_at_random, mdp_of
from shufflerl.experiments.figures.bounds import leading
from shufflerl.experiments.figures.lines import DELTA
from shufflerl.experiments.figures.theorem import ENV
from shufflerl.experiments.setting import Setting, prepare
from shufflerl.history import History
from shufflerl.learners.radius import PaperRadius
from shufflerl.learners.sdp_pe import SDPPE
from shufflerl.loop import learn
from shufflerl.mdp import MDP
from shufflerl.noise import NoNoise
from shufflerl.privacy.accounting import Budget, calibrate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from rich.table import Table

#: Episodes: 1e5 to 1e17 in half decades.
EPISODES = tuple(round(10 ** (half / 2)) for half in range(10, 35))
#: Privacy budgets; None is no privacy.
EPSILONS: tuple[float | None, ...] = (None, 1.0)
SEEDS = (1, 2, 3)
#: Budgets whose price is compared at the largest K.
PRICED: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)

#: log2 of the optimal policies: 4 tie, and each may act in any of 2^6 ways where no user can get.
ONLY_OPTIMA = 8

CAPTION = (
    "What to see: with the constants of the proof nothing is eliminated at first and every episode costs as much as "
    "the one before. Then regret bends, and once only optimal policies are left it hardly grows: by the logarithm of K "
    "in the radius. Privacy raises E, how far a count may be off, and with it delays the bend and lifts the plateau; "
    "it costs nothing after that, so its price is additive, and it is about proportional to E."
)

_GREY = "#555555"


@dataclass(frozen=True)
class Row:
    """The runs of one K and epsilon, one for each seed; figures are means unless they say otherwise."""

    episodes: int
    epsilon: float | None
    regret: float
    log2_policies: float  # left in the end
    first_elimination: float | None  # episodes played by then; None if some run never eliminated
    switches: int  # the most
    precision: float  # E: how far any count may be off
    optimum_kept: bool  # whether every run kept an optimal policy


def sweep(
    episodes: Sequence[int] = EPISODES,
    epsilons: Sequence[float | None] = EPSILONS,
    seeds: Sequence[int] = SEEDS,
    policies: str = "enumerated",
) -> list[Row]:
    """Run the paper's constants for every budget and K; one row for each, budget by budget."""
    return [_row(k, epsilon, seeds, policies) for epsilon in epsilons for k in episodes]


def _row(episodes: int, epsilon: float | None, seeds: Sequence[int], policies: str) -> Row:
    mdp, runs = mdp_of(ENV), [_run(episodes, epsilon, seed, policies) for seed in seeds]
    learners = [learner for _, learner in runs]
    firsts = [first for learner in learners if (first := _first_elimination(learner)) is not None]
    return Row(
        episodes=episodes,
        epsilon=epsilon,
        regret=float(np.mean([history.total_regret for history, _ in runs])),
        log2_policies=float(np.mean([learner.policies.log2_size for learner in learners])),
        first_elimination=float(np.mean(firsts)) if len(firsts) == len(runs) else None,
        switches=max(history.switches for history, _ in runs),
        precision=_precision(learners[0], epsilon),
        optimum_kept=all(_keeps_optimum(learner, mdp) for learner in learners),
    )


def _run(episodes: int, epsilon: float | None, seed: int, policies: str) -> tuple[History, SDPPE]:
    private = epsilon is not None
    literal = Setting(
        env=ENV,
        learner="sdp-pe",
        privatizer="shuffle" if private else "none",
        episodes=episodes,
        epsilon=epsilon,
        delta=DELTA if private else None,
        learner_parameters={"constants": "paper", "policies": policies},
    )
    with warnings.catch_warnings():
        # So many users would be promised a smaller delta; one for all K keeps their E comparable.
        warnings.simplefilter("ignore", PrivacyWarning)
        made = prepare(literal, seed)
    assert isinstance(made.learner, SDPPE)
    return learn(made.learner, made.population, made.privatizer), made.learner


def _first_elimination(learner: SDPPE) -> int | None:
    """Episodes played by the end of the first stage that eliminated something."""
    for stage, record in enumerate(learner.trace):
        if record.eliminated > 0:
            return sum(learner.stages[: stage + 1])
    return None


def _precision(learner: SDPPE, epsilon: float | None) -> float:
    """E of the releases of fine exploration, on which policies are judged."""
    assert isinstance(learner.radius, PaperRadius)
    query = CountQuery.everything(learner.problem)
    noise = NoNoise() if epsilon is None else calibrate(Budget(epsilon, DELTA), query.changed_counters)
    return precision(noise, query, learner.radius.failure)


def _keeps_optimum(learner: SDPPE, mdp: MDP) -> bool:
    _, value = learner.policies.best(mdp.transitions, mdp.rewards, mdp.start, np.random.default_rng(0))
    return math.isclose(value, mdp.optimal_value, abs_tol=1e-12)


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    columns = ("K", "epsilon", "regret", "log2 left", "first gone", "switches", "E", "optimum kept")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            f"{row.episodes:.1e}",
            "no privacy" if row.epsilon is None else f"{row.epsilon:g}",
            f"{row.regret:.2e}",
            f"{row.log2_policies:.1f}",
            "none" if row.first_elimination is None else f"{row.first_elimination:.1e}",
            str(row.switches),
            f"{row.precision:.0f}",
            "yes" if row.optimum_kept else "no",
        )
    return shown


def draw(rows: list[Row], priced: list[Row]) -> Drawing:
    """The figure: regret and policies left against K, then the price of the `priced` budgets against E.

    The first budget of the rows is the one to compare with.
    """
    from shufflerl.plots import COLOURS  # first: it says what to install where matplotlib is missing

    # isort: split
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(7.6, 9.6), layout="constrained")
    above, below, price = figure.subplots(3, 1, height_ratios=(3, 2, 2))
    below.sharex(above)
    above.tick_params(labelbottom=False)
    _draw_references(above, below, np.array(sorted({row.episodes for row in rows}), dtype=np.float64))
    budgets = [
        [row for row in rows if row.epsilon == epsilon] for epsilon in dict.fromkeys(row.epsilon for row in rows)
    ]
    for place, (own, colour) in enumerate(zip(budgets, COLOURS, strict=False)):
        width = 1.8 if place else 3.0  # the first shows beneath the others where they agree
        look: dict[str, Any] = {"color": colour, "linewidth": width, "marker": "os^D"[place], "markersize": 2.4 * width}
        episodes = [row.episodes for row in own]
        above.plot(episodes, [row.regret for row in own], label=_name(own[-1]), **look)
        below.plot(episodes, [row.log2_policies for row in own], **look)
        _mark_first_elimination(above, below, own, colour)
    for own in budgets[1:]:
        _mark_price(above, budgets[0][-1], own[-1])
    above.set(xscale="log", yscale="log", ylabel="expected regret of all K episodes")
    above.set_title("SDP-PE with the paper's constants on RiverSwim", loc="left")
    above.legend(frameon=False, loc="upper left")
    below.set(xlabel="episodes K", ylabel="log₂ of policies left", ylim=(6, 25), yticks=range(8, 25, 4))
    _draw_prices(price, budgets[0][-1], priced, COLOURS[1])
    for axes in (above, below, price):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def _draw_prices(axes: Axes, free: Row, priced: list[Row], colour: str) -> None:
    """What privacy costs in all against E, beside a line of slope one; nothing where it costs nothing yet."""
    axes.set(xscale="log", yscale="log", xlabel="precision E", ylabel="regret that privacy adds")
    axes.margins(x=0.12)
    priced = [row for row in priced if row.regret > free.regret]
    if not priced:
        return
    precisions = np.array([row.precision for row in priced])
    prices = np.array([row.regret - free.regret for row in priced])
    proportional = precisions * np.exp(np.log(prices / precisions).mean())
    axes.plot(precisions, proportional, color=_GREY, linewidth=1.2, linestyle="--", label="proportional to E")
    axes.plot(precisions, prices, color=colour, marker="s", linewidth=0, label=f"price at K = {_power(free.episodes)}")
    for row, spent in zip(priced, prices, strict=True):
        axes.annotate(f"ε = {row.epsilon:g}", (row.precision, spent), xytext=(7, -10), textcoords="offset points")
    axes.legend(frameon=False, loc="upper left")


def _draw_references(above: Axes, below: Axes, episodes: FloatArray) -> None:
    """What acting at random loses, the theorem's leading term, and the number of optimal policies."""
    mdp = mdp_of(ENV)
    lost, once = lost_at_random(ENV), leading(mdp.n_states, mdp.n_actions, mdp.horizon, 1)
    above.plot(episodes, lost * episodes, color=_GREY, linewidth=1.2, label="never learning: slope 1")
    above.plot(
        episodes, once * np.sqrt(episodes), color=_GREY, linewidth=1.2, linestyle="--", label="√(XAH³K): slope ½"
    )
    below.axhline(ONLY_OPTIMA, color=_GREY, linewidth=1.2)
    below.annotate(
        "only optimal policies left:\n4, each with 2⁶ ways to act\nwhere no user can get",
        (episodes[0], ONLY_OPTIMA),
        xytext=(0, 6),
        textcoords="offset points",
        color=_GREY,
        fontsize="small",
    )


def _mark_first_elimination(above: Axes, below: Axes, own: list[Row], colour: str) -> None:
    first = min((row.first_elimination for row in own if row.first_elimination is not None), default=None)
    if first is None:
        return
    for axes in (above, below):
        axes.axvline(first, color=colour, linewidth=1, linestyle=":")
    above.annotate(
        f"first elimination:\nepisode {_power(first)}",
        (first, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        color=colour,
        fontsize="small",
    )


def _mark_price(axes: Axes, free: Row, private: Row) -> None:
    """What the private plateau has more than the other."""
    axes.annotate(
        "",
        (private.episodes, private.regret),
        (free.episodes, free.regret),
        arrowprops={"arrowstyle": "<->", "shrinkA": 5, "shrinkB": 4, "color": _GREY},
    )
    axes.annotate(
        f"privacy costs {_power(private.regret - free.regret)} more, once",
        (private.episodes, math.sqrt(private.regret * free.regret)),
        xytext=(-8, 0),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="center",
    )


def _name(row: Row) -> str:
    budget = "no privacy" if row.epsilon is None else f"ε = {row.epsilon:g}"
    return f"{budget} (E = {row.precision:.0f})"


def _power(value: float) -> str:
    digits, exponent = f"{value:.1e}".split("e")
    return rf"${digits} \times 10^{{{int(exponent)}}}$"


def main() -> None:
    """Run the sweep, print its table and write its figure."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m shufflerl.experiments.figures", description=CAPTION)
    parser.add_argument(
        "out", nargs="?", type=_figure_path, default=Path("out/elimination.png"), help="figure to write"
    )
    out: Path = parser.parse_args().out
    from shufflerl.plots import save_figure  # before the sweep: it needs matplotlib

    rows = sweep()
    priced = sweep(episodes=EPISODES[-1:], epsilons=PRICED)
    console = Console()
    console.print(table([*rows, *priced]))
    console.print(f"\n{CAPTION}")
    try:
        save_figure(draw(rows, priced), out)
    except InvalidInputError as reason:
        parser.error(str(reason))
    console.print(f"Figure saved to {out}.")


def _figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"cannot write {path.name!r}; use a name ending in .png, .svg or .pdf")
    return path
