"""`python -m bench.figures [parts...]`: measure the figures that several pages show, and write them into the pages.

What was measured is kept in docs/figures.json, each part with its date, its seeds and the commit of the sources. In a
page `<!-- PART: NAME -->` stands before a number, `<!-- PART: A / B -->` before a ratio, never at the beginning of a
line (that would end the paragraph), and `<!-- table NAME -->` before a table; `--pages` measures nothing and writes
those and the README's picture anew. Runs are kept in out/figures, and one that was stopped goes on. A test compares
pages with the file, and the first seed of it with what the code gives now.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import poisoning
from shufflerl.errors import PrivacyWarning
from shufflerl.experiments import store, suite, tuning
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.compare import interval
from shufflerl.experiments.engine import run_cells
from shufflerl.experiments.figures import batches as few
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import FULL, Family, Runs, family, lost_at_random
from shufflerl.experiments.figures.lines import DELTA, LINES, OPTIMISTIC, OPTIMISTIC_FREE, Line
from shufflerl.experiments.figures.suite import times_over
from shufflerl.experiments.setting import Setting
from shufflerl.experiments.suite.analysis import CHAMPION, STRICT

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "figures.json"
PICTURE = ROOT / "docs" / "images" / "reproduce.svg"
LIARS_PICTURE = ROOT / "docs" / "images" / "poisoning.svg"
BATCHES_PICTURE = ROOT / "docs" / "images" / "batches.svg"
RUNS = Path("out/figures")
ENV, EPISODES, LONG = "riverswim", 20_000, 1_000_000
EPSILONS = (0.1, 0.5, 1.0, 5.0)
SEEDS, SUITE_SEEDS, BATCHES_SEEDS = range(100), 5, range(50)
#: What tables call the lines, and the trust they need.
ROWS = {
    "optimistic": (
        "`optimistic`, shuffle model",
        "[`optimistic`](optimistic.md), shuffle model",
        "two servers that do not collude, enrolment, honest users",
    ),
    "SDP-PE": (
        "SDP-PE, shuffle model",
        "[SDP-PE](sdp-pe.md), the paper's",
        "two servers that do not collude, enrolment, honest users",
    ),
    "UCBVI-JDP": ("UCBVI-JDP, trusted server", "", ""),
    "UCBVI-JDP, planning rarely": (
        "the same, planning rarely",
        "UCBVI-JDP planning rarely, one trusted server",
        "one server sees all",
    ),
    "UCBVI-LDP": ("UCBVI-LDP, no trust", "UCBVI, local model", "nobody"),
}


def families() -> list[Family]:
    """Every line on RiverSwim at every budget; those without privacy once."""
    return list(dict.fromkeys(family(line, ENV, epsilon, EPISODES) for line in LINES for epsilon in EPSILONS))


def name_of(own: Family) -> str:
    """What a family's figure is called."""
    return own.line.name if own.epsilon is None else f"{own.line.name}/{own.epsilon:g}"


def riverswim() -> dict[str, Any]:
    """Mean regret of every line; of `optimistic` also with permuted actions, and over a million episodes."""
    chosen = tuning.choose(families(), FULL, _run("tuning", tuning.cells(families(), FULL)))
    settings = {name_of(own): own.setting(chosen[own]) for own in families()}
    for line, epsilons in ((OPTIMISTIC, EPSILONS), (OPTIMISTIC_FREE, EPSILONS[:1])):
        for own in (family(line, ENV, epsilon, EPISODES) for epsilon in epsilons):
            settings[f"permuted/{name_of(own)}"] = replace(settings[name_of(own)], env_parameters={"permuted": True})
    settings["long/optimistic/1"] = replace(settings["optimistic/1"], episodes=LONG)
    runs = _run("riverswim", [Cell(setting, seed) for setting in settings.values() for seed in SEEDS])
    return {
        "episodes": EPISODES,
        "delta": DELTA,
        "seeds": [SEEDS[0], SEEDS[-1]],
        "values": {"never learning": {"mean": EPISODES * lost_at_random(ENV)}}
        | {
            name: _summary(runs.regrets(setting)) | {"constants": setting.learner_parameters}
            for name, setting in settings.items()
        },
    }


def liars() -> dict[str, Any]:
    """Mean regret of runs in which a share of the users lie, of the worst attack, by who adds the noise."""
    runs = poisoning.measure()
    values: dict[str, Any] = {}
    for env in poisoning.ENVIRONMENTS:
        for source in poisoning.SOURCES:
            name = f"{env}/{source}"
            values[f"{name}/none"] = _summary(poisoning.honestly(runs, env, source))
            for share in poisoning.SHARES:
                for attacks, when in ((poisoning.SPREAD, ""), ((poisoning.CROWD,), " first")):
                    attack, regrets = poisoning.worst(runs, env, source, share, attacks)
                    values[f"{name}/{share:.1%}{when}"] = _summary(regrets) | {"attack": attack}
    for share in poisoning.SHARES:
        values[f"riverswim/servers/{share:.1%} by lot"] = _summary(runs.regrets(poisoning.by_lot(share)))
    return {
        "episodes": poisoning.EPISODES,
        "epsilon": poisoning.BUDGET.epsilon,
        "delta": poisoning.BUDGET.delta,
        "seeds": [poisoning.SEEDS[0], poisoning.SEEDS[-1]],
        "fewer_seeds": [poisoning.FEWER_SEEDS[0], poisoning.FEWER_SEEDS[-1]],
        "values": values,
    }


def contests() -> dict[str, Any]:
    """How many times the regret of `optimistic` its rivals have over the suite, at budgets up to epsilon 1."""
    cells = suite.cells(budgets=(5.0, 1.0, 0.5, 0.1), episodes=(EPISODES,), seeds=SUITE_SEEDS)
    runs = _run("suite", cells)
    report = suite.analyse(store.results(RUNS / "suite"))
    learned = [one for one in report.contests if one.learned and one.epsilon is not None and one.epsilon <= STRICT]
    regrets = {
        name: [
            runs.regrets(suite.CONTENDERS[name].setting(suite.ENVIRONMENTS[one.environment], one.epsilon, one.episodes))
            for one in learned
        ]
        for name in report.learners
    }
    values = {}
    for rival in report.learners:
        if rival != CHAMPION:
            found = re.match(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", times_over(regrets[rival], regrets[CHAMPION]).numbers)
            assert found is not None
            values[rival] = dict(zip(("mean", "low", "high"), map(float, found.groups()), strict=True))
    return {
        "episodes": EPISODES,
        "delta": DELTA,
        "seeds": [0, SUITE_SEEDS - 1],
        "values": values | {"settings": {"mean": len(learned)}},
    }


def batches() -> dict[str, Any]:
    """Mean regret of `optimistic` and SDP-PE in few and many batches; how many mixtures and policies they deploy."""
    settings = {batches_name(*one): few.setting(*one) for one in few.settings(FULL)}
    cells = [Cell(setting, seed) for seed in BATCHES_SEEDS for setting in settings.values()]
    runs = _run("batches", list({cell.key: cell for cell in cells}.values()))
    deployed = ("batches", "distinct", "policies")
    return {
        "delta": DELTA,
        "seeds": [BATCHES_SEEDS[0], BATCHES_SEEDS[-1]],
        "values": {
            name: _summary(runs.regrets(setting)) | {what: round(runs.mean(setting, what), 3) for what in deployed}
            for name, setting in settings.items()
        },
    }


def batches_name(line: Line, epsilon: float | None, episodes: int, count: int) -> str:
    """What the figure of a learner at a budget over K episodes in so many batches is called."""
    return f"{line.name}/{'none' if epsilon is None else f'{epsilon:g}'}/{episodes}/{count}"


#: What can be measured.
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "riverswim": riverswim,
    "poisoning": liars,
    "suite": contests,
    "batches": batches,
}


def _run(part: str, cells: list[Cell]) -> Runs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # one delta for all K
        run_cells(cells, RUNS / part)
    return Runs(store.results(RUNS / part, cells))  # of an earlier, larger sweep there may be more


def _summary(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """The mean with its 95% bootstrap interval, and the value of the first seed."""
    estimate = interval(values)
    assert estimate.low is not None
    assert estimate.high is not None
    found = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "first": float(values[0])}
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def setting_of(figures: dict[str, Any], name: str) -> Setting:
    """The setting of a line's figure, with the constants that were chosen."""
    own = next(own for own in families() if name_of(own) == name)
    return replace(own.setting({}), learner_parameters=figures["riverswim"]["values"][name]["constants"])


def text(figures: dict[str, Any], name: str) -> str:
    """A figure as it stands in a page: PART: NAME, one with `interval` behind it, or A / B of the same part."""
    part, _, rest = name.partition(": ")
    values = figures[part]["values"]
    if " / " in rest:
        one, other = (values[side]["mean"] for side in rest.split(" / "))
        return number(one / other)
    if rest.endswith(" interval"):
        own = values[rest.removesuffix(" interval")]
        return f"{number(own['mean'])} [{number(own['low'])}, {number(own['high'])}]"
    return number(values[rest]["mean"])


def number(value: float) -> str:
    """Whole from ten on, or if it is a whole number; else with one decimal."""
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def costs_table(figures: dict[str, Any]) -> list[str]:
    """Who loses how much at which budget."""
    rows = [
        f"| {ROWS[line][1]} | "
        + " | ".join(text(figures, f"riverswim: {line}/{epsilon:g}") for epsilon in EPSILONS)
        + f" | {ROWS[line][2]} |"
        for line in ROWS
        if ROWS[line][1]
    ]
    return [*_head("", *_budgets(), "trust"), *rows]


def intervals_table(figures: dict[str, Any]) -> list[str]:
    """The same of every line, with intervals."""
    rows = [
        f"| {ROWS[line][0]} | "
        + " | ".join(text(figures, f"riverswim: {line}/{epsilon:g} interval") for epsilon in EPSILONS)
        + " |"
        for line in ROWS
    ]
    return [*_head("", *_budgets()), *rows]


def learner_table(figures: dict[str, Any]) -> list[str]:
    """What `optimistic` loses, as RiverSwim is and with permuted actions."""
    rows = []
    for title, prefix in (("RiverSwim 4/6", ""), ("with the actions of every step and state permuted", "permuted/")):
        names = [f"{prefix}{OPTIMISTIC_FREE.name}", *(f"{prefix}optimistic/{epsilon:g}" for epsilon in EPSILONS[::-1])]
        rows.append(f"| {title} | " + " | ".join(text(figures, f"riverswim: {name} interval") for name in names) + " |")
    return [*_head("", "no privacy", *_budgets()[::-1]), *rows]


def liars_table(figures: dict[str, Any]) -> list[str]:
    """What liars cost: a share of every batch, and a share of all users who all come first."""
    values = figures["poisoning"]["values"]
    rows = []
    for env, source in itertools.product(poisoning.ENVIRONMENTS, poisoning.SOURCES):
        clean = f"{env}/{source}/none"
        cells = [f"{values[clean]['mean']:,.0f} [{values[clean]['low']:,.0f}, {values[clean]['high']:,.0f}]"]
        for when, share in itertools.product(("", " first"), poisoning.SHARES):
            own = values[f"{env}/{source}/{share:.1%}{when}"]
            cells.append(f"{own['mean'] / values[clean]['mean']:.2f}" + (f" ({own['attack']})" if not when else ""))
        rows.append(f"| {env} | {source} | " + " | ".join(cells) + " |")
    shares = [f"{share:.1%} lie" for share in poisoning.SHARES]
    return [*_head("environment", "noise by", "nobody lies", *shares, *(f"{one}, all first" for one in shares)), *rows]


def lots_table(figures: dict[str, Any]) -> list[str]:
    """What liars cost who come first, by who is admitted."""
    values = figures["poisoning"]["values"]
    clean = values["riverswim/servers/none"]["mean"]
    rows = []
    for who, when in (("whoever comes first", "first"), (f"{poisoning.ADMISSION} times as many by lot", "by lot")):
        own = [values[f"riverswim/servers/{share:.1%} {when}"] for share in poisoning.SHARES]
        told = [f"{one['mean'] / clean:.2f} [{one['low'] / clean:.2f}, {one['high'] / clean:.2f}]" for one in own]
        rows.append(f"| {who} | " + " | ".join(told) + " |")
    return [*_head("a batch is open to", *(f"{share:.1%} lie, all first" for share in poisoning.SHARES)), *rows]


def batches_table(figures: dict[str, Any]) -> list[str]:
    """What every number of batches loses, a table row for each K, budget and learner."""
    return _batches_rows(lambda name: text(figures, f"batches: {name}"), few.BUDGETS["full"], few.LINES)


def few_table(figures: dict[str, Any]) -> list[str]:
    """What `optimistic` loses at epsilon 1 with intervals."""
    counts = (3, 5, 8, 10, 12, 40)
    return _batches_rows(lambda name: text(figures, f"batches: {name} interval"), (1.0,), (OPTIMISTIC,), counts)


def deployed_table(figures: dict[str, Any]) -> list[str]:
    """How many mixtures and policies those are at epsilon 1."""
    values = figures["batches"]["values"]

    def deployed(name: str) -> str:
        return " / ".join(f"{values[name][what]:.3g}" for what in ("distinct", "policies"))

    return _batches_rows(deployed, (1.0,), few.LINES)


def _batches_rows(
    show: Callable[[str], str],
    budgets: tuple[float | None, ...],
    lines: tuple[Line, ...],
    counts: tuple[int, ...] = few.BATCHES["full"],
) -> list[str]:
    rows = []
    for episodes, epsilon, line in itertools.product(few.EPISODES["full"], budgets, lines):
        names = [f"{episodes:,}"]
        names += ["none" if epsilon is None else f"{epsilon:g}"] if len(budgets) > 1 else []
        names += [line.name] if len(lines) > 1 else []
        cells = [show(batches_name(line, epsilon, episodes, count)) for count in counts]
        rows.append(f"| {' | '.join(names + cells)} |")
    head = ["K", *(["epsilon"] if len(budgets) > 1 else []), *(["learner"] if len(lines) > 1 else [])]
    return [*_head(*head, *(f"{count}" for count in counts)), *rows]


TABLES = {
    "costs": costs_table,
    "intervals": intervals_table,
    "learner": learner_table,
    "poisoning": liars_table,
    "lots": lots_table,
    "batches": batches_table,
    "few": few_table,
    "deployed": deployed_table,
}


def _head(*columns: str) -> list[str]:
    return [("| " + " | ".join(columns) + " |").replace("  ", " "), "|" + "---|" * len(columns)]


def _budgets() -> list[str]:
    return [f"epsilon {epsilon:g}" for epsilon in EPSILONS]


_NUMBER = re.compile(r"<!-- (\w+: [^>]*?) -->(?:[\d,.]*\d)?(?: \[[\d,.]+, [\d,.]+\])?")
_TABLE = re.compile(r"<!-- table (\w+) -->\n+(?:\|.*\n)*\n*")


def written(page: str, figures: dict[str, Any]) -> str:
    """A page with the figures of the file in it."""
    page = _NUMBER.sub(lambda found: f"<!-- {found[1]} -->{text(figures, found[1])}", page)
    page = _TABLE.sub(
        lambda found: "\n".join([f"<!-- table {found[1]} -->", "", *TABLES[found[1]](figures), "", ""]), page
    )
    return page.rstrip("\n") + "\n"


def picture(figures: dict[str, Any]) -> None:
    """Draw what every line loses on RiverSwim at each budget."""
    from shufflerl.plots import save_figure

    values = figures["riverswim"]["values"]
    drawing, (axes,) = style.panels(height=4.4)
    for line in LINES:
        own = [values[name_of(family(line, ENV, epsilon, EPISODES))] for epsilon in EPSILONS]
        mean, low, high = ([each[key] for each in own] for key in ("mean", "low", "high"))
        style.estimates(axes, line, EPSILONS, mean, low, high, **({} if line.private else {"marker": ""}))
    never = values["never learning"]["mean"]
    axes.axhline(never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
    axes.set(xscale="log", yscale="log", xlabel="privacy budget ε (smaller is more private)", xticks=EPSILONS)
    axes.set(ylabel=f"expected regret after {EPISODES:,} episodes", ylim=(None, 1.5 * never))
    axes.set_title(f"RiverSwim, {len(SEEDS)} seeds, bars: 95% interval of the mean")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    style.thousands(axes.yaxis)
    style.legend_below(drawing, axes, 3)
    save_figure(drawing, PICTURE)


def liars_picture(figures: dict[str, Any]) -> None:
    """Draw how many times the clean regret the worst attack costs, by who adds the noise."""
    from shufflerl.plots import save_figure

    values = figures["poisoning"]["values"]
    drawing, panels = style.panels(len(poisoning.SHARES), height=3.4)
    for axes, share in zip(panels, poisoning.SHARES, strict=True):
        for place, (source, colour) in enumerate((("users", "#D55E00"), ("servers", "#0072B2"))):
            times = [
                values[f"{env}/{source}/{share:.1%}"]["mean"] / values[f"{env}/{source}/none"]["mean"]
                for env in poisoning.ENVIRONMENTS
            ]
            where = np.arange(len(times)) + 0.38 * (place - 0.5)
            axes.bar(where, times, width=0.36, color=colour, label=f"noise by {source}")
        axes.axhline(1.0, color=style.INK, linewidth=1)
        axes.set(yscale="log", ylim=(0.8, 50), xticks=range(len(poisoning.ENVIRONMENTS)))
        axes.set_xticklabels(poisoning.ENVIRONMENTS)
        axes.set_yticks((1, 2, 5, 10, 20, 50), labels=("1", "2", "5", "10", "20", "50"))
        axes.set_title(f"{share:.1%} of the users lie")
    panels[0].set_ylabel("times the regret without liars")
    style.legend_below(drawing, panels[0], 2)
    save_figure(drawing, LIARS_PICTURE)


def batches_picture(figures: dict[str, Any]) -> None:
    """Draw what few batches cost."""
    from shufflerl.plots import save_figure

    values = figures["batches"]["values"]

    def point(line: Line, epsilon: float | None, episodes: int, count: int) -> tuple[float, float]:
        own = values[batches_name(line, epsilon, episodes, count)]
        return own["batches"], own["mean"]

    save_figure(few.draw("full", point), BATCHES_PICTURE)


def pages() -> list[Path]:
    """Where figures may stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load() -> dict[str, Any]:
    """What was measured."""
    figures: dict[str, Any] = json.loads(FILE.read_text())
    return figures


def main() -> None:
    """Measure the parts named on the command line, all by default, and write file and pages."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--pages", action="store_true", help="measure nothing, only write the pages")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    figures = load() if FILE.exists() else {}
    for part in () if arguments.pages else arguments.parts or PARTS:
        commit = subprocess.check_output(
            ["git", "log", "-1", "--format=%h", "--", "src", ":!src/shufflerl/__init__.py"], cwd=ROOT, text=True
        ).strip()
        when = {"measured": datetime.date.today().isoformat(), "commit": commit}
        figures[part] = when | PARTS[part]()
        FILE.write_text(json.dumps(figures, indent=1) + "\n")
    with style.styled():  # the same figures are the same files
        for draw in (picture, liars_picture, batches_picture):
            draw(figures)
    for page in pages():
        if (now := written(was := page.read_text(), figures)) != was:
            page.write_text(now)
            print(f"{page.relative_to(ROOT)} is written anew.")


if __name__ == "__main__":
    main()
