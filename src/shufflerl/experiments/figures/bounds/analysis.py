"""Bounds in figures beside regret measured, with the chosen constants and with the theory's."""

from __future__ import annotations

import numpy as np

from shufflerl.experiments.claims import Claim, Outcome, Verdict, number, spread
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Evidence, Table, family, lost_at_random, mdp_of
from shufflerl.experiments.figures.bounds.sweep import BOUNDS, ENV, EPSILON, leading


def analyse(evidence: Evidence) -> Analysis:
    """Draw each bound's two terms beside what was measured."""
    size, mdp = evidence.size, mdp_of(ENV)
    sizes = mdp.n_states, mdp.n_actions, mdp.horizon, size.episodes
    lead, never = leading(*sizes), size.episodes * lost_at_random(ENV)
    drawing, (axes,) = style.panels(height=4.2)
    rows, within_bound = [], []
    for place, bound in enumerate(BOUNDS):
        own = family(bound.line, ENV, EPSILON, size.episodes)
        cost = bound.privacy(*sizes, EPSILON)
        measured, theory = evidence.regrets(own), evidence.runs.regrets(own.setting(own.line.theory))
        within_bound.append(max(measured.max(), theory.max()) <= lead + cost)
        label = dict.fromkeys(("bound", "leading", "chosen", "theory"), None) if place else _LABELS
        axes.plot([lead + cost], [place], "|", markersize=22, mew=3, color=bound.line.colour, label=label["bound"])
        axes.plot([lead], [place], "|", markersize=22, mew=1.2, color=style.INK, label=label["leading"])
        axes.plot(
            measured,
            np.full(len(measured), place - 0.12),
            "o",
            color=bound.line.colour,
            alpha=0.6,
            label=label["chosen"],
        )
        axes.plot(
            theory, np.full(len(theory), place + 0.12), "x", color=bound.line.colour, alpha=0.6, label=label["theory"]
        )
        rows.append(
            (bound.line.name, bound.model, f"Õ({bound.formula})", number(lead + cost), spread(measured), spread(theory))
        )
    axes.axvline(never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
    axes.set(xscale="log", xlabel="expected regret; bounds without their constants and logarithms", ylim=(2.6, -0.6))
    axes.set_yticks(range(len(BOUNDS)), [f"{bound.line.name}\n{bound.formula}" for bound in BOUNDS])
    axes.set_title(f"RiverSwim, K = {size.episodes:,}, ε = {EPSILON:g}, one mark per seed ({size.seeds})")
    style.legend_below(drawing, axes, 3)
    below = Outcome(
        Verdict.HOLDS if all(within_bound) else Verdict.NOT_HERE,
        "; ".join(f"{row[0]}: bound {row[3]}, measured {row[4]}, with the theory's constants {row[5]}" for row in rows),
    )
    see = (
        "Every measured regret lies below its bound, but so does never learning below the bounds with privacy: at this "
        "K they promise nothing, and what tells the models apart is what was measured."
        if all(within_bound)
        else "Some measured regret exceeds its bound taken without constants and logarithms."
    )
    claim = Claim(
        "Table 1",
        "Regret stays below the table's bounds (taken without constants and logarithms).",
        below,
        "Bounds hide constants and logarithms, which are left out here. With them they would be larger still, so an "
        "excess contradicts nothing proven.",
    )
    columns = (
        "line",
        "model",
        "bound",
        f"at K = {size.episodes:,}",
        "measured, chosen constants",
        "measured, the theory's",
    )
    return Analysis(drawing, see, (claim,), Table(columns, tuple(rows)))


_LABELS = {
    "bound": "bound",
    "leading": "its leading term √(XAH³K)",
    "chosen": "measured, chosen constants",
    "theory": "measured, the theory's constants",
}
