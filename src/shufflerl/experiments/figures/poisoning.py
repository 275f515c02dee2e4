"""Users who lie: regret against their share, where users add the noise and where the servers do.

The strongest attacks of `shufflerl.attacks` (`python -m bench poisoning` tries all), the worst at each share. What
a lie is worth where a report holds many messages, and where it is one tag of each family and step.
"""

from __future__ import annotations

from typing import Any

from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.claims import OURS, Claim, number, spread, together, within
from shufflerl.experiments.compare import interval
from shufflerl.experiments.figures import base, style
from shufflerl.experiments.figures.lines import DELTA
from shufflerl.experiments.setting import Setting

ENV, EPSILON = "riverswim", 1.0
SHARES = {"full": (0.0, 0.001, 0.01, 0.03, 0.1), "quick": (0.0, 0.01)}
#: Tried at every share.
TRIED = ("rewards of one action", "false episodes", "hidden way")
#: At these shares the regret may be so many times that without liars, with noise by the servers.
BOUNDS = {0.001: 1.1, 0.01: 1.4}
#: Batches of a network: among fewer users a report would hold thousands of messages.
USERS = 100

_LOOKS: dict[str, dict[str, Any]] = {
    "users": {"label": "noise by users", "color": "#D55E00", "linestyle": "-.", "marker": "^"},
    "servers": {"label": "noise by the servers", "color": "#0072B2", "linestyle": "-", "marker": "o"},
}


def setting(size: base.Size, source: str, attack: str, share: float) -> Setting:
    """A run in which a share of the users lie."""
    return Setting(
        env=ENV,
        learner="optimistic",
        privatizer="shuffle",
        episodes=size.episodes,
        epsilon=EPSILON,
        delta=DELTA,
        learner_parameters={"first": USERS},
        privatizer_parameters={"noise": source},
        liars={"attack": attack, "share": share},
    )


def cells(size: base.Size, _: base.Chosen) -> list[Cell]:
    """Every attack at every share; where nobody lies they are one."""
    return base.on(
        size,
        [
            setting(size, source, attack, share)
            for source in _LOOKS
            for share in SHARES[size.name]
            for attack in (TRIED if share else TRIED[:1])
        ],
    )


def worst(evidence: base.Evidence, source: str, share: float) -> tuple[str, FloatArray]:
    """The attack of the largest mean regret, and its regret[seed]."""
    attacks = TRIED if share else TRIED[:1]
    found = {one: evidence.runs.regrets(setting(evidence.size, source, one, share)) for one in attacks}
    name = max(found, key=lambda one: float(found[one].mean()))
    return name, found[name]


def analyse(evidence: base.Evidence) -> base.Analysis:
    """Draw regret against the share of liars."""
    shares = SHARES[evidence.size.name]
    never = evidence.size.episodes * base.lost_at_random(ENV)
    drawing, (axes,) = style.panels()
    rows, regrets = [], {}
    for source, look in _LOOKS.items():
        found = [worst(evidence, source, share) for share in shares]
        regrets[source] = {share: values for share, (_, values) in zip(shares, found, strict=True)}
        estimates = [interval(values) for _, values in found]
        low = [one.mean - (one.mean if one.low is None else one.low) for one in estimates]
        high = [(one.mean if one.high is None else one.high) - one.mean for one in estimates]
        means = [one.mean for one in estimates]
        axes.errorbar([max(share, 1e-4) for share in shares], means, yerr=[low, high], capsize=2.5, **look)
        for share, (name, values) in zip(shares, found, strict=True):
            times = number(float(values.mean() / found[0][1].mean()))
            rows.append((source, f"{share:.1%}", name if share else "", spread(values), times if share else ""))
    axes.axhline(never, color=style.INK, linewidth=1, linestyle=(0, (1, 2)), label="never learning")
    axes.set(xscale="log", yscale="log", xlabel="share of users who lie (at the left end: nobody)")
    axes.set_ylabel(f"regret after {evidence.size.episodes:,} episodes, worst attack")
    axes.xaxis.set_major_formatter("{x:.4g}")
    style.thousands(axes.yaxis)
    axes.set_title(f"RiverSwim, ε = {EPSILON:g}: mean of {evidence.size.seeds} seeds, 95% interval")
    style.legend_below(drawing, axes, 3)
    ours = regrets["servers"]
    claims = (
        Claim(
            OURS,
            "Liars are no stronger than honest users, servers' noise",
            "With noise by the servers liars are no stronger than honest users: "
            + ", ".join(f"{share:.1%} of them at most {times:g} times the regret" for share, times in BOUNDS.items())
            + ".",
            together([(f"{s:.1%}", within(ours[s], times, ours[0.0])) for s, times in BOUNDS.items() if s in ours]),
            "What liars say cannot be told from what others saw. A share of them is a fact about the population, which "
            "no estimate from its reports alone can undo.",
        ),
    )
    most = max(share for share in shares if share <= 0.01)
    see = " and ".join(
        f"{number(float(regrets[source][most].mean() / regrets[source][0.0].mean()))} times with {look['label']}"
        for source, look in _LOOKS.items()
    )
    titles = ("noise by", "liars", "worst attack", "regret", "times the clean regret")
    return base.Analysis(
        drawing, f"If {most:.0%} of the users lie, regret is {see}.", claims, base.Table(titles, tuple(rows))
    )


FIGURE = base.Figure("poisoning", "Users who lie", analyse, cells=cells)
