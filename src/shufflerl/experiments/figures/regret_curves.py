"""Cumulative regret against episodes on RiverSwim at two budgets: the paper's Figures (b) and (c) of RiverSwim.

Every line at the paper's two budgets. Regret curves at two budgets, and whether SDP-PE is far below the local model
and near the others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import Claim, Outcome, number, spread, together, within
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import (
    DELTA_TEXT,
    LINES,
    OPTIMISTIC,
    PE,
    SDP_PE,
    UCBVI_JDP,
    UCBVI_LDP,
    UCBVI_RARELY,
    Line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENV = "riverswim"
EPSILONS = (0.1, 1.0)


def families(size: base.Size) -> list[base.Family]:
    """Each line at each budget; one without privacy has no budget, and is there once."""
    return list(dict.fromkeys(base.family(line, ENV, epsilon, size.episodes) for line in LINES for epsilon in EPSILONS))


def cells(size: base.Size, chosen: base.Chosen) -> list[Cell]:
    """The chosen constants."""
    return base.on(size, base.chosen_settings(families(size), chosen))


#: What the paper's words are taken to mean, as CLOSE and NEAR_NO_PRIVACY.
SUBSTANTIALLY_LOWER = 0.5
#: Who loses more than this part of what never learning does has not learned.
NO_LEARNING = 0.9


def draw(axes: Axes, evidence: base.Evidence, epsilon: float) -> None:
    """Regret curves at one budget."""
    size = evidence.size
    for line in LINES:
        own = base.family(line, ENV, epsilon, size.episodes)
        style.curve(axes, line, *evidence.runs.curves(evidence.setting(own)))
    never = size.episodes * base.lost_at_random(ENV)
    dots: dict[str, Any] = {"color": style.INK, "linewidth": 1, "linestyle": (0, (1, 2))}
    axes.plot([0, size.episodes], [0, never], label="never learning", **dots)
    axes.set(xlabel="episodes", ylabel="cumulative expected regret", xlim=(0, size.episodes), ylim=(0, None))
    axes.set_xticks(np.linspace(0, size.episodes, 5))
    style.thousands(axes.xaxis)
    style.thousands(axes.yaxis)


def found(evidence: base.Evidence, epsilon: float) -> str:
    """Who is near whom, in a sentence."""
    lost = {
        line: evidence.regrets(base.family(line, ENV, epsilon, evidence.size.episodes)).mean()
        for line in (SDP_PE, UCBVI_LDP, UCBVI_JDP, UCBVI_RARELY, PE)
    }
    times = {line: number(lost[SDP_PE] / other) for line, other in lost.items()}
    return (
        f"SDP-PE has {times[UCBVI_LDP]} times the regret of UCBVI-LDP, {times[UCBVI_JDP]} times that of UCBVI-JDP "
        f"({times[UCBVI_RARELY]} times if that plans rarely) and {times[PE]} times that of PE."
    )


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw both budgets and judge the paper's comparison at each."""
    size = evidence.size
    never = size.episodes * base.lost_at_random(ENV)
    drawing, both = style.panels(len(EPSILONS), width=9.2, height=4.8)
    for axes, epsilon in zip(both, EPSILONS, strict=True):
        draw(axes, evidence, epsilon)
        axes.set_title(f"ε = {epsilon:g}")
    both[1].set_ylabel("")
    drawing.suptitle(
        f"RiverSwim: mean of {size.seeds} seeds, band ± 1 standard deviation", x=0.01, ha="left", fontsize=11
    )
    style.legend_below(drawing, both[0], 3)
    ends = {epsilon: evidence.regrets(base.family(OPTIMISTIC, ENV, epsilon, size.episodes)) for epsilon in EPSILONS}
    see = (
        f"At ε = {EPSILONS[-1]:g} SDP-PE bends away from never learning where UCBVI-LDP does not, and optimistic has "
        f"lost {spread(ends[EPSILONS[-1]])} in all. At ε = {EPSILONS[0]:g} the noise is too large for the paper's "
        f"learners within {size.episodes:,} episodes; optimistic ends at {spread(ends[EPSILONS[0]])}, where never "
        f"learning costs {number(never)}."
    )
    claims = tuple(claim for epsilon in reversed(EPSILONS) for claim in _claims(evidence, epsilon))
    return base.Analysis(drawing, see, claims)


def _claims(evidence: base.Evidence, epsilon: float) -> tuple[Claim, ...]:
    size = evidence.size

    def regrets(line: Line) -> FloatArray:
        return evidence.regrets(base.family(line, ENV, epsilon, size.episodes))

    def compared(factor: float, *others: Line) -> Outcome:
        outcomes = [(other.name, within(regrets(SDP_PE), factor, regrets(other))) for other in others]
        outcome = together(outcomes) if len(outcomes) > 1 else outcomes[0][1]
        lost = [regrets(line).mean() for line in (SDP_PE, *others)]
        nobody = ", and none of them learns" if min(lost) > NO_LEARNING * never else ""
        return replace(outcome, numbers=f"{outcome.numbers}; never learning costs {number(never)}{nobody}")

    never = size.episodes * base.lost_at_random(ENV)
    place, at = "Experiments, RiverSwim", f"at ε = {epsilon:g}"
    certificate = evidence.runs.of(evidence.setting(base.family(SDP_PE, ENV, epsilon, size.episodes)))[0].certificate
    noise = 0.0 if certificate is None else float(certificate["noise_sd"])
    drowned = (
        f"At this budget (δ = {DELTA_TEXT}) every counter of every release carries noise of standard deviation "
        f"{number(noise)}, and the states that RiverSwim's reward hangs on are visited less often than that until late "
        f"in {size.episodes:,} episodes. Never learning costs {number(never)}, so "
        "little is left to tell the learners apart."
    )
    late = (
        "The first stages are mostly noise and cost what never learning does, and at this K they are a large part of "
        "all episodes. SDP-PE has learned by their end, so that more episodes lower its share."
    )
    few = drowned if regrets(SDP_PE).mean() > NO_LEARNING * never else late
    additive = (
        "At this K the cost of privacy is most of the regret: until stages are long their releases are more noise than "
        "counts, whereas PE knows this small environment after a few hundred episodes. The figure of regret against K "
        "shows how both go on."
    )
    return (
        Claim(
            place,
            f"RiverSwim, ε = {epsilon:g}: SDP-PE at most half of UCBVI-LDP",
            f"SDP-PE's regret is substantially lower than UCBVI-LDP's {at} (at most {SUBSTANTIALLY_LOWER:g} times).",
            compared(SUBSTANTIALLY_LOWER, UCBVI_LDP),
            few,
        ),
        Claim(
            place,
            f"RiverSwim, ε = {epsilon:g}: SDP-PE within {base.CLOSE:g} times UCBVI-JDP",
            f"SDP-PE comes close to UCBVI-JDP {at} (at most {base.CLOSE:g} times its regret), be it planning in every "
            "episode or rarely.",
            compared(base.CLOSE, UCBVI_JDP, UCBVI_RARELY),
            few,
        ),
        Claim(
            place,
            f"RiverSwim, ε = {epsilon:g}: SDP-PE within {base.NEAR_NO_PRIVACY:g} times PE",
            f"SDP-PE comes close to PE without privacy {at} (at most {base.NEAR_NO_PRIVACY:g} times its regret).",
            compared(base.NEAR_NO_PRIVACY, PE),
            additive,
        ),
    )


PANELS = tuple(
    base.Panel(
        f"Regret curves, ε = {epsilon:g}",
        "SDP-PE is far below UCBVI-LDP and close to UCBVI-JDP and PE.",
        partial(draw, epsilon=epsilon),
        partial(found, epsilon=epsilon),
    )
    for epsilon in EPSILONS
)
FIGURE = base.Figure("regret-curves", "Regret as episodes go by on RiverSwim", analyse, families, cells, panels=PANELS)
