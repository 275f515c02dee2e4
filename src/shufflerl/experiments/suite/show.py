"""The suite's report for people: a table in Markdown and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shufflerl.experiments.suite.analysis import LEARNS, STRICT, Contest, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#333334"
#: Colour and marker of each contender, as in the other figures of a reproduction.
_LOOKS = {"optimistic": ("#CC79A7", "D"), "SDP-PE": ("#0072B2", "o"), "UCBVI-JDP": ("#009E73", "s")}


def budget(epsilon: float | None) -> str:
    """A budget in a few letters."""
    return "no privacy" if epsilon is None else f"ε = {epsilon:g}"


def markdown(report: Report) -> str:
    """Mean regret of every learner in every contest, and what it comes to."""
    learners = report.learners
    parts = []
    for episodes in dict.fromkeys(contest.episodes for contest in report.contests):
        chosen = [contest for contest in report.contests if contest.episodes == episodes]
        seeds = sorted({line.seeds for contest in chosen for line in contest.lines.values()})
        parts += [f"### K = {episodes:,}, {'/'.join(map(str, seeds))} seeds", ""]
        head = [f"{name}: mean [95% interval], median, 95th percentile" for name in learners]
        parts += [_row(["environment", "budget", "never learning", *head]), _row(["---"] * 3 + ["---:"] * len(head))]
        for contest in chosen:
            mark = "" if contest.learned else " (nobody learns)"
            figures = [_figures(contest, name) for name in learners]
            parts.append(_row([contest.environment, budget(contest.epsilon) + mark, f"{contest.never:,.0f}", *figures]))
        parts.append("")
    return "\n".join(parts + _summary(report)) + "\n"


def _row(fields: list[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _figures(contest: Contest, name: str) -> str:
    line = contest.lines[name]
    low, high = line.regret.low, line.regret.high
    between = "" if low is None or high is None else f" [{low:,.0f}, {high:,.0f}]"
    return f"{line.regret.mean:,.0f}{between}, {line.median:,.0f}, {line.tail:,.0f}"


def _where(contest: Contest) -> str:
    return f"{contest.environment}, {budget(contest.epsilon)}, K = {contest.episodes:,}"


def _summary(report: Report) -> list[str]:
    unlearned = sum(not contest.learned for contest in report.contests)
    lines = [
        f"Nobody learns in {unlearned} of {len(report.contests)} contests: no mean regret is below {LEARNS:.0%} of "
        "acting at random.",
    ]
    for standing in report.standings:
        lines.append(
            f"{standing.rival}: {standing.ratio:.2f} times the regret of the champion at ε ≤ {STRICT:g}, geometric "
            f"mean over contests where somebody learns ({standing.ratio_everywhere:.2f} over all); its best: "
            f"{standing.worst:.2f} ({_where(standing.worst_in)})."
        )
    if report.longest_tail is not None:
        ratio, contest = report.longest_tail
        lines.append(
            f"Longest tail of the champion where it learns: 95th percentile {ratio:.2f} medians ({_where(contest)})."
        )
    return [f"- {line}" for line in lines]


def draw(report: Report) -> Figure:
    """Regret as a share of what never learning costs: a column per budget, a row per number of episodes.

    A mark is the mean over seeds, and the line beside it reaches to the 95th percentile.
    """
    from shufflerl.plots import new_figure

    episodes = sorted({contest.episodes for contest in report.contests})
    budgets = list(dict.fromkeys(contest.epsilon for contest in report.contests))
    places = list(dict.fromkeys(contest.environment for contest in report.contests))
    figure = new_figure(2.6 + 1.9 * len(budgets), 1.3 + (0.6 + 0.27 * len(places)) * len(episodes))
    panels = figure.subplots(len(episodes), len(budgets), squeeze=False, sharex=True, sharey=True)
    for row, steps in enumerate(episodes):
        for column, epsilon in enumerate(budgets):
            axes = panels[row, column]
            chosen = [contest for contest in report.contests if (contest.episodes, contest.epsilon) == (steps, epsilon)]
            _panel(axes, report, chosen, places)
            axes.set_title(f"K = {steps:,}, {budget(epsilon)}", loc="left", fontsize="small")
    panels[0, 0].set_yticks(range(len(places)), places)
    panels[0, 0].invert_yaxis()
    for axes in panels[-1]:
        axes.set_xlabel("regret / acting at random", fontsize="small")
    looks = {label: look for axes in panels.flat for look, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(looks.values(), looks.keys(), loc="outside lower center", ncols=len(looks), frameon=False)
    return figure


def _panel(axes: Axes, report: Report, cells: list[Contest], places: list[str]) -> None:
    for contest in cells:
        if not contest.learned:
            height = places.index(contest.environment)
            axes.axhspan(height - 0.5, height + 0.5, color=_INK, alpha=0.12, linewidth=0, label="nobody learns")
    axes.axvline(1.0, color=_INK, linewidth=0.8)
    count = len(report.learners)
    for index, name in enumerate(report.learners):
        lines = [(contest, contest.lines[name]) for contest in cells]
        shares = [line.regret.mean / contest.never for contest, line in lines]
        # Side by side in a row, so that equal results do not hide each other.
        heights = [places.index(contest.environment) + 0.22 * (index - (count - 1) / 2) for contest, _ in lines]
        tails = [max(0.0, line.tail - line.regret.mean) / contest.never for contest, line in lines]
        axes.errorbar(
            shares,
            heights,
            xerr=[[0.0] * len(lines), tails],
            color=_LOOKS[name][0],
            fmt=_LOOKS[name][1],
            markersize=4.5,
            elinewidth=1.0,
            label=name,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write `suite.md` and `suite.png`; returns their paths."""
    from shufflerl.experiments.store import write_whole
    from shufflerl.plots import save_figure

    table, figure = folder / "suite.md", folder / "suite.png"
    write_whole(table, markdown(report).encode())
    save_figure(draw(report), figure)
    return table, figure
