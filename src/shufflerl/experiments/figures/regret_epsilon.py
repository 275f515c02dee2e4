"""Final regret against the privacy budget on RiverSwim: the paper's Figure 4(a).

Every line at every budget, and SDP-PE with the paper's constants at each. Regret against epsilon; who is worst at
each; chosen constants beside those of the theory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, lower, number, spread, together, within
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import LINES, OPTIMISTIC, PE, SDP_PE, UCBVI_JDP, UCBVI_LDP, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENV = "riverswim"
EPSILONS = {"full": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), "quick": (0.1, 1.0, 10.0)}
#: Budgets at which the constants of the theory are run too.
THEORY = {"full": EPSILONS["full"], "quick": (1.0,)}


def families(size: base.Size) -> list[base.Family]:
    """Each line at each budget; one without privacy has no budget, and is there once."""
    every = [base.family(line, ENV, epsilon, size.episodes) for line in LINES for epsilon in EPSILONS[size.name]]
    return list(dict.fromkeys(every))


def with_theory(size: base.Size) -> list[base.Family]:
    """Those that are run with the constants of the theory too."""
    printed = [own for own in families(size) if own.epsilon is None or own.epsilon in THEORY[size.name]]
    return base.with_theory(printed, size)


def cells(size: base.Size, chosen: base.Chosen) -> list[Cell]:
    """The chosen constants, and those of the theory."""
    return base.on(size, base.chosen_settings(families(size), chosen) + base.theory_settings(with_theory(size)))


def draw(axes: Axes, evidence: base.Evidence) -> None:
    """Regret against epsilon."""
    size = evidence.size
    epsilons, never = EPSILONS[size.name], size.episodes * base.lost_at_random(ENV)
    for line in LINES:
        own = [base.family(line, ENV, epsilon, size.episodes) for epsilon in epsilons]
        values = [evidence.regrets(one) for one in own]
        style.means(axes, line, epsilons, values, **({} if line.private else {"marker": ""}))
    printed = THEORY[size.name]
    literal = base.theory_settings([base.family(SDP_PE, ENV, epsilon, size.episodes) for epsilon in printed])
    values = [evidence.runs.regrets(setting) for setting in literal]
    style.means(axes, SDP_PE, printed, values, linestyle=":", marker="x", label="SDP-PE, the paper's constants")
    axes.axhline(never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
    axes.set(xscale="log", yscale="log", xlabel="privacy budget ε (smaller is more private)")
    axes.set(ylabel=f"expected regret after {size.episodes:,} episodes", xticks=epsilons)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000])
    axes.set_ylim(None, 1.5 * never)
    style.thousands(axes.yaxis)


def found(evidence: base.Evidence) -> str:
    """Who is worst, in a sentence."""
    size = evidence.size
    epsilons = EPSILONS[size.name]
    private = [line for line in LINES if line.private]
    regrets = {
        e: {line: evidence.regrets(base.family(line, ENV, e, size.episodes)).mean() for line in private}
        for e in epsilons
    }
    worst = sum(max(own, key=lambda line: own[line]) is UCBVI_LDP for own in regrets.values())
    one = regrets[1.0]
    return (
        f"It is worst at {worst} of {len(epsilons)} budgets; at ε = 1 it loses {number(one[UCBVI_LDP])}, SDP-PE "
        f"{number(one[SDP_PE])} and optimistic {number(one[OPTIMISTIC])}."
    )


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw the trade-off and judge who is worst."""
    size = evidence.size
    epsilons = EPSILONS[size.name]
    never = size.episodes * base.lost_at_random(ENV)

    def regrets(line: Line, epsilon: float) -> FloatArray:
        return evidence.regrets(base.family(line, ENV, epsilon, size.episodes))

    drawing, (axes,) = style.panels(height=4.8)
    draw(axes, evidence)
    axes.set_title(f"RiverSwim, {size.seeds} seeds, bars: 95% interval of the mean")
    style.legend_below(drawing, axes, 3)
    rivals = [line for line in LINES if line.private and line is not OPTIMISTIC]
    best_others = [min(rivals, key=lambda line: regrets(line, epsilon).mean()) for epsilon in epsilons]
    best = [
        (f"ε = {epsilon:g}, {line.name}", lower(regrets(OPTIMISTIC, epsilon), regrets(line, epsilon)))
        for epsilon, line in zip(epsilons, best_others, strict=True)
    ]
    worst = [
        (f"ε = {epsilon:g}, {line.name}", lower(regrets(line, epsilon), regrets(UCBVI_LDP, epsilon)))
        for epsilon in epsilons
        for line in (SDP_PE, UCBVI_JDP)
    ]
    middle = epsilons[len(epsilons) // 2]
    claims = (
        Claim(
            "Experiments, RiverSwim",
            "RiverSwim, every ε: UCBVI-LDP is worst",
            "UCBVI-LDP has the largest regret at every privacy budget.",
            together(worst),
            "At the smallest budgets the noise hides what few users can show, so that none of the three learns within "
            f"{size.episodes:,} episodes. Never learning costs {number(never)}, and differences around it are chance.",
        ),
        Claim(
            OURS,
            "RiverSwim, every ε: optimistic below other private learners",
            "The learner optimistic has a lower regret than the best other private learner at every privacy budget.",
            together(best),
            "The seeds do not tell it apart from the best other learner there, or that one is better. More seeds would "
            "tell which.",
        ),
        Claim(
            OURS,
            f"RiverSwim, ε = {middle:g}: optimistic within {base.NEAR_NO_PRIVACY:g} times PE",
            f"optimistic at ε = {middle:g} comes close to PE without privacy (at most {base.NEAR_NO_PRIVACY:g} times "
            "its regret).",
            within(regrets(OPTIMISTIC, middle), base.NEAR_NO_PRIVACY, regrets(PE, middle)),
            "The first batches are mostly noise, and what they cost before anything can be seen is most of its regret. "
            "PE sees true counts and knows this small environment after a few hundred episodes.",
        ),
    )
    named = ", ".join(f"{line.name} {spread(regrets(line, middle))}" for line in (OPTIMISTIC, *rivals, PE))
    see = (
        "With less privacy (to the right) every learner but the local one falls from never learning towards its own "
        f"limit without privacy, optimistic first. At ε = {middle:g}: {named}."
    )
    return base.Analysis(drawing, see, claims, base.constants_table(evidence, families(size), with_theory(size)))


PANEL = base.Panel("Regret against ε", "UCBVI-LDP is worst at every budget.", draw, found)
FIGURE = base.Figure(
    "regret-epsilon",
    "Regret against the privacy budget on RiverSwim",
    analyse,
    families,
    cells,
    panels=(PANEL,),
)
