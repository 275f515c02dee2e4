"""What users who lie can do: how far one moves a counter, and the regret of runs with liars in them, in both modes.

Where the servers add the noise a liar sends one tag of each family and step; where users do, as many as its report may
hold. Every attack of `shufflerl.attacks` is tried and the worst reported. In most, liars are a share of every batch; in
an early crowd they are a share of all users and half of the first batches, which is told apart; where users are drawn
by lot for every batch (`admission`) they are the first of those who are drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from bench.measure import Figure
from shufflerl.arrays import FloatArray
from shufflerl.attacks import ATTACKS, messages_per_report
from shufflerl.counts import CountQuery
from shufflerl.errors import PrivacyWarning
from shufflerl.experiments import store
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.engine import run_cells
from shufflerl.experiments.figures.base import Runs, mdp_of
from shufflerl.experiments.setting import Setting
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import ServersNoise, ShuffledPoisson

BUDGET, EPISODES = Budget(1.0, 1e-5), 20_000
ENVIRONMENTS = ("riverswim", "deepsea", "spectrum", "bandit")
SOURCES = ("servers", "users")
#: Shares of liars, and how many times the clean regret RiverSwim may then have with noise by the servers.
SHARES = {0.001: 1.1, 0.01: 1.4}
CROWD = "early crowd"
SPREAD = tuple(attack for attack in ATTACKS if attack != CROWD)
#: How many times a batch's users are drawn for it, where that is by lot: on RiverSwim with noise by the servers.
ADMISSION = 2
#: RiverSwim with noise by the servers, and all others.
SEEDS, FEWER_SEEDS = range(100), range(12)
#: Of a batch where users add the noise: among fewer, a report would hold thousands of messages.
CROWD_OF_USERS = 100
RUNS = Path("out/poisoning")


def setting(
    env: str,
    source: str,
    epsilon: float = BUDGET.epsilon,
    attack: str = "",
    share: float = 0.0,
    admission: float | None = None,
) -> Setting:
    """A run in which a share of the users lie, or none."""
    how = {} if admission is None else {"admission": admission}
    return Setting(
        env=env,
        learner="optimistic",
        privatizer="shuffle",
        episodes=EPISODES,
        epsilon=epsilon,
        delta=BUDGET.delta,
        learner_parameters={"first": CROWD_OF_USERS} if attack and source == "users" else {},
        privatizer_parameters={"noise": source},
        liars={"attack": attack, "share": share, **how} if attack else {},
    )


def clean(env: str, source: str) -> Setting:
    """What a run with liars is held against: in it none do."""
    return setting(env, source, attack=SPREAD[0]) if source == "users" else setting(env, source)


def seeds_of(env: str, source: str) -> range:
    """The reported seeds."""
    return SEEDS if (env, source) == ("riverswim", "servers") else FEWER_SEEDS


def attacked(env: str, source: str) -> list[Setting]:
    """All attacks at all shares."""
    return [setting(env, source, attack=attack, share=share) for share in SHARES for attack in ATTACKS]


def by_lot(share: float) -> Setting:
    """An early crowd among users who are drawn by lot."""
    return setting("riverswim", "servers", attack=CROWD, share=share, admission=ADMISSION)


def measure(environments: Iterable[str] = ENVIRONMENTS, sources: Iterable[str] = SOURCES) -> Runs:
    """All runs; those that were made already are not made again."""
    cells = [
        Cell(one, seed)
        for env in environments
        for source in sources
        for one in (clean(env, source), *attacked(env, source))
        for seed in seeds_of(env, source)
    ]
    cells += [Cell(by_lot(share), seed) for share in SHARES for seed in SEEDS]
    for env, epsilons in (("riverswim", (1.0, 5.0)), ("bandit", (0.5, 1.0, 5.0))):
        pairs = [setting(env, source, epsilon) for source in SOURCES for epsilon in epsilons]
        cells += [Cell(one, seed) for one in pairs for seed in SEEDS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        run_cells(list({cell.key: cell for cell in cells}.values()), RUNS, workers=1)
    return Runs(store.results(RUNS))


def worst(runs: Runs, env: str, source: str, share: float, attacks: Iterable[str] = SPREAD) -> tuple[str, FloatArray]:
    """The attack of the largest mean regret, and its regrets[seed]."""
    found = {attack: runs.regrets(setting(env, source, attack=attack, share=share)) for attack in attacks}
    name = max(found, key=lambda attack: float(found[attack].mean()))
    return name, found[name]


def honestly(runs: Runs, env: str, source: str) -> FloatArray:
    """Regrets[seed] where nobody lies, on the seeds of the attacks."""
    return runs.regrets(clean(env, source))[: len(seeds_of(env, source))]


def run() -> list[Figure]:
    """Liars in both modes: one counter's shift, the worst of all attacks, and what the servers' noise costs."""
    runs = measure()
    return [*shifts(), *clean_costs(runs), *attacks(runs)]


def shifts(users: int = 1000) -> list[Figure]:
    """How far one liar moves a counter, and how much noise there is on a bandit's."""
    query = CountQuery.everything(mdp_of("riverswim").problem(EPISODES))
    cap = messages_per_report(query, users, ShuffledPoisson(BUDGET).noise(query).mean)
    arms = CountQuery.everything(mdp_of("bandit").problem(EPISODES))
    deviations = ServersNoise(BUDGET).noise(arms).sd, ShuffledPoisson(BUDGET).noise(arms).sd
    return [
        Figure.at_most(1 / cap, f"shift of a counter by a liar of {users:,}", "", 1, cap, "users' noise"),
        Figure.under(
            4 + 1e-9, "bandit, epsilon 1: noise of both servers", "sd", deviations[0], deviations[1], "users' noise"
        ),
    ]


def clean_costs(runs: Runs) -> list[Figure]:
    """Regret where nobody lies, by who adds the noise."""
    figures = []
    for env, epsilon, times in (
        ("riverswim", 1.0, 1.35),
        ("riverswim", 5.0, 1.35),
        ("bandit", 0.5, 1.0),
        ("bandit", 1.0, 1.0),
        ("bandit", 5.0, 1.0),
    ):
        ours, theirs = (float(runs.regrets(setting(env, source, epsilon)).mean()) for source in SOURCES)
        what = f"{env}, epsilon {epsilon:g}: servers' noise, nobody lies"
        figures.append(Figure.at_most(times, what, "regret", ours, theirs, "users' noise"))
    return figures


def attacks(runs: Runs) -> list[Figure]:
    """The worst attack of each environment, mode and share of liars; what there is no target for is only told."""
    figures = []
    for env in ENVIRONMENTS:
        for source in SOURCES:
            honest = float(honestly(runs, env, source).mean())
            for share, times in SHARES.items():
                found = {names: worst(runs, env, source, share, names) for names in (SPREAD, (CROWD,))}
                told = {name: float(regrets.mean()) for name, regrets in found.values()}
                lots = f"{CROWD}, {ADMISSION} times a batch's users drawn by lot"
                if bounded := (env, source) == ("riverswim", "servers"):
                    told[lots] = float(runs.regrets(by_lot(share)).mean())
                for name, ours in told.items():
                    what = f"{env}, {source}' noise, {share:.1%} liars: {name}"
                    if bounded and name != CROWD:
                        figures.append(Figure.at_most(times, what, "regret", ours, honest, "nobody lies"))
                    else:
                        figures.append(Figure(what, "regret", ours, honest, "nobody lies", "none", True))
    return figures
