"""What a figure is made of: the runs it asks for, what it finds in them, and what it says about the paper's claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shufflerl import envs
from shufflerl.arrays import FloatArray
from shufflerl.experiments.cells import Cell, Result, canonical, curve_episodes
from shufflerl.experiments.claims import Claim, spread
from shufflerl.experiments.figures.lines import DELTA, PE, SDP_PE, Line
from shufflerl.experiments.setting import Setting
from shufflerl.mdp import MDP
from shufflerl.planning import policy_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from shufflerl.experiments.figures.scaling import Point
    from shufflerl.experiments.measuring import Timing

#: What "comes close" is taken to mean: at most so many times the regret; and so many of that without privacy.
CLOSE = 1.25
NEAR_NO_PRIVACY = 2.0

#: The first of the seeds on which constants are chosen; no reported run has one so large.
FIRST_TUNING_SEED = 10_000


@dataclass(frozen=True)
class Size:
    """How large a reproduction is; `name` picks the values of every figure's sweep."""

    name: Literal["full", "quick"]
    episodes: int  # where the paper has 20,000
    seeds: int  # of reported runs
    tuning_seeds: int
    candidates: int  # constants tried for every line that has any to choose

    @property
    def reported(self) -> range:
        """The seeds of reported runs."""
        return range(self.seeds)

    @property
    def tuning(self) -> range:
        """The seeds on which constants are chosen."""
        return range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self.tuning_seeds)


FULL = Size("full", episodes=20_000, seeds=20, tuning_seeds=5, candidates=6)
QUICK = Size("quick", episodes=10_000, seeds=3, tuning_seeds=1, candidates=2)


@dataclass(frozen=True)
class Family:
    """Runs that share their constants: a line on an environment at a budget. They are chosen at `episodes`."""

    line: Line
    env: str
    epsilon: float | None
    episodes: int

    def setting(self, constants: dict[str, Any], episodes: int | None = None) -> Setting:
        """A setting of the family with these constants."""
        episodes = self.episodes if episodes is None else episodes
        return Setting(
            env=self.env,
            learner=self.line.learner,
            privatizer=self.line.privatizer,
            episodes=episodes,
            epsilon=self.epsilon,
            delta=None if self.epsilon is None else DELTA,
            learner_parameters=self.line.parameters(constants, episodes),
        )


def family(line: Line, env: str, epsilon: float, episodes: int) -> Family:
    """The family of a line at a budget, which a line without privacy has none of."""
    return Family(line, env, epsilon if line.private else None, episodes)


#: The constants of every family.
Chosen = Mapping[Family, dict[str, Any]]


class Runs:
    """Results by setting, seed after seed."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._results: dict[str, list[Result]] = {}
        for result in results:
            self._results.setdefault(_key(result.cell.setting), []).append(result)
        for own in self._results.values():
            own.sort(key=lambda result: result.cell.seed)

    def of(self, setting: Setting) -> list[Result]:
        """The runs of a setting."""
        return self._results[_key(setting)]

    def regrets(self, setting: Setting) -> FloatArray:
        """Final regret[seed]."""
        return np.array([result.regret for result in self.of(setting)], dtype=np.float64)

    def switches(self, setting: Setting) -> FloatArray:
        """Policy switches[seed]."""
        return np.array([result.switches for result in self.of(setting)], dtype=np.float64)

    def mean(self, setting: Setting, what: str) -> float:
        """The mean over seeds of a figure that is known of every run, such as `batches`."""
        return float(np.mean([getattr(result, what) for result in self.of(setting)]))

    def curves(self, setting: Setting) -> tuple[FloatArray, FloatArray]:
        """Episodes[point], and cumulative regret[seed, point]."""
        curves = np.array([result.curve for result in self.of(setting)], dtype=np.float64)
        return np.array(curve_episodes(setting.episodes), dtype=np.float64), curves


def _key(setting: Setting) -> str:
    return canonical(asdict(setting))


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that an analysis may look at."""

    size: Size
    runs: Runs
    chosen: Chosen
    timings: tuple[Timing, ...] = ()

    def setting(self, own: Family, episodes: int | None = None) -> Setting:
        """What a family is reported with."""
        return own.setting(self.chosen[own], episodes)

    def regrets(self, own: Family, episodes: int | None = None) -> FloatArray:
        """Final regret[seed] of a family."""
        return self.runs.regrets(self.setting(own, episodes))


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """What a figure shows: a drawing, a sentence on what to see, the claims it judges, a table and a certificate."""

    drawing: Drawing
    see: str
    claims: tuple[Claim, ...] = ()
    table: Table | None = None
    certificate: str = ""


@dataclass(frozen=True)
class Panel:
    """A figure of the paper's own, small: how it is drawn, and one sentence each of what the paper says and of ours."""

    title: str
    paper: str
    draw: Callable[[Axes, Evidence], None]
    found: Callable[[Evidence], str]


@dataclass(frozen=True)
class Figure:
    """One figure or table: `families` are tuned, `cells` are run with what was chosen, `analyse` sees the runs.

    `points` are measured on this machine, after everything else and one at a time. `panels` are its part of the
    picture that the report begins with, which is of runs alone.
    """

    name: str
    title: str
    analyse: Callable[[Evidence], Analysis]
    families: Callable[[Size], list[Family]] = lambda _: []
    cells: Callable[[Size, Chosen], list[Cell]] = lambda _, __: []
    points: Callable[[Size], list[Point]] = lambda _: []
    panels: tuple[Panel, ...] = ()


def on(size: Size, settings: Iterable[Setting]) -> list[Cell]:
    """The settings on all reported seeds."""
    return [Cell(setting, seed) for setting in settings for seed in size.reported]


def chosen_settings(families: list[Family], chosen: Chosen) -> list[Setting]:
    """Each family with the constants chosen for it."""
    return [own.setting(chosen[own]) for own in families]


def with_theory(families: Iterable[Family], size: Size) -> list[Family]:
    """Those that are run with the constants of a theory too: of a small reproduction only the paper's own."""
    return [own for own in families if size.name == "full" or own.line in (SDP_PE, PE)]


def theory_settings(families: list[Family]) -> list[Setting]:
    """Each family that has constants of a theory, with these."""
    return [own.setting(own.line.theory) for own in families if own.line.theory is not None]


def lost_at_random(env: str) -> float:
    """Expected regret per episode of acting uniformly at random; the environment must not depend on the seed."""
    mdp = mdp_of(env)
    return mdp.optimal_value - value_at_random(mdp)


def mdp_of(env: str) -> MDP:
    """The environment itself; it must not depend on the seed."""
    mdp = envs.make(env)
    assert isinstance(mdp, MDP)
    return mdp


def value_at_random(mdp: MDP) -> float:
    """The value of acting uniformly at random: that of the one policy of the averaged environment."""
    averaged = mdp.transitions.mean(axis=2, keepdims=True), mdp.rewards.mean(axis=2, keepdims=True)
    return float(policy_values(*averaged, mdp.start, np.zeros((1, mdp.horizon, mdp.n_states), dtype=np.int32))[0])


def constants_table(evidence: Evidence, families: list[Family], with_theory: list[Family]) -> Table:
    """The chosen constants and the theory's, and the regret with each; the theory's was run `with_theory` only."""
    rows = []
    for own in families:
        theory = [spread(evidence.runs.regrets(setting)) for setting in theory_settings([own]) if own in with_theory]
        budget = "none" if own.epsilon is None else f"{own.epsilon:g}"
        chosen = _text(evidence.chosen[own]) or "its defaults", spread(evidence.regrets(own))
        rows.append((own.line.name, budget, *chosen, _text(own.line.theory or {}), *(theory or [""])))
    return Table(("line", "ε", "chosen constants", "regret", "the theory's constants", "regret"), tuple(rows))


def _text(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
