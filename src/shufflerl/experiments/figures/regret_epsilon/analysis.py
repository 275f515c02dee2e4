"""Regret against epsilon; who is worst at each; chosen constants beside those of the theory."""

from __future__ import annotations

from shufflerl.checks import FloatArray
from shufflerl.experiments.claims import Claim, lower, number, spread, together
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Evidence, constants_table, family, lost_at_random
from shufflerl.experiments.figures.lines import LINES, PE, SDP_PE, UCBVI_JDP, UCBVI_LDP, Line
from shufflerl.experiments.figures.regret_epsilon.sweep import ENV, EPSILONS, THEORY, families, with_theory


def analyse(evidence: Evidence) -> Analysis:
    """Draw the trade-off and judge who is worst."""
    size = evidence.size
    epsilons = EPSILONS[size.name]
    never = size.episodes * lost_at_random(ENV)

    def regrets(line: Line, epsilon: float) -> FloatArray:
        return evidence.regrets(family(line, ENV, epsilon, size.episodes))

    drawing, (axes,) = style.panels(height=4.8)
    for line in LINES:
        values = [regrets(line, epsilon) for epsilon in epsilons]
        style.means(axes, line, epsilons, values, **({} if line.private else {"marker": ""}))
    printed = THEORY[size.name]
    literal = [evidence.runs.regrets(family(SDP_PE, ENV, e, size.episodes).setting(SDP_PE.theory)) for e in printed]
    style.means(axes, SDP_PE, printed, literal, linestyle=":", marker="x", label="SDP-PE, the paper's constants")
    axes.axhline(never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
    axes.set(xscale="log", yscale="log", xlabel="privacy budget ε (smaller is more private)")
    axes.set(ylabel=f"expected regret after {size.episodes:,} episodes", xticks=epsilons)
    axes.set_title(f"RiverSwim, {size.seeds} seeds, bars: 95% interval of the mean")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000])
    axes.set_ylim(None, 1.5 * never)
    style.thousands(axes.yaxis)
    style.legend_below(drawing, axes, 3)
    worst = [
        (f"ε = {epsilon:g}, {line.name}", lower(regrets(line, epsilon), regrets(UCBVI_LDP, epsilon)))
        for epsilon in epsilons
        for line in (SDP_PE, UCBVI_JDP)
    ]
    claim = Claim(
        "Experiments, RiverSwim",
        "UCBVI-LDP has the largest regret at every privacy budget.",
        together(worst),
        "At the smallest budgets the noise hides what few users can show, so that no private learner learns within "
        f"{size.episodes:,} episodes. Never learning costs {number(never)}, and differences around it are chance.",
    )
    middle = epsilons[len(epsilons) // 2]
    see = (
        f"With less privacy (to the right) SDP-PE falls from never learning to within reach of its own limit without "
        f"privacy: at ε = {middle:g} it has {spread(regrets(SDP_PE, middle))}, UCBVI-JDP "
        f"{spread(regrets(UCBVI_JDP, middle))}, UCBVI-LDP {spread(regrets(UCBVI_LDP, middle))}, PE "
        f"{spread(regrets(PE, middle))}."
    )
    return Analysis(drawing, see, (claim,), constants_table(evidence, families(size), with_theory(size)))
