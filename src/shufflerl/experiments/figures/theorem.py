"""The theorem where it bites: regret against K over thirteen decades, and the practical constants before.

SDP-PE with the constants of the proof and with its practical defaults, with and without privacy, for K up to 1e16.
Regret and the cost of privacy against K, and from which K on the theorem's claims can be seen.

Counts of 1e16 users cost what counts of 100 do. The practical constants are the learner's defaults at every K, not
tuned: this figure is about what the constants of the proof cost; `elimination` looks closer at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import Claim, Outcome, from_some_k, number, power, shown, spread
from shufflerl.experiments.compare import interval
from shufflerl.experiments.figures import style
from shufflerl.experiments.figures.base import Analysis, Chosen, Evidence, Figure, Size, lost_at_random, mdp_of
from shufflerl.experiments.figures.bounds import leading
from shufflerl.experiments.figures.lines import DELTA, PE, SDP_PE
from shufflerl.experiments.setting import Setting

ENV = "riverswim"
EPSILON = 1.0
CONSTANTS = ("paper", "practical")
SEEDS = {"full": 5, "quick": 2}
EPISODES = {
    "full": tuple(round(10 ** (half / 2)) for half in range(6, 33)),
    "quick": (10**3, 10**6, 10**12, 10**15, 10**16),
}
#: The proof's policies one by one, or a product set that holds at least these, eliminates a little later and spares a
#: quick reproduction the time to compile the other.
POLICIES = {"full": {}, "quick": {"policies": "product"}}


def setting(size: Size, constants: str, episodes: int, *, private: bool) -> Setting:
    """One line at one K."""
    return Setting(
        env=ENV,
        learner="sdp-pe",
        privatizer="shuffle" if private else "none",
        episodes=episodes,
        epsilon=EPSILON if private else None,
        delta=DELTA if private else None,
        learner_parameters={"constants": constants} | POLICIES[size.name],
    )


def cells(size: Size, _: Chosen) -> list[Cell]:
    """Both constants, with and without privacy, at every K."""
    return [
        Cell(setting(size, constants, episodes, private=private), seed)
        for constants in CONSTANTS
        for private in (False, True)
        for episodes in EPISODES[size.name]
        for seed in range(SEEDS[size.name])
    ]


#: Learning is to lose less than this part of what never learning loses.
LEARNT = 0.5
#: A cost that has grown by less than this factor over a decade of K has stopped growing with K.
FLAT = 1.5
#: Privacy is affordable where it at most doubles the regret.
AFFORDABLE = 2.0

_NAMES = {"paper": "the paper's constants", "practical": "practical constants"}
_COLOURS = {"paper": "#D55E00", "practical": "#0072B2"}


def analyse(evidence: Evidence) -> Analysis:
    """Draw regret and the cost of privacy, and judge what can be seen of the theorem."""
    episodes = EPISODES[evidence.size.name]
    k = np.array(episodes, dtype=np.float64)
    regrets = {
        (constants, private): [
            evidence.runs.regrets(setting(evidence.size, constants, count, private=private)) for count in episodes
        ]
        for constants in CONSTANTS
        for private in (False, True)
    }
    mdp, never = mdp_of(ENV), k * lost_at_random(ENV)
    shape = mdp.n_states, mdp.n_actions, mdp.horizon
    lowest = np.array([leading(*shape, count) for count in episodes]) + np.prod(shape) / EPSILON
    costs: dict[str, list[FloatArray]] = {}
    drawing, (left, right) = style.panels(2, width=9.6, height=5.0)
    for constants in CONSTANTS:
        for private in (False, True):
            name = f"{_NAMES[constants]}, {f'ε = {EPSILON:g}' if private else 'no privacy'}"
            own = {"color": _COLOURS[constants], "label": name, "linestyle": "-" if private else "--"}
            line = SDP_PE if private else PE
            style.means(left, line, k.tolist(), regrets[constants, private], markersize=3.5, capsize=1.5, **own)
        both = zip(regrets[constants, False], regrets[constants, True], strict=True)
        cost = costs[constants] = [after - before for before, after in both]
        seen = [place for place, own in enumerate(cost) if own.mean() > 0]  # on a logarithmic axis
        look: dict[str, Any] = {
            "color": _COLOURS[constants],
            "label": _NAMES[constants],
            "markersize": 3.5,
            "capsize": 1.5,
        }
        style.means(right, SDP_PE, k[seen].tolist(), [cost[place] for place in seen], **look)
    left.plot(k, never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
    left.plot(k, lowest, color=style.INK, linewidth=1, label="lower bound √(XAH³K) + XAH/ε, no constants")
    left.set(xscale="log", yscale="log", xlabel="episodes K", ylabel="expected regret of all K episodes")
    left.set_title(f"RiverSwim: regret, mean of {SEEDS[evidence.size.name]} seeds")
    right.set(xscale="log", yscale="log", xlabel="episodes K", ylabel=f"regret added by privacy at ε = {EPSILON:g}")
    right.set_title("Cost of privacy: regret with it less regret without")
    style.legend_below(drawing, left, 2)
    claims = _claims(episodes, regrets, never)
    printed, chosen = (spread(costs[constants][-1]) for constants in CONSTANTS)
    see = (
        "With the constants of the proof (orange) nothing is learnt before the curve leaves the dotted line, at a K "
        "that no experiment has; the practical constants (blue) leave it early. At K = "
        f"{power(episodes[-1])} privacy has cost {printed} with the former and {chosen} with the latter."
    )
    return Analysis(drawing, see, claims)


def _claims(
    episodes: Sequence[int], regrets: dict[tuple[str, bool], list[FloatArray]], never: FloatArray
) -> tuple[Claim, ...]:
    literal, free = regrets["paper", True], regrets["paper", False]
    practical, practical_free = regrets["practical", True], regrets["practical", False]
    unseen = (
        "The radius of the proof exceeds the range of values by orders of magnitude until stages are long enough for "
        "its constants, so that nothing is eliminated before."
    )
    return (
        Claim(
            "Theorem 1",
            f"Theorem 1, ε = {EPSILON:g}: SDP-PE as printed learns",
            f"SDP-PE as printed learns at ε = {EPSILON:g}: it loses less than half of what never learning does.",
            learns(episodes, literal, never),
            f"{unseen} Privacy adds its precision E to the radius, which delays the first elimination further.",
        ),
        Claim(
            "Theorem 1",
            "Theorem 1, no privacy: PE as printed learns",
            "PE as printed, without privacy, learns: it loses less than half of what never learning does.",
            learns(episodes, free, never),
            f"{unseen} This is without any noise: the constants alone do it.",
        ),
        Claim(
            "Theorem 1",
            "Theorem 1: privacy costs the same at every K, as printed",
            f"The cost of privacy is additive, as printed: over a decade of K it grows by less than {FLAT:g} times.",
            flat(episodes, free, literal),
            "Before the first elimination the private learner loses in every episode, and so the cost grows with K. It "
            "is additive once both learners have eliminated what is bad.",
        ),
        Claim(
            "Theorem 1",
            "Theorem 1: privacy costs the same at every K, practical",
            f"The cost of privacy is additive, practical constants: over a decade of K it grows by less than "
            f"{FLAT:g} times.",
            flat(episodes, practical_free, practical),
            "In single seeds a slightly worse policy stays in play until much longer stages tell it apart, and these "
            "pay for it. The practical radius is not proven, so nothing bounds how often that happens; the interval is "
            "as wide as that.",
        ),
        Claim(
            "Experiments, RiverSwim",
            f"RiverSwim, large K: SDP-PE within {AFFORDABLE:g} times PE",
            f"SDP-PE comes close to PE at ε = {EPSILON:g}, practical constants (at most {AFFORDABLE:g} "
            "times its regret).",
            affordable(episodes, practical_free, practical),
            "On one environment, whose best actions stand out, the regret without privacy hardly grows with K, so "
            "there is nothing that an additive cost could become small beside. The theorem's √K is for the worst "
            "environment.",
        ),
    )


def learns(episodes: Sequence[int], regrets: Sequence[FloatArray], never: FloatArray) -> Outcome:
    """Claim: less than `LEARNT` of what never learning loses; the whole interval must say so."""
    shares = [interval(own / lost) for own, lost in zip(regrets, never, strict=True)]
    held = [(one.mean if one.high is None else one.high) < LEARNT for one in shares]
    return _numbered(
        from_some_k(episodes, held, ""), episodes, [shown(one) for one in shares], "of never learning's regret"
    )


def flat(episodes: Sequence[int], free: Sequence[FloatArray], private: Sequence[FloatArray]) -> Outcome:
    """Claim: the cost of privacy at K is less than `FLAT` times that a decade or more before.

    Costs are paired by seed, and the whole interval of the difference must say so.
    """
    cost = [after - before for before, after in zip(free, private, strict=True)]
    held = []
    for k, own in zip(episodes, cost, strict=True):
        earlier = [spent for before, spent in zip(episodes, cost, strict=True) if 10 * before <= 1.001 * k]
        held.append(bool(earlier) and own.mean() > 0 and _highest(own - FLAT * earlier[-1]) < 0)
    spreads = [spread(own) for own in cost]
    return _numbered(from_some_k(episodes, held, ""), episodes, spreads, "added by privacy")


def affordable(episodes: Sequence[int], free: Sequence[FloatArray], private: Sequence[FloatArray]) -> Outcome:
    """Claim: with privacy at most `AFFORDABLE` times the regret without; the whole interval must say so."""
    both = list(zip(free, private, strict=True))
    held = [_highest(after - AFFORDABLE * before) <= 0 for before, after in both]
    numbers = [
        f"{spread(after)} against {spread(before)}, {number(after.mean() / before.mean())} times"
        for before, after in both
    ]
    return _numbered(from_some_k(episodes, held, ""), episodes, numbers, "as much")


def _highest(values: FloatArray) -> float:
    """The upper end of the interval of the mean; the mean where there is none."""
    found = interval(values)
    return found.mean if found.high is None else found.high


def _numbered(outcome: Outcome, episodes: Sequence[int], values: Sequence[str], unit: str) -> Outcome:
    """The numbers at the first K, at the last one and where the verdict turns."""
    since = list(episodes).index(int(outcome.since)) if outcome.since is not None else 0
    places = sorted({0, max(since - 1, 0), since, len(episodes) - 1})
    text = "; ".join(f"K = {power(episodes[place])}: {values[place]}" for place in places)
    return replace(outcome, numbers=f"{text} {unit}")


FIGURE = Figure("theorem", "Regret against K: where the theorem bites", analyse, cells=cells)
