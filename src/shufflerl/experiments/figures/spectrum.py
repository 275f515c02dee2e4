"""Dynamic spectrum access, the use that the paper is motivated by: the learned policy and its certificate.

Nodes on three channels, eight slots a session; as many nodes as there are, with and without privacy. What a session
earns with the policy that was learned, beside a random policy's and the optimal one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, Outcome, from_some_k, power, shown
from shufflerl.experiments.compare import interval
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import OPTIMISTIC, OPTIMISTIC_FREE, PE, SDP_PE, Line
from shufflerl.experiments.setting import Setting, prepare

ENV = "spectrum"
EPSILON = 1.0
LINES = (OPTIMISTIC, OPTIMISTIC_FREE, SDP_PE, PE)
EPISODES = {
    "full": (3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000),
    "quick": (10_000, 100_000),
}
#: Constants are chosen at this K and kept at every other.
TUNED_AT = 100_000


def families(_: base.Size) -> list[base.Family]:
    """Each line."""
    return [base.family(line, ENV, EPSILON, TUNED_AT) for line in LINES]


def cells(size: base.Size, chosen: base.Chosen) -> list[Cell]:
    """The chosen constants at every K."""
    return base.on(size, [own.setting(chosen[own], k) for own in families(size) for k in EPISODES[size.name]])


#: How much of the way from random to optimal counts as learned.
LEARNED = 0.95


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw value against the number of nodes, and print the certificate."""
    size, mdp = evidence.size, base.mdp_of(ENV)
    episodes = EPISODES[size.name]
    best, worst = mdp.optimal_value, base.value_at_random(mdp)
    drawing, (axes,) = style.panels(height=4.6)
    learned: dict[Line, list[FloatArray]] = {}
    for line in LINES:
        own = base.family(line, ENV, EPSILON, TUNED_AT)
        learned[line] = [late_values(evidence, evidence.setting(own, k), best) for k in episodes]
        style.means(axes, line, episodes, learned[line])
        if line.private:
            whole = [best - evidence.regrets(own, k) / k for k in episodes]
            style.means(axes, line, episodes, whole, linestyle=":", marker="", label=f"{line.name}, all sessions")
    axes.axhline(best, color=style.INK, linewidth=1.2, label=f"optimal policy: {best:.2f}")
    axes.axhline(worst, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label=f"random policy: {worst:.2f}")
    axes.set(xscale="log", xlabel="nodes K, one session each", ylim=(0, 1.08 * best))
    axes.set_ylabel("packets heard per session\n(last 5% of the sessions, or all)")
    axes.set_title(f"3 channels, {mdp.horizon} slots, ε = {EPSILON:g}: mean of {size.seeds} seeds, 95% interval")
    style.legend_below(drawing, axes, 3)
    claims = tuple(
        Claim(
            place,
            f"Spectrum, ε = {EPSILON:g}: {line.name} gets {LEARNED:.0%} of what can be won",
            f"{line.name} learns a good spectrum policy at ε = {EPSILON:g}: {LEARNED:.0%} of the way from random to "
            "optimal.",
            good(episodes, [(values - worst) / (best - worst) for values in learned[line]]),
            "With few nodes the counts of channels that are rarely sensed drown in the noise. Noise does not grow with "
            "the nodes while counts do, so that some number of nodes is always enough.",
        )
        for place, line in (("Introduction, dynamic spectrum access", SDP_PE), (OURS, OPTIMISTIC))
    )
    middle = len(episodes) // 2
    ends = " and ".join(f"{shown(interval(learned[line][middle]))} with {line.name}" for line in (OPTIMISTIC, SDP_PE))
    see = (
        f"Among {power(episodes[middle])} nodes the last earn {ends} packets a session of at most {best:.2f}, where "
        f"random play earns {worst:.2f}; what optimistic guarantees to every node is below."
    )
    certificate = prepare(evidence.setting(base.family(OPTIMISTIC, ENV, EPSILON, TUNED_AT)), 0).certificate
    return base.Analysis(drawing, see, claims, base.constants_table(evidence, families(size), []), str(certificate))


def good(episodes: Sequence[int], shares: Sequence[FloatArray]) -> Outcome:
    """Claim: at least `LEARNED` of the way from random to optimal; the whole interval must say so."""
    estimates = [interval(own) for own in shares]
    held = [(one.mean if one.low is None else one.low) >= LEARNED for one in estimates]
    numbers = "; ".join(f"K = {power(k)}: {shown(one)}" for k, one in zip(episodes, estimates, strict=True))
    return from_some_k(episodes, held, f"{numbers} of the way from random to optimal")


def late_values(evidence: base.Evidence, setting: Setting, best: float) -> FloatArray:
    """Value per session [seed] of what was deployed in the last twentieth of the sessions."""
    episodes, curves = evidence.runs.curves(setting)
    start = int(np.searchsorted(episodes, 0.95 * setting.episodes))
    lost: FloatArray = (curves[:, -1] - curves[:, start]) / (episodes[-1] - episodes[start])
    return best - lost


FIGURE = base.Figure("spectrum", "Dynamic spectrum access", analyse, families, cells)
