"""Which setting is better, and how sure that is: intervals, areas under the curve, paired tests with correction.

Settings are compared where it is fair: in the same environment, over as many episodes, seed by seed. A seed gives all
of them the same environment, so its differences are paired. Figures are in the environment's own units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.checks import frozen
from shufflerl.errors import InvalidInputError
from shufflerl.experiments.cells import Result, canonical, curve_episodes, labels
from shufflerl.experiments.setting import Setting, described

Band = Literal["sd", "ci"]
BANDS: tuple[Band, ...] = ("sd", "ci")

LEVEL = 0.95
#: Resamples of a bootstrap, and of a permutation test with more than 14 seeds; with fewer the test is exact.
RESAMPLES = 2**14
CURVE_RESAMPLES = 2000
SEED = 0  # of resampling: the same results give the same figures


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
    label: str
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
    def least_p_possible(self) -> float:
        """The smallest corrected p-value that so many settings and seeds could give, if the best won every seed."""
        pairs = math.comb(len(self.rows), 2)
        seeds = len(self.rows[0].seeds)
        return min(1.0, pairs * (2.0 / 2**seeds if 2**seeds <= RESAMPLES else 1 / (RESAMPLES + 1)))

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
        return {
            "title": self.title,
            "measure": self.measure,
            "least_p_possible": self.least_p_possible,
            "settings": rows,
        }


def interval(values: FloatArray) -> Estimate:
    """The mean with its bootstrap interval (bias-corrected and accelerated)."""
    return _interval(tuple(values.tolist()))


@cache  # reports say the same interval in several places
def _interval(numbers: tuple[float, ...]) -> Estimate:
    from scipy.special import ndtr, ndtri

    values = np.array(numbers)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, None, None)
    if np.ptp(values) <= 1e-12 * abs(mean):  # nothing varies, and the bootstrap of nothing is undefined
        return Estimate(mean, mean, mean)
    means = np.sort(_weights(len(values), RESAMPLES) @ values)
    below = (np.searchsorted(means, mean) + np.searchsorted(means, mean, side="right")) / 2
    bias = ndtri(np.clip(below / RESAMPLES, 1 / RESAMPLES, 1 - 1 / RESAMPLES))
    left_out = values - mean  # what leaving each out does to the mean, up to a factor
    skew = (left_out**3).sum() / (6 * (left_out**2).sum() ** 1.5)
    edges = bias + ndtri([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = np.quantile(means, ndtr(bias + edges / (1 - skew * edges)))
    return Estimate(mean, float(low), float(high))


@cache
def _weights(count: int, resamples: int) -> FloatArray:
    """How often each of `count` values is drawn in each resample, over `count`: the same for all that is resampled."""
    rng = np.random.default_rng(SEED)
    weights: FloatArray = rng.multinomial(count, np.full(count, 1 / count), size=resamples) / count
    return weights


def paired_tests(scores: FloatArray) -> FloatArray:
    """p[a, b]: two-sided, of paired permutation tests of equal means of scores[setting, seed].

    Signs of the differences are exchangeable: all choices of signs are tried if there are few, or random ones.
    """
    many, seeds = scores.shape
    if exact := 2**seeds <= RESAMPLES:
        signs = 1.0 - 2.0 * (np.arange(2**seeds)[:, None] >> np.arange(seeds) & 1)
    else:
        signs = np.random.default_rng(SEED).choice([-1.0, 1.0], size=(RESAMPLES, seeds))
    p = np.ones((many, many))
    for one in range(many):
        differences = scores[one] - scores
        found = np.abs(differences.sum(axis=1))
        extreme = (np.abs(signs @ differences.T) >= found * (1 - 1e-12)).sum(axis=0)
        p[one] = extreme / len(signs) if exact else (extreme + 1) / (len(signs) + 1)
    return p


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
    shared = set.intersection(*({run.cell.seed for run in runs} for runs in members))
    setting = members[0][0].cell.setting
    title = f"{described(setting.env, setting.env_parameters)}, {setting.episodes:,} episodes"
    if not (units := members[0][0].units).ours:
        title += f", rewards of {units.low:g} to {units.high:g}"
    if per_budget:
        title += ", no privacy" if setting.epsilon is None else f", epsilon {setting.epsilon:g}"
    if not shared:
        raise InvalidInputError(f"{title}: no seed is common to all settings, so they cannot be compared pair by pair.")
    members = [[run for run in runs if run.cell.seed in shared] for runs in members]
    measure: Literal["regret", "reward"] = "reward" if any(run.regret is None for run in results) else "regret"
    scores = [np.array([getattr(run, f"own_{measure}") for run in runs], dtype=np.float64) for runs in members]
    if any(np.isnan(values).any() for values in scores):
        raise InvalidInputError(f"{title}: neither regret nor reward is known of every run; nothing can be compared.")
    sign = 1 if measure == "regret" else -1
    order = sorted(range(len(members)), key=lambda index: sign * scores[index].mean())
    # The best is chosen by the very numbers that are tested, so it could be any: the correction is for all pairs.
    p = paired_tests(np.array(scores)) if len(shared) > 1 else np.ones((len(members), len(members)))
    pairs = np.triu_indices(len(members), 1)
    adjusted = np.ones_like(p)
    adjusted[pairs] = adjusted.T[pairs] = holm(p[pairs].tolist())
    best = order[0]
    names = labels([runs[0].cell.setting for runs in members])
    rows = []
    for index in order:
        tests = (None, None) if index == best else (float(p[best, index]), float(adjusted[best, index]))
        rows.append(_row(members[index], names[index], scores[index], *tests))
    return Group(title, measure, tuple(rows))


def _row(runs: list[Result], label: str, scores: FloatArray, p_value: float | None, adjusted: float | None) -> Row:
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
        label=label,
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
    weights = _weights(len(curves), CURVE_RESAMPLES)
    low, high = np.quantile(weights @ curves, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high
