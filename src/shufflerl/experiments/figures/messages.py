"""Messages per user against the users of a batch.

Users of a batch, from a handful to all phones on earth, at two budgets. Nothing is run: the protocol says it. What
taking part costs a user in messages: its own tags and its share of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shufflerl.counts import CountQuery
from shufflerl.experiments.claims import Claim, Outcome, Verdict, number, power
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Evidence, Figure
from shufflerl.experiments.figures.lines import DELTA, DELTA_TEXT
from shufflerl.mdp import Problem
from shufflerl.privacy.accounting import Budget, calibrate, paper_noise, paper_tau
from shufflerl.privacy.protocol import Protocol

STATES, ACTIONS, HORIZON = 4, 2, 6
EPSILONS = (0.1, 1.0)
USERS = {
    "full": tuple(round(10 ** (half / 2)) for half in range(2, 21)),
    "quick": tuple(10**power for power in range(1, 11, 3)),
}


def analyse(evidence: Evidence) -> Analysis:
    """Draw messages against users for both budgets, exactly and as printed."""
    users = USERS[evidence.size.name]
    drawing, (axes,) = style.panels(height=4.6)
    for epsilon, dashes in zip(EPSILONS, ("--", "-"), strict=True):
        printed, exact = (messages(epsilon, users, paper=paper) for paper in (True, False))
        look: dict[str, Any] = {"linestyle": dashes, "markersize": 4.5}
        axes.plot(users, printed, color="#D55E00", marker="^", label=f"the paper's constants, ε = {epsilon:g}", **look)
        axes.plot(users, exact, color="#0072B2", marker="o", label=f"exact accounting, ε = {epsilon:g}", **look)
    own = _query(users[0]).touched_counters
    axes.axhline(own, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label=f"a user's own tags: {own}")
    axes.set(xscale="log", yscale="log", xlabel="users of a batch", ylabel="messages per user (expected)")
    axes.set_title(f"X = {STATES}, A = {ACTIONS}, H = {HORIZON}, δ = {DELTA_TEXT}")
    style.legend_below(drawing, axes, 2)
    few, many = exact[0], exact[-1]
    see = (
        f"The noise of a batch is shared: at ε = {EPSILONS[-1]:g} a user sends {number(few)} messages among "
        f"{power(users[0])} users and {number(many)} among {power(users[-1])}, hardly more than the {own} tags of its "
        "own episode."
    )
    claim = Claim(
        "Discussion",
        "A user's share of the noise shrinks as batches grow",
        "A user's share of the noise shrinks as batches grow.",
        shrinks(users, exact),
        "The messages of a user do not fall from batch size to batch size. Noise per user must then be rounded to "
        "whole messages.",
    )
    return Analysis(drawing, see, (claim,))


def messages(epsilon: float, users: Sequence[int], *, paper: bool) -> list[float]:
    """Expected messages of one user for each number of users."""
    budget = Budget(epsilon, DELTA)
    tau = paper_tau(budget, HORIZON, STATES, ACTIONS)
    found = []
    for count in users:
        query = _query(count)
        noise = paper_noise(count, tau) if paper else calibrate(budget, query.changed_counters)
        found.append(Protocol(query, count, noise).messages_per_user)
    return found


def _query(users: int) -> CountQuery:
    return CountQuery.everything(Problem(HORIZON, STATES, ACTIONS, users))


def shrinks(users: Sequence[int], found: Sequence[float]) -> Outcome:
    """Claim: more users, fewer messages each."""
    held = all(after < before for before, after in pairwise(found))
    numbers = f"{number(found[0])} messages with {power(users[0])} users, {number(found[-1])} with {power(users[-1])}"
    return Outcome(Verdict.HOLDS if held else Verdict.NOT_HERE, numbers)


FIGURE = Figure("messages", "Messages per user", analyse)
