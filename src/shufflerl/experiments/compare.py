"""Which setting is better, and how sure that is: intervals, areas under the curve, paired tests with correction.

Settings are compared where it is fair: in the same environment, over as many episodes, seed by seed. A seed gives all
of them the same environment, so its differences are paired. Figures are in the environment's own units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.checks import frozen
from shufflerl.errors import InvalidInputError
from shufflerl.experiments.cells import Result, canonical, contender, curve_episodes
from shufflerl.experiments.setting import Setting, described

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Band = Literal["sd", "ci"]
BANDS: tuple[Band, ...] = ("sd", "ci")

LEVEL = 0.95
#: Resamples of a bootstrap, and of a permutation test with more than 14 seeds; with fewer the test is exact.
RESAMPLES = 2**14
CURVE_RESAMPLES = 2000
SEED = 0  # of resampling: the same results give the same figures

_BAND_LABELS = {"sd": "± 1 standard deviation over seeds", "ci": "95% bootstrap interval of the mean"}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% bootstrap interval; with a single seed there is no interval."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class Row:
    """A setting's figures. `score` is its final regret, or its reward per episode where regret is unknown.

    `area` is the area under the regret curve over the number of episodes: the mean of the cumulative regret along the
    way. `p_value` and `adjusted` are of the paired test against the best of the group, None for that one itself.
    """

    setting: Setting
    seeds: tuple[int, ...]
    scores: FloatArray
    curves: FloatArray | None
    score: Estimate
    area: Estimate | None
    switches: float
    p_value: float | None
    adjusted: float | None

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds."""
        return float(self.scores.std(ddof=1)) if len(self.scores) > 1 else None


@dataclass(frozen=True, eq=False)
class Group:
    """Settings compared with one another, best first; `measure` is what by."""

    title: str
    measure: Literal["regret", "reward"]
    rows: tuple[Row, ...]

    @property
    def least_p(self) -> float:
        """The smallest corrected p-value that so many settings and seeds could give, if the best won every seed."""
        pairs = math.comb(len(self.rows), 2)
        return min(1.0, pairs * 2 / min(2.0 ** min(len(self.rows[0].seeds), 60), RESAMPLES + 1))

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = [
            {
                "setting": asdict(row.setting),
                "seeds": list(row.seeds),
                self.measure: {**asdict(row.score), "sd": row.sd, "per_seed": row.scores.tolist()},
                "area": None if row.area is None else asdict(row.area),
                "switches": row.switches,
                "p_value": row.p_value,
                "p_adjusted": row.adjusted,
            }
            for row in self.rows
        ]
        return {"title": self.title, "measure": self.measure, "least_p_possible": self.least_p, "settings": rows}


def interval(values: FloatArray) -> Estimate:
    """The mean with its bootstrap interval (bias-corrected and accelerated)."""
    return _interval(tuple(values.tolist()))


@cache  # reports say the same interval in several places
def _interval(numbers: tuple[float, ...]) -> Estimate:
    from scipy import stats

    values = np.array(numbers)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, None, None)
    if np.ptp(values) <= 1e-12 * abs(mean):  # nothing varies, and the bootstrap of nothing is undefined
        return Estimate(mean, mean, mean)
    rng = np.random.default_rng(SEED)
    found = stats.bootstrap((values,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, batch=1024, rng=rng)
    low, high = (float(bound) for bound in found.confidence_interval)
    return Estimate(mean, low, high)


def paired_test(one: FloatArray, other: FloatArray) -> float:
    """The two-sided p-value of a paired permutation test of equal means: signs of the differences are exchangeable."""
    from scipy import stats

    def difference(x: FloatArray, y: FloatArray, axis: int) -> FloatArray:
        means: FloatArray = (x - y).mean(axis=axis)
        return means

    found = stats.permutation_test(
        (one, other),
        difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=1024,
        rng=np.random.default_rng(SEED),
    )
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below a level keeps the chance of any false rejection below it.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = most
    return adjusted


def compare(results: Iterable[Result], *, per_budget: bool = False) -> list[Group]:
    """Groups of settings of the same environment and episodes (and budget, if asked), each best first."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        setting = result.cell.setting
        budget = (setting.epsilon, setting.delta) if per_budget else ()
        key = canonical([setting.env, setting.env_parameters, setting.episodes, budget])
        groups.setdefault(key, []).append(result)
    return [_group(members, per_budget) for members in groups.values()]


def _group(results: list[Result], per_budget: bool) -> Group:
    by_setting: dict[str, list[Result]] = {}
    for result in results:
        by_setting.setdefault(canonical(asdict(result.cell.setting)), []).append(result)
    members = [sorted(runs, key=lambda run: run.cell.seed) for runs in by_setting.values()]
    seeds = {tuple(run.cell.seed for run in runs) for runs in members}
    setting = members[0][0].cell.setting
    title = f"{described(setting.env, setting.env_parameters)}, {setting.episodes:,} episodes"
    if not (units := members[0][0].units).ours:
        title += f", rewards of {units.low:g} to {units.high:g}"
    if per_budget:
        title += ", no privacy" if setting.epsilon is None else f", epsilon {setting.epsilon:g}"
    if len(seeds) > 1:
        raise InvalidInputError(f"{title}: the settings have different seeds, so they cannot be compared pair by pair.")
    measure: Literal["regret", "reward"] = "reward" if any(run.regret is None for run in results) else "regret"
    scores = [np.array([getattr(run, f"own_{measure}") for run in runs], dtype=np.float64) for runs in members]
    if any(np.isnan(values).any() for values in scores):
        raise InvalidInputError(f"{title}: neither regret nor reward is known of every run; nothing can be compared.")
    sign = 1 if measure == "regret" else -1
    order = sorted(range(len(members)), key=lambda index: sign * scores[index].mean())
    # The best is chosen by the very numbers that are tested, so it could be any: the correction is for all pairs.
    pairs = list(itertools.combinations(range(len(members)), 2))
    raw = [paired_test(scores[a], scores[b]) if len(scores[a]) > 1 else 1.0 for a, b in pairs]
    tests = {pair: both for pair, *both in zip(pairs, raw, holm(raw), strict=True)}
    rows = []
    for index in order:
        best = order[0]
        pair = (min(index, best), max(index, best))
        p_value, adjusted = (None, None) if index == best else tests[pair]
        rows.append(_row(members[index], scores[index], p_value, adjusted))
    return Group(title, measure, tuple(rows))


def _row(runs: list[Result], scores: FloatArray, p_value: float | None, adjusted: float | None) -> Row:
    setting = runs[0].cell.setting
    known = [run.curve for run in runs if run.curve is not None]
    curves: FloatArray | None = np.array(known) if len(known) == len(runs) else None
    area = None
    if curves is not None:
        curves *= runs[0].units.difference(1.0)
        grid = np.array(curve_episodes(setting.episodes), np.float64)
        area = interval(np.asarray(np.trapezoid(curves, grid, axis=1)) / setting.episodes)
    return Row(
        setting=setting,
        seeds=tuple(run.cell.seed for run in runs),
        scores=frozen(scores),
        curves=None if curves is None else frozen(curves),
        score=interval(scores),
        area=area,
        switches=float(np.mean([run.switches for run in runs])),
        p_value=p_value,
        adjusted=adjusted,
    )


def band(curves: FloatArray, kind: Band) -> tuple[FloatArray, FloatArray]:
    """Lower and upper edge around the mean of curves[seed, point]."""
    mean = curves.mean(axis=0)
    if kind == "sd":
        spread = curves.std(axis=0, ddof=1)
        return mean - spread, mean + spread
    rng = np.random.default_rng(SEED)
    weights = rng.multinomial(len(curves), np.full(len(curves), 1 / len(curves)), size=CURVE_RESAMPLES) / len(curves)
    low, high = np.quantile(weights @ curves, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high


def draw(groups: Sequence[Group], kind: Band) -> Figure:
    """Regret curves, one panel per group: the mean over seeds and the band that the legend names."""
    from shufflerl.plots import new_figure

    shown = [group for group in groups if all(row.curves is not None for row in group.rows)]
    if not shown:
        raise InvalidInputError("The regret of these runs is unknown, so there are no curves to plot.")
    columns = min(2, len(shown))
    lines = math.ceil(len(shown) / columns)
    most = max(len(group.rows) for group in shown)
    figure = new_figure(7.2 * columns, lines * (4.0 + 0.22 * most))
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    names = list(dict.fromkeys(contender(row.setting) for group in shown for row in group.rows))
    for axes, group in zip(panels, shown, strict=False):
        _panel(axes, group, kind, names)
    for axes in panels[len(shown) :]:
        axes.remove()
    return figure


def _panel(axes: Axes, group: Group, kind: Band, names: list[str]) -> None:
    from shufflerl.plots import COLOURS

    styles = ("-", "--", ":", "-.")
    episodes = group.rows[0].setting.episodes
    grid = np.array(curve_episodes(episodes), np.float64)
    for row in group.rows:
        assert row.curves is not None
        index = names.index(contender(row.setting))  # the same look in every panel
        colour, style = COLOURS[index % len(COLOURS)], styles[index // len(COLOURS) % len(styles)]
        axes.plot(grid, row.curves.mean(axis=0), style, color=colour, linewidth=1.8, label=contender(row.setting))
        if len(row.curves) > 1:
            axes.fill_between(grid, *band(row.curves, kind), color=colour, alpha=0.15, linewidth=0)
    seeds = len(group.rows[0].seeds)
    about = f"mean of {seeds} seeds; band: {_BAND_LABELS[kind]}" if seeds > 1 else "one seed"
    axes.set(xlabel="episodes", ylabel="cumulative expected regret", xlim=(0, episodes), ylim=(0, None))
    axes.set_title(f"{group.title}\n{about}", loc="left", fontsize="medium")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    # Below the panel, where it covers no data.
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.14), fontsize="small", borderaxespad=0)


def save(groups: Sequence[Group], kind: Band, path: Path) -> None:
    """Draw and write the figure, whole or not at all."""
    from shufflerl.plots import save_figure

    save_figure(draw(groups, kind), path)
