"""Cumulative regret on the heterogeneous bandit: the paper's figure of the multi-armed bandit.

Every line at the paper's budget on the environment as it is by default, which is as the paper has it. Regret curves
on the bandit, and whether SDP-PE is below the local model and near the trusted server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shufflerl.envs import ENVIRONMENTS
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, Verdict, lower, number, spread, together, within
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import LINES, OPTIMISTIC, SDP_PE, UCBVI_JDP, UCBVI_LDP, UCBVI_RARELY, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENV = "bandit"
EPSILON = 1.0


def families(size: base.Size) -> list[base.Family]:
    """Each line."""
    return [base.family(line, ENV, EPSILON, size.episodes) for line in LINES]


def cells(size: base.Size, chosen: base.Chosen) -> list[Cell]:
    """The chosen constants, and those of the theory."""
    own = families(size)
    return base.on(size, base.chosen_settings(own, chosen) + base.theory_settings(base.with_theory(own, size)))


def draw(axes: Axes, evidence: base.Evidence) -> None:
    """Regret curves."""
    size = evidence.size
    for line in LINES:
        own = base.family(line, ENV, EPSILON, size.episodes)
        style.curve(axes, line, *evidence.runs.curves(evidence.setting(own)))
    axes.set(xlabel="episodes", ylabel="cumulative expected regret", xlim=(0, size.episodes), ylim=(0, None))
    axes.set_xticks(np.linspace(0, size.episodes, 5))
    style.thousands(axes.xaxis)
    style.thousands(axes.yaxis)


def found(evidence: base.Evidence) -> str:
    """Who is near whom, in a sentence."""
    lines = (SDP_PE, UCBVI_LDP, UCBVI_JDP, UCBVI_RARELY)
    lost = [evidence.regrets(base.family(line, ENV, EPSILON, evidence.size.episodes)).mean() for line in lines]
    ours, local, trusted, rarely = map(number, lost)
    return f"SDP-PE loses {ours}, UCBVI-LDP {local}, UCBVI-JDP {trusted}, or {rarely} if it plans rarely."


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw the curves and judge the paper's two comparisons."""
    size = evidence.size
    bandit = ENVIRONMENTS.describe(ENV)["parameters"]
    own = {line: base.family(line, ENV, EPSILON, size.episodes) for line in LINES}
    drawing, (axes,) = style.panels(height=5.0)
    draw(axes, evidence)
    shape = f"{bandit['n_actions']} arms, ε = {EPSILON:g}, σ = {bandit['sigma']:g}"
    axes.set_title(f"{shape}: mean of {size.seeds} seeds, band ± 1 standard deviation")
    style.legend_below(drawing, axes, 3)
    regrets = {line: evidence.regrets(own[line]) for line in LINES if line.private}
    best = min((line for line in regrets if line is not OPTIMISTIC), key=lambda line: regrets[line].mean())
    private, local = regrets[SDP_PE], regrets[UCBVI_LDP]
    ends = ", ".join(f"{line.name} at {spread(values)}" for line, values in regrets.items())
    see = f"Without states to tell apart there is less to hide the signal. With privacy ends {ends}."
    see += misled(evidence, own)
    few = (
        "Arms that are nearly as good as the best cost little and take long to tell apart under noise. How many there "
        "are differs from seed to seed, which makes the intervals wide."
    )
    claims = (
        Claim(
            "Experiments, bandit",
            f"Bandit, ε = {EPSILON:g}: SDP-PE below UCBVI-LDP",
            f"SDP-PE surpasses UCBVI-LDP at ε = {EPSILON:g}.",
            lower(private, local),
            few,
        ),
        Claim(
            "Experiments, bandit",
            f"Bandit, ε = {EPSILON:g}: SDP-PE within {base.CLOSE:g} times UCBVI-JDP",
            f"SDP-PE comes close to UCBVI-JDP at ε = {EPSILON:g} (at most {base.CLOSE:g} times its regret), be it "
            "planning in every episode or rarely.",
            together([(line.name, within(private, base.CLOSE, regrets[line])) for line in (UCBVI_JDP, UCBVI_RARELY)]),
            few,
        ),
        Claim(
            OURS,
            f"Bandit, ε = {EPSILON:g}: optimistic below other private learners",
            f"The learner optimistic has a lower regret than the best other private learner at ε = {EPSILON:g}.",
            together([(best.name, lower(regrets[OPTIMISTIC], regrets[best]))]),
            few,
        ),
    )
    lines = list(own.values())
    return base.Analysis(drawing, see, claims, base.constants_table(evidence, lines, base.with_theory(lines, size)))


def misled(evidence: base.Evidence, own: Mapping[Line, base.Family]) -> str:
    """A sentence on lines that do better with the theory's constants than with the chosen ones, beyond doubt."""
    found = []
    for line, family_of in own.items():
        if line.theory is None or not line.private or not base.with_theory([family_of], evidence.size):
            continue
        theory = evidence.runs.regrets(family_of.setting(line.theory))
        if lower(theory, evidence.regrets(family_of)).verdict is Verdict.HOLDS:
            found.append(f"{line.name} has {spread(theory)} with the theory's")
    many = evidence.size.tuning_seeds
    return f" The choice of constants on {many} seeds misleads here: {', '.join(found)}." if found else ""


PANEL = base.Panel(f"The bandit, ε = {EPSILON:g}", "SDP-PE surpasses UCBVI-LDP and is close to UCBVI-JDP.", draw, found)
FIGURE = base.Figure("bandit", "The heterogeneous bandit", analyse, families, cells, panels=(PANEL,))
