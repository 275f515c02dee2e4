"""Final regret against policy switches: the paper's figure of the switching cost.

Every line at the paper's budget, and SDP-PE with the paper's constants: runs that other figures have too. Who changes
the deployed policy how often, at what regret.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, Outcome, Verdict, lower, number, shown, spread
from shufflerl.experiments.compare import interval
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import LINES, OPTIMISTIC, PE, SDP_PE, UCBVI, UCBVI_JDP, UCBVI_LDP, UCBVI_RARELY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENV = "riverswim"
EPSILON = 1.0
LITERAL = (SDP_PE, PE)


def families(size: base.Size) -> list[base.Family]:
    """Each line."""
    return [base.family(line, ENV, EPSILON, size.episodes) for line in LINES]


def cells(size: base.Size, chosen: base.Chosen) -> list[Cell]:
    """The chosen constants, and the paper's."""
    literal = [own for own in families(size) if own.line in LITERAL]
    return base.on(size, base.chosen_settings(families(size), chosen) + base.theory_settings(literal))


#: What "orders of magnitude" is taken to mean.
FEWER = 100
#: The switches that the paper reports for SDP-PE at K = 20,000.
PAPERS = 88


def draw(axes: Axes, evidence: base.Evidence) -> None:
    """Regret against switches, a mark per seed."""
    size, runs = evidence.size, evidence.runs
    own = {line: base.family(line, ENV, EPSILON, size.episodes) for line in LINES}
    for line in LINES:
        setting = evidence.setting(own[line])
        look: dict[str, Any] = {"color": line.colour, "marker": line.marker, "linestyle": "", "alpha": 0.75}
        look["fillstyle"] = "full" if line.private else "none"
        axes.plot(runs.switches(setting), runs.regrets(setting), label=line.name, **look)
    for line in LITERAL:
        (setting,) = base.theory_settings([own[line]])
        look = {"color": line.colour, "marker": "x" if line.private else "+", "linestyle": "", "alpha": 0.75}
        look["markersize"] = 6 if line.private else 10  # they may lie on one another
        axes.plot(runs.switches(setting), runs.regrets(setting), label=f"{line.name}, the paper's constants", **look)
    axes.axvline(size.episodes, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="a switch in every episode")
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # who never switches is shown too
    axes.set(yscale="log", xlim=(-0.3, 2 * size.episodes), xlabel="policy switches", ylabel="expected regret")
    axes.set_xticks([0, 1, 10, 100, 1000, 10_000])
    style.thousands(axes.xaxis)
    style.thousands(axes.yaxis)


def found(evidence: base.Evidence) -> str:
    """Who switches how often, in a sentence."""
    lines = (SDP_PE, UCBVI_JDP, OPTIMISTIC)
    families_of = [base.family(line, ENV, EPSILON, evidence.size.episodes) for line in lines]
    ours, theirs, best = (number(evidence.runs.switches(evidence.setting(own)).mean()) for own in families_of)
    return f"SDP-PE switches {ours} times, optimistic {best} times, UCBVI-JDP {theirs} times."


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw regret against switches and judge the paper's counts."""
    size, runs = evidence.size, evidence.runs
    own = {line: base.family(line, ENV, EPSILON, size.episodes) for line in LINES}
    drawing, (axes,) = style.panels(height=5.4)
    draw(axes, evidence)
    axes.set_title(f"RiverSwim, {size.episodes:,} episodes, ε = {EPSILON:g}; one mark per seed ({size.seeds})")
    style.legend_below(drawing, axes, 2)
    private = runs.switches(evidence.setting(own[SDP_PE]))
    (printed,) = base.theory_settings([own[SDP_PE]])
    literal = runs.switches(printed)
    per_episode = {line: runs.switches(evidence.setting(own[line])) for line in (UCBVI, UCBVI_JDP, UCBVI_LDP)}
    ours, rarely = (runs.switches(evidence.setting(own[line])) for line in (OPTIMISTIC, UCBVI_RARELY))
    see = (
        f"SDP-PE deploys a new policy {spread(private)} times, {spread(literal)} times with the paper's constants, "
        f"where UCBVI-JDP does so {spread(per_episode[UCBVI_JDP])} times, or {spread(rarely)} times when it plans "
        f"rarely. optimistic has the least regret with privacy (filled marks), after {spread(ours)} switches."
    )
    most = (base.mdp_of(ENV).horizon + 1) * math.log2(size.episodes)
    claims = (
        Claim(
            "Theorem 1",
            "SDP-PE switches at most (H + 1) log2 K times",
            "SDP-PE switches O(H log K) times: at most (H + 1) log2 K with either constants "
            f"(the paper reports {PAPERS} switches).",
            at_most(max(private.max(), literal.max()), most, f"{spread(private)}, {spread(literal)} as printed"),
            "A stage of crude exploration deploys one mixture per step, and a stage of fine exploration one more. So "
            "many stages were played that their sum exceeds the bound.",
        ),
        Claim(
            "Experiments, switching cost",
            f"SDP-PE switches {FEWER} times less often than UCBVI-JDP",
            f"SDP-PE switches orders of magnitude less often than UCBVI-JDP (at least {FEWER} times less).",
            fewer(private, per_episode[UCBVI_JDP]),
            f"UCBVI-JDP does not switch in every episode, and K is small. SDP-PE's switches grow with log K and those "
            f"of UCBVI-JDP with K, so the factor of {FEWER} comes with more episodes.",
        ),
        Claim(
            "Experiments, switching cost",
            "UCBVI switches in every episode, under any privacy",
            f"UCBVI, UCBVI-JDP and UCBVI-LDP update the policy in every episode ({size.episodes:,} switches).",
            every_episode({line.name: values for line, values in per_episode.items()}, size.episodes),
            "They plan anew after every episode, but the plan often comes out the same, and then nothing is deployed. "
            "Counted are changes of the deployed policy, which is what a network pays for.",
        ),
        Claim(
            OURS,
            f"optimistic switches at most {PAPERS} times",
            f"optimistic switches no more often than the {PAPERS} times that the paper reports for SDP-PE.",
            at_most(ours.max(), PAPERS, spread(ours)),
            "It deploys one mixture of policies per batch. There are at most 80 batches, 40 under privacy.",
        ),
    )
    return base.Analysis(drawing, see, claims)


def fewer(few: FloatArray, many: FloatArray) -> Outcome:
    """Claim: the first switches `FEWER` times less often than the second, or less; values are paired by seed."""
    verdict = lower(FEWER * few, many).verdict
    return Outcome(verdict, f"{spread(few)} against {spread(many)}: {many.mean() / few.mean():,.0f} times less often")


def at_most(found: float, most: float, numbers: str) -> Outcome:
    """Claim: what was found is at most the bound."""
    return Outcome(Verdict.HOLDS if found <= most else Verdict.NOT_HERE, f"{numbers}; bound {most:,.0f}")


def every_episode(switches: dict[str, FloatArray], episodes: int) -> Outcome:
    """Claim: all but one in a hundred episodes switch, for each."""
    estimates = {name: interval(values) for name, values in switches.items()}
    every = all((one.mean if one.low is None else one.low) >= 0.99 * episodes for one in estimates.values())
    numbers = "; ".join(f"{name}: {shown(one)}" for name, one in estimates.items())
    return Outcome(Verdict.HOLDS if every else Verdict.NOT_HERE, numbers)


PANEL = base.Panel("Policy switches", f"SDP-PE switches {PAPERS} times, UCBVI in every episode.", draw, found)
FIGURE = base.Figure("switches", "Regret against policy switches", analyse, families, cells, panels=(PANEL,))
