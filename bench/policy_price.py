"""`python -m bench.policy_price`: users that policy search needs against epsilon, in every privacy model.

Draws docs/images/policy-search.svg and prints the same figures as a table. Every run has the same number of users, so
that the models differ in nothing but their noise; a seed that fails (see `bench.policy_search`) counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.policy_search import TASKS, USERS, Reached, Task, users_to_reach
from shufflerl import plots

EPSILONS, SEEDS = (0.5, 1.0, 5.0), range(20, 25)
#: How the models are called, from the least trusting to the most.
NAMES = {"local": "local", "users": "shuffle, users' noise", "servers": "shuffle, servers' noise", "central": "central"}
IMAGE = Path(__file__).parent.parent / "docs" / "images" / "policy-search.svg"

#: What was measured: of each epsilon and model, and under (None, "none") without privacy.
Prices = dict[tuple[float | None, str], Reached]


def measure(task: Task) -> Prices:
    """Users until the target, with and without privacy."""
    found: Prices = {(None, "none"): users_to_reach(task, "none", None, USERS, SEEDS)}
    for model in NAMES:
        for epsilon in EPSILONS:
            found[epsilon, model] = users_to_reach(task, model, epsilon, USERS, SEEDS)
    return found


def rows(task: Task, found: Prices) -> Iterator[str]:
    """Lines of a table: medians of users, and how many times as many as without privacy."""
    free = found[None, "none"].median
    for model, name in NAMES.items():
        cells = []
        for epsilon in EPSILONS:
            reached = found[epsilon, model]
            failed = sum(map(math.isinf, reached.users))
            users = reached.median
            told = "not reached" if math.isinf(users) else f"{users:,.0f} ({users / free:.1f}x)"
            cells.append(told + f", {failed} failed" * (failed > 0 and math.isfinite(users)))
        yield f"| {task.name}, {name} | {' | '.join(cells)} |"
    yield f"| {task.name}, no privacy | {' | '.join([f'{free:,.0f}'] * len(EPSILONS))} |"


def draw(prices: dict[Task, Prices]) -> plots.Picture:
    """A panel for each task: medians as lines, seeds as dots; what was not reached lies on the topmost line."""
    figure = plots.new_figure(8.4, 7.4)
    panels = figure.subplots(math.ceil(len(prices) / 2), 2, sharey=True)
    top = 1.5 * USERS
    for axes, (task, found) in zip(panels.flat, prices.items(), strict=True):
        for model, colour, marker in zip(NAMES, plots.COLOURS, "sovD", strict=False):
            look: dict[str, Any] = {"color": colour, "marker": marker}
            across = [found[epsilon, model] for epsilon in EPSILONS]
            axes.plot(EPSILONS, [min(one.median, top) for one in across], label=NAMES[model], **look)
            for epsilon, one in zip(EPSILONS, across, strict=True):
                seeds = [min(users, top) for users in one.users]
                axes.scatter([epsilon] * len(seeds), seeds, s=9, color=colour, alpha=0.45, linewidths=0)
        axes.axhline(found[None, "none"].median, color=plots.INK, linestyle="--", label="no privacy")
        axes.axhline(top, color=plots.INK, linewidth=0.8)
        axes.annotate("not reached", (EPSILONS[-1], top), (0, 3), textcoords="offset points", ha="right", fontsize=9)
        axes.set(xscale="log", yscale="log", title=f"{task.name} >= {task.goal:g}")
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.set_xticks([], minor=True)
        plots.thousands(axes.yaxis)
    for axes in panels[-1]:
        axes.set_xlabel("epsilon")
    for axes in panels[:, 0]:
        axes.set_ylabel(f"users until the target, of {USERS:,}")
    plots.legend_below(figure, panels.flat[0], 5)
    return figure


def main() -> None:
    """Measure, print and draw."""
    prices = {}
    print("| | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in EPSILONS) + " |", "|---" * 4 + "|", sep="\n")
    for task in TASKS:
        prices[task] = measure(task)
        print(*rows(task, prices[task]), sep="\n", flush=True)
    with plots.styled():
        plots.save_figure(draw(prices), IMAGE)


if __name__ == "__main__":
    main()
