"""The benchmark suite at one K: which learner is best where.

A part of the suite: one K, few seeds. Constants are the suite's own, chosen on environments apart. Regret in every
environment of the suite, how far optimistic is below its rivals, and where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.experiments import suite
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, Outcome, Verdict, negative, number, shown
from shufflerl.experiments.compare import LEVEL, RESAMPLES, SEED, Estimate
from shufflerl.experiments.figures.base import Analysis, Chosen, Evidence, Figure, Size, Table
from shufflerl.experiments.suite import Contest, show
from shufflerl.experiments.suite.analysis import CHAMPION, LEARNS, STRICT, Report

EPISODES = 20_000
BUDGETS = {"full": (5.0, 1.0, 0.5, 0.1), "quick": (1.0, 0.1)}
SEEDS = {"full": 5, "quick": 2}
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "full": tuple(suite.ENVIRONMENTS),
    "quick": ("RiverSwim 4/6", "DeepSea 5", "dense", "sparse homogeneous", "bandit"),
}


def cells(size: Size, _: Chosen) -> list[Cell]:
    """Every contender in every environment at every budget."""
    return suite.cells(
        environments={name: suite.ENVIRONMENTS[name] for name in ENVIRONMENTS[size.name]},
        budgets=BUDGETS[size.name],
        episodes=(EPISODES,),
        seeds=SEEDS[size.name],
    )


#: How many times the champion's regret a rival's is claimed to be, and how much worse the champion may be anywhere.
TIMES = 3.0
WORSE = 1.1


def analyse(evidence: Evidence) -> Analysis:
    """Draw every contest, and judge the champion over all of them and in its worst."""
    settings = {cell.key: cell.setting for cell in cells(evidence.size, {}) if cell.seed == 0}
    report = suite.analyse(result for setting in settings.values() for result in evidence.runs.of(setting))
    rivals = [name for name in report.learners if name != CHAMPION]
    learned = [contest for contest in report.contests if contest.learned]
    strict = [contest for contest in learned if contest.epsilon is not None and contest.epsilon <= STRICT]
    regrets = {name: [_regrets(evidence, contest, name) for contest in strict] for name in report.learners}
    claims = [
        Claim(
            OURS,
            f"Suite, ε ≤ {STRICT:g}: {rival} {TIMES:g} times optimistic or more",
            f"Over the suite {rival} has at least {TIMES:g} times the regret of optimistic at ε ≤ {STRICT:g} "
            "(geometric mean over environments and budgets where somebody learns).",
            times_over(regrets[rival], regrets[CHAMPION]),
            f"At budgets where little can be learned in {EPISODES:,} episodes all learners lose nearly what acting at "
            f"random does, which pulls the mean towards one. Where the interval has {TIMES:g} inside, these seeds "
            "cannot tell.",
        )
        for rival in rivals
    ]
    claims.append(
        Claim(
            OURS,
            f"Suite: optimistic nowhere {WORSE - 1:.0%} worse than a rival",
            f"In no environment and at no budget of the suite is optimistic more than {WORSE - 1:.0%} worse than "
            "SDP-PE or UCBVI-JDP (mean regrets).",
            nowhere_worse(report, rivals),
            "Its defaults are the same everywhere, and in single environments a rival's way of trying things suits "
            "better. Means of so few seeds also differ by luck, but that is no excuse where the intervals are apart.",
        )
    )
    seeds = SEEDS[evidence.size.name]
    ratios = " and ".join(f"{standing.ratio:.1f} times for {standing.rival}" for standing in report.standings)
    see = (
        f"Each row is an environment, each column a budget; further left is better, and 1 is acting at random. Marks "
        f"are means, lines reach to the 95th percentile over {seeds} seeds. At ε ≤ "
        f"{STRICT:g} the regret is {ratios} that of optimistic, in the geometric mean where somebody learns. "
        f"{len(report.contests) - len(learned)} of {len(report.contests)} rows are shaded: there nobody gets below "
        f"{LEARNS:g} of acting at random in {EPISODES:,} episodes."
    )
    columns = ("environment", "ε", "acting at random", *report.learners, "")
    rows = tuple(
        (
            contest.environment,
            f"{contest.epsilon:g}",
            number(contest.never),
            *(shown(contest.lines[name].regret) for name in report.learners),
            "" if contest.learned else "nobody learns",
        )
        for contest in report.contests
    )
    return Analysis(show.draw(report), see, tuple(claims), Table(columns, rows))


def _regrets(evidence: Evidence, contest: Contest, name: str) -> FloatArray:
    environment = suite.ENVIRONMENTS[contest.environment]
    return evidence.runs.regrets(suite.CONTENDERS[name].setting(environment, contest.epsilon, contest.episodes))


def times_over(larger: Sequence[FloatArray], smaller: Sequence[FloatArray]) -> Outcome:
    """Claim: in the geometric mean over contests, means of the first are at least `TIMES` those of the second.

    Values are [contest][seed]. Seeds are drawn anew within every contest for the interval, all of which must say so.
    """
    if not larger:
        return Outcome(Verdict.NOT_HERE, "nobody learns anywhere")
    rng = np.random.default_rng(SEED)
    logs = np.zeros(RESAMPLES)
    mean = 0.0
    for large, small in zip(larger, smaller, strict=True):
        mean += np.log(large.mean() / small.mean())
        draws = rng.integers(len(large), size=(RESAMPLES, len(large)))  # paired: a seed gives both the same environment
        logs += np.log(large[draws].mean(axis=1) / small[draws].mean(axis=1))
    low, high = np.exp(np.quantile(logs / len(larger), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    ratio = Estimate(float(np.exp(mean / len(larger))), float(low), float(high))
    numbers = f"{shown(ratio)} times, over {len(larger)} environments and budgets"
    return Outcome(negative(Estimate(TIMES - ratio.mean, TIMES - high, TIMES - low)), numbers)


def nowhere_worse(report: Report, rivals: Sequence[str]) -> Outcome:
    """Claim: the champion's mean regret is at most `WORSE` times every rival's in every contest."""
    worst = {rival: min(report.contests, key=lambda contest: contest.ratio(rival)) for rival in rivals}
    numbers = [
        f"{rival}: at worst {1 / contest.ratio(rival):.2f} times its regret ({contest.environment}, ε = "
        f"{contest.epsilon:g}: {shown(contest.lines[CHAMPION].regret)} against {shown(contest.lines[rival].regret)})"
        for rival, contest in worst.items()
    ]
    held = all(WORSE * contest.ratio(rival) >= 1 for rival, contest in worst.items())
    return Outcome(Verdict.HOLDS if held else Verdict.NOT_HERE, "; ".join(numbers))


FIGURE = Figure("suite", "The benchmark suite", analyse, cells=cells)
