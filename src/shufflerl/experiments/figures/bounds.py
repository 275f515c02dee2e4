"""The paper's table of regret bounds, with what was measured beside each.

The three private lines of the paper's table at its budget on RiverSwim, and the bounds it gives them. Bounds in
figures beside regret measured, with the chosen constants and with the theory's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import Claim, Outcome, Verdict, number, spread
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import SDP_PE, UCBVI_JDP, UCBVI_LDP, Line

ENV = "riverswim"
EPSILON = 1.0


@dataclass(frozen=True)
class Bound:
    """A line's bound: the leading term sqrt(XAH^3 K), which all share, and the cost of privacy."""

    line: Line
    model: str
    formula: str
    privacy: Callable[[int, int, int, int, float], float]  # of X, A, H, K, epsilon


def leading(states: int, actions: int, horizon: int, episodes: int) -> float:
    """sqrt(XAH^3 K), the lower bound without privacy up to constants."""
    return math.sqrt(states * actions * horizon**3 * episodes)


BOUNDS = (
    Bound(UCBVI_JDP, "ε-JDP", "√(XAH³K) + X²AH³/ε", lambda x, a, h, k, e: x**2 * a * h**3 / e),
    Bound(UCBVI_LDP, "ε-LDP", "√(XAH³K) + X²AH³√K/ε", lambda x, a, h, k, e: x**2 * a * h**3 * math.sqrt(k) / e),
    Bound(SDP_PE, "(ε, δ)-SDP", "√(XAH³K) + X³AH⁶/ε", lambda x, a, h, k, e: x**3 * a * h**6 / e),
)


def families(size: base.Size) -> list[base.Family]:
    """Each line of the table."""
    return [base.family(bound.line, ENV, EPSILON, size.episodes) for bound in BOUNDS]


def cells(size: base.Size, chosen: base.Chosen) -> list[Cell]:
    """The chosen constants, and those of the theory."""
    own = families(size)
    return base.on(size, base.chosen_settings(own, chosen) + base.theory_settings(own))


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw each bound's two terms beside what was measured."""
    size, mdp = evidence.size, base.mdp_of(ENV)
    sizes = mdp.n_states, mdp.n_actions, mdp.horizon, size.episodes
    lead, never = leading(*sizes), size.episodes * base.lost_at_random(ENV)
    drawing, (axes,) = style.panels(height=4.2)
    rows, within_bound = [], []
    for place, bound in enumerate(BOUNDS):
        own = base.family(bound.line, ENV, EPSILON, size.episodes)
        cost = bound.privacy(*sizes, EPSILON)
        (literal,) = base.theory_settings([own])
        measured, theory = evidence.regrets(own), evidence.runs.regrets(literal)
        within_bound.append(max(measured.max(), theory.max()) <= lead + cost)
        first = place == 0  # one legend for all rows
        around = [place - 0.25, place + 0.25]
        axes.plot([lead + cost] * 2, around, linewidth=4, color=bound.line.colour, label="bound" if first else None)
        label = "its leading term √(XAH³K)" if first else None
        axes.plot([lead] * 2, around, linewidth=1.5, color=style.INK, label=label)
        for values, shift, marker, name in ((measured, -0.12, "o", "chosen"), (theory, 0.12, "x", "the theory's")):
            look: dict[str, Any] = {"marker": marker, "linestyle": "", "color": bound.line.colour, "alpha": 0.6}
            label = f"measured, {name} constants" if first else None
            axes.plot(values, np.full(len(values), place + shift), label=label, **look)
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
        "Regret below the table's bounds",
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
    return base.Analysis(drawing, see, (claim,), base.Table(columns, tuple(rows)))


FIGURE = base.Figure("bounds", "The table of bounds, and the regret measured", analyse, families, cells)
