"""Noise per counter: the paper's constants, exact accounting and the central Gaussian.

Budgets at RiverSwim's shape, and horizons at one budget. Nothing is run: noise follows from accounting. How much
noise each mechanism puts on a counter, and what the paper's noise truly guarantees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shufflerl.counts import CountQuery
from shufflerl.experiments.claims import Claim, Outcome, Verdict, number
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Evidence, Figure, Table
from shufflerl.experiments.figures.lines import DELTA, DELTA_TEXT
from shufflerl.mdp import Problem
from shufflerl.noise import Noise
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian, paper_noise, paper_tau
from shufflerl.privacy.certificate import at_most
from shufflerl.privacy.loss import privacy_loss

STATES, ACTIONS, HORIZON = 4, 2, 6
USERS = 20_000
EPSILON = 1.0
EPSILONS = {"full": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), "quick": (0.1, 1.0, 10.0)}
HORIZONS = {"full": (1, 2, 4, 8, 16, 32, 64), "quick": (2, 8, 32)}


#: How much more noise counts as the same.
SAME = 1.1


def analyse(evidence: Evidence) -> Analysis:
    """Draw noise against epsilon and against H."""
    epsilons, horizons = EPSILONS[evidence.size.name], HORIZONS[evidence.size.name]
    by_epsilon = [noises(epsilon, HORIZON) for epsilon in epsilons]
    by_horizon = [noises(EPSILON, horizon) for horizon in horizons]
    drawing, (left, right) = style.panels(2, width=9.2)
    looks: tuple[dict[str, Any], ...] = (
        {"label": "the paper's constants", "color": "#D55E00", "linestyle": "-.", "marker": "^"},
        {"label": "shuffle, exact accounting", "color": "#0072B2", "linestyle": "-", "marker": "o"},
        {"label": "central Gaussian", "color": "#009E73", "linestyle": "--", "marker": "s", "fillstyle": "none"},
    )
    for axes, x, columns in ((left, epsilons, by_epsilon), (right, horizons, by_horizon)):
        for which, how in enumerate(looks):
            axes.plot(x, [column[which].sd for column in columns], **how)
        axes.set(xscale="log", yscale="log", xticks=x)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        style.thousands(axes.yaxis)
    left.set(xlabel="privacy budget ε", ylabel="noise per counter (standard deviation, users)")
    left.set_title(f"H = {HORIZON}, δ = {DELTA_TEXT}")
    right.set(xlabel="steps H")
    right.set_title(f"ε = {EPSILON:g}, δ = {DELTA_TEXT}")
    style.legend_below(drawing, left, 3)
    true = [_true_epsilon(column[0], HORIZON) for column in by_epsilon]
    rows = tuple(
        (f"{epsilon:g}", *(number(noise.sd) for noise in column), at_most(cost, 3))
        for epsilon, column, cost in zip(epsilons, by_epsilon, true, strict=True)
    )
    titles = ("ε", "the paper's sd", "exact sd", "central Gaussian sd", "true ε of the paper's noise")
    one = noises(EPSILON, HORIZON)
    see = (
        f"Exact accounting needs {one[0].sd / one[1].sd:.0f} times less noise than the paper's constants at ε = "
        f"{EPSILON:g}, and hardly more than a trusted server ({one[1].sd:.1f} against {one[2].sd:.1f})."
    )
    claims = (
        Claim(
            "Lemma 3",
            "The paper's noise is (ε, δ)-private, bits sent one by one",
            "The shuffle privatizer with the paper's constants is (ε, δ)-private (its bits sent one by one).",
            private(epsilons, true),
            "Its noise is less than exact accounting asks for at some budget. The proof's composition over H counters, "
            "where a replaced user changes 2H, is what fails there.",
        ),
        Claim(
            "Introduction",
            f"Shuffled noise within {SAME:g} times a trusted server's",
            "A shuffler does without a trusted server at comparable noise "
            f"(at most {SAME:g} times the central Gaussian's, for ε up to 1 as in Lemma 3).",
            comparable(epsilons, [(column[1].sd, column[2].sd) for column in by_epsilon]),
            "The shuffler's noise must be large enough that no counter stays empty with a probability "
            "above δ. A Gaussian knows no such floor, so it may be smaller there.",
        ),
        Claim(
            "Lemma 3",
            "Noise grows at most like H, and like 1/ε up to ε = 1",
            "Counts are off by O(H/ε) up to logarithms: noise grows at most like H, and like 1/ε up to ε = 1.",
            growth(epsilons, by_epsilon, horizons, by_horizon),
            "The fitted power of H or 1/ε exceeds one. Logarithms, which the claim hides, bend it "
            "upwards at this range.",
        ),
    )
    return Analysis(drawing, see, claims, Table(titles, rows))


def noises(epsilon: float, horizon: int) -> tuple[Noise, Noise, Noise]:
    """The paper's noise, exact accounting's and the central Gaussian, for a full release."""
    budget, changed = Budget(epsilon, DELTA), _changed(horizon)
    printed = paper_noise(USERS, paper_tau(budget, horizon, STATES, ACTIONS))
    return printed, calibrate(budget, changed), calibrate_gaussian(budget, changed)


def _changed(horizon: int) -> int:
    return CountQuery.everything(Problem(horizon, STATES, ACTIONS, USERS)).changed_counters


def _true_epsilon(noise: Noise, horizon: int) -> float:
    return privacy_loss(noise, _changed(horizon)).epsilon(DELTA)


def private(stated: Sequence[float], true: Sequence[float]) -> Outcome:
    """Claim: what noise truly costs is at most what was stated."""
    held = all(cost <= epsilon for epsilon, cost in zip(stated, true, strict=True))
    pairs = (f"ε = {epsilon:g}: true ε {at_most(cost, 2)}" for epsilon, cost in zip(stated, true, strict=True))
    return Outcome(Verdict.HOLDS if held else Verdict.NOT_HERE, "; ".join(pairs))


def comparable(epsilons: Sequence[float], pairs: Sequence[tuple[float, float]]) -> Outcome:
    """Claim: the first noise of each pair is at most `SAME` times the second, up to epsilon 1."""
    ratios = [shuffled / central for shuffled, central in pairs]
    numbers = "; ".join(f"ε = {epsilon:g}: {ratio:.3f} times" for epsilon, ratio in zip(epsilons, ratios, strict=True))
    worst = max(ratio for epsilon, ratio in zip(epsilons, ratios, strict=True) if epsilon <= 1)
    return Outcome(Verdict.HOLDS if worst <= SAME else Verdict.NOT_HERE, numbers)


def growth(
    epsilons: Sequence[float],
    by_epsilon: Sequence[Sequence[Noise]],
    horizons: Sequence[int],
    by_horizon: Sequence[Sequence[Noise]],
) -> Outcome:
    """Claim: the powers of 1/epsilon (up to 1) and H in the noise are at most one, give or take a twentieth."""
    small = [index for index, epsilon in enumerate(epsilons) if epsilon <= 1]
    powers = [
        _power([1 / epsilons[index] for index in small], [by_epsilon[index][which].sd for index in small])
        for which in (0, 1)
    ] + [_power(horizons, [column[which].sd for column in by_horizon]) for which in (0, 1)]
    numbers = (
        f"the paper's constants: (1/ε)^{powers[0]:.2f} and H^{powers[2]:.2f}; "
        f"exact accounting: (1/ε)^{powers[1]:.2f} and H^{powers[3]:.2f}"
    )
    return Outcome(Verdict.HOLDS if max(powers) <= 1.05 else Verdict.NOT_HERE, numbers)


def _power(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit([math.log(value) for value in x], [math.log(value) for value in y], 1)[0])


FIGURE = Figure("noise", "Noise per counter", analyse)
