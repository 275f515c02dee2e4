"""Regret against the number of batches: how few policies can be deployed, which the paper leaves open (log log K).

`optimistic` is told how many batches there are. SDP-PE has a batch per stage: with n of them, stages grow by as much as
it takes from its own first stage, but at most tenfold, and else the first is larger. Distinct mixtures are counted too,
as a batch may deploy again what an earlier one did, and distinct policies, as a mixture deploys several at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, power, spread, together, within
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Chosen, Evidence, Figure, Size, Table, lost_at_random, mdp_of
from shufflerl.experiments.figures.lines import DELTA, OPTIMISTIC, SDP_PE, Line
from shufflerl.experiments.setting import Setting
from shufflerl.learners.stages import stage_users
from shufflerl.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

ENV = "riverswim"
EPISODES = {"full": (20_000, 200_000, 1_000_000), "quick": (20_000,)}
BUDGETS: dict[str, tuple[float | None, ...]] = {"full": (None, 5.0, 1.0, 0.5), "quick": (None, 1.0)}
BATCHES = {"full": (2, 3, 5, 8, 10, 12, 20, 40, 80), "quick": (3, 10, 40)}
SEEDS = {"full": 10, "quick": 2}
LINES = (OPTIMISTIC, SDP_PE)

#: SDP-PE's own first stage, and how much stages may grow.
FIRST, MAX_GROWTH = 32, 10.0
#: What few batches may cost, in times the regret with many.
MANY, WORSE = 40, 1.3
_DASHES = {OPTIMISTIC: "-", SDP_PE: "--"}


def setting(line: Line, epsilon: float | None, episodes: int, batches: int) -> Setting:
    """A learner in so many batches."""
    private = epsilon is not None
    parameters = {"batches": batches} if line is OPTIMISTIC else stages(episodes, batches)
    return Setting(
        env=ENV,
        learner=line.learner,
        privatizer=line.privatizer if private else "none",
        episodes=episodes,
        epsilon=epsilon,
        delta=DELTA if private else None,
        learner_parameters=parameters,
    )


def stages(episodes: int, count: int) -> dict[str, Any]:
    """How SDP-PE's stages begin and grow to be so many, or nearly."""

    def many(first: int, base: float) -> int:
        return len(stage_users(episodes, first, base, commit=True))

    if many(FIRST, MAX_GROWTH) > count:
        low, high = FIRST, episodes
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if many(middle, MAX_GROWTH) > count else (low, middle)
        return {"first": high, "base": MAX_GROWTH}
    slow, fast = 1.001, MAX_GROWTH
    for _ in range(40):
        middle_growth = math.sqrt(slow * fast)
        slow, fast = (middle_growth, fast) if many(FIRST, middle_growth) > count else (slow, middle_growth)
    return {"first": FIRST, "base": math.ceil(1e6 * fast) / 1e6}


def settings(size: Size) -> list[tuple[Line, float | None, int, int]]:
    """All that are run, in the order of the table."""
    name = size.name
    return [
        (line, epsilon, episodes, batches)
        for episodes in EPISODES[name]
        for epsilon in BUDGETS[name]
        for line in LINES
        for batches in BATCHES[name]
    ]


def cells(size: Size, _: Chosen) -> list[Cell]:
    """Every learner at every K and budget in every number of batches."""
    every = [Cell(setting(*one), seed) for one in settings(size) for seed in range(SEEDS[size.name])]
    return list({cell.key: cell for cell in every}.values())


def few(episodes: int) -> int:
    """H + log2 log2 K, rounded: the number that the open question asks about."""
    return round(mdp_of(ENV).horizon + math.log2(math.log2(episodes)))


def draw(name: str, point: Callable[[Line, float | None, int, int], tuple[float, float]]) -> Drawing:
    """Regret against batches, a panel per K; `point` says both for a line, a budget, K and the batches asked for."""
    drawing, panels = style.panels(len(EPISODES[name]), width=max(style.WIDTH, 3.8 * len(EPISODES[name])), height=4.8)
    for axes, episodes in zip(panels, EPISODES[name], strict=True):
        for colour, epsilon in zip(COLOURS, BUDGETS[name], strict=False):
            for line in LINES:
                points = sorted(point(line, epsilon, episodes, batches) for batches in BATCHES[name])
                budget = "no privacy" if epsilon is None else f"ε = {epsilon:g}"
                look: dict[str, Any] = {"color": colour, "linestyle": _DASHES[line], "marker": line.marker}
                axes.plot(*zip(*points, strict=True), label=f"{line.name}, {budget}", **look)
        never = episodes * lost_at_random(ENV)
        axes.axhline(never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
        axes.set(xscale="log", yscale="log", xlabel="batches", xticks=[2, 5, 10, 20, 40, 80])
        axes.set_title(f"K = {power(episodes)}")
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        style.thousands(axes.yaxis)
    panels[0].set_ylabel("expected regret")
    style.legend_below(drawing, panels[0], 3)
    return drawing


def analyse(evidence: Evidence) -> Analysis:
    """Draw what batches cost, and judge how few are enough."""
    name, runs = evidence.size.name, evidence.runs

    def point(line: Line, epsilon: float | None, episodes: int, batches: int) -> tuple[float, float]:
        one = setting(line, epsilon, episodes, batches)
        return runs.mean(one, "batches"), float(runs.regrets(one).mean())

    rows = []
    for line, epsilon, episodes, batches in settings(evidence.size):
        one = setting(line, epsilon, episodes, batches)
        counts = (f"{runs.mean(one, what):,.3g}" for what in ("batches", "distinct", "policies", "switches"))
        budget = "none" if epsilon is None else f"{epsilon:g}"
        rows.append((f"{episodes:,}", budget, line.name, *counts, spread(runs.regrets(one))))
    columns = ("K", "ε", "learner", "batches", "distinct mixtures", "distinct policies", "switches", "regret")
    enough = [
        (
            f"K = {power(episodes)}, {few(episodes)} batches",
            within(
                runs.regrets(setting(OPTIMISTIC, 1.0, episodes, few(episodes))),
                WORSE,
                runs.regrets(setting(OPTIMISTIC, 1.0, episodes, MANY)),
            ),
        )
        for episodes in EPISODES[name]
    ]
    claim = Claim(
        OURS,
        f"RiverSwim, ε = 1: H + log2 log2 K batches within {WORSE:g} of {MANY}",
        f"At ε = 1 optimistic in H + log2 log2 K batches loses at most {WORSE:g} times what it loses in {MANY}.",
        together(enough),
        "What the first batches cannot tell, later ones must make up for, and few leave little time for it. The first "
        "is large enough to hear through the noise, and costs what acting blindly does.",
    )
    first = EPISODES[name][0]
    told = ", ".join(
        f"{spread(runs.regrets(setting(OPTIMISTIC, 1.0, first, batches)))} in {batches}" for batches in BATCHES[name]
    )
    see = (
        f"Fewer batches are fewer policies to deploy. Of K = {power(first)} episodes at ε = 1 optimistic loses {told} "
        f"batches; {SEEDS[name]} seeds. The table says how many distinct mixtures and policies they deployed."
    )
    return Analysis(draw(name, point), see, (claim,), Table(columns, tuple(rows)))


FIGURE = Figure("batches", "Regret against the number of batches", analyse, cells=cells)
