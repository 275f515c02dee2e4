"""A cell: one setting and one seed, the unit that a sweep runs, stores and never runs again."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shufflerl.errors import MissingExtraError, PrivacyWarning, ShuffleRLError
from shufflerl.experiments import setting as settings
from shufflerl.experiments.setting import Setting, described
from shufflerl.mdp import UNIT, Units

try:
    from threadpoolctl import threadpool_limits
except ImportError as missing:
    raise MissingExtraError(
        "Sweeps need joblib, pyarrow and threadpoolctl; install them with: pip install 'shufflerl[experiments]'."
    ) from missing

#: What a stored result holds and means; raised whenever that changes, so that old results are never taken for new.
FORMAT = 3

#: A regret curve is kept at this many equal steps of the episodes, or at every episode if there are fewer.
CURVE_STEPS = 200


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Cell:
    """A setting and a seed."""

    setting: Setting
    seed: int

    @cached_property
    def key(self) -> str:
        """A name that only this cell has, on every machine."""
        content = {"format": FORMAT, "setting": asdict(self.setting), "seed": self.seed}
        return hashlib.sha256(canonical(content).encode()).hexdigest()

    def __str__(self) -> str:
        return f"{title(self.setting)}, seed {self.seed}"


def title(setting: Setting) -> str:
    """A setting in one line."""
    where = f"{described(setting.env, setting.env_parameters)}, {setting.episodes:,} episodes"
    how = {key: value for key, value in setting.liars.items() if key != "attack"}
    lying = f", liars ({described(setting.liars['attack'], how)})" if setting.liars else ""
    return f"{contender(setting)} on {where}{lying}"


def contender(setting: Setting) -> str:
    """What a setting brings to an environment: learner and privacy."""
    budget = {} if setting.epsilon is None else {"epsilon": setting.epsilon, "delta": setting.delta}
    privacy = described(setting.privatizer, budget | setting.privatizer_parameters)
    return f"{described(setting.learner, setting.learner_parameters)} with {privacy}"


def flat(setting: Setting) -> dict[str, Any]:
    """Everything a setting says by one name each, such as `epsilon` or `learner.batches`."""
    plain = asdict(setting)
    kinds = ("env", "learner", "privatizer")
    parameters = {f"{kind}.{key}": value for kind in kinds for key, value in plain.pop(f"{kind}_parameters").items()}
    return plain | parameters


def labels(settings: Sequence[Setting], without: Collection[str] = ()) -> list[str]:
    """What tells settings apart, in few words each; what all share is left out, and so is what `without` names."""
    rows = [flat(setting) for setting in settings]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in (*without, "delta")]
    differ = [name for name in names if len({canonical(row.get(name)) for row in rows}) > 1]
    return [", ".join(filter(None, (_word(name, row.get(name)) for name in differ))) or row["learner"] for row in rows]


def _word(name: str, value: Any) -> str:
    if name in ("env", "learner", "privatizer"):
        return "no privacy" if (name, value) == ("privatizer", "none") else str(value).rpartition(":")[2]
    if value is None:
        return ""
    if name == "episodes":
        return f"K = {value:,}"
    return f"ε = {value:g}" if name == "epsilon" else f"{name.rpartition('.')[2]} = {value}"


@dataclass(frozen=True)
class Result:
    """What a cell gave. Two runs of a cell are equal, but for the seconds they took.

    `regret`, `optimal_value` and `curve` are None where the environment's truth is unknown, `reward` (per episode)
    where it was not counted; all are as inside, with rewards of 0 to 1, and `units` are the environment's own.
    In so many `batches`, `distinct` mixtures of `policies` deterministic policies were deployed. `curve[i]` is the
    cumulative regret after `curve_episodes(...)[i]` episodes.
    """

    cell: Cell
    regret: float | None
    switches: int
    optimal_value: float | None
    reward: float | None
    curve: tuple[float, ...] | None
    certificate: dict[str, Any] | None
    seconds: float = field(compare=False)
    units: Units = UNIT
    batches: int = 0
    distinct: int = 0
    policies: int = 0
    horizon: int = 0
    states: int = 0
    actions: int = 0

    @property
    def own_regret(self) -> float | None:
        """Regret in the environment's own units."""
        return None if self.regret is None else self.units.difference(self.regret)

    @property
    def own_optimal_value(self) -> float | None:
        """The optimal value in the environment's own units."""
        return None if self.optimal_value is None else self.units.value(self.optimal_value)

    @property
    def own_reward(self) -> float | None:
        """Reward per episode in the environment's own units."""
        return None if self.reward is None else self.units.value(self.reward)


def curve_episodes(episodes: int) -> tuple[int, ...]:
    """The numbers of episodes at which a regret curve is kept, from 0 to all."""
    return tuple(sorted({episodes * step // CURVE_STEPS for step in range(CURVE_STEPS + 1)}))


def run_cell(cell: Cell) -> Result:
    """Run a cell; nothing but the cell decides what comes out."""
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", PrivacyWarning)  # said once, when the sweep was checked
        try:
            run = settings.run(cell.setting, cell.seed)
        except ShuffleRLError as error:
            raise type(error)(f"{cell}: {error}") from None
    history, known = run.history, run.optimal_value is not None
    reward = float(history.reward.sum()) / cell.setting.episodes
    curve = np.interp(np.array(curve_episodes(cell.setting.episodes), np.float64), *history.curve) if known else None
    horizon, states, actions = run.shape
    return Result(
        cell=cell,
        regret=history.total_regret if known else None,
        switches=history.switches,
        optimal_value=run.optimal_value,
        reward=None if math.isnan(reward) else reward,
        curve=None if curve is None else tuple(curve.tolist()),
        # As JSON would return it, so that a result read back equals the one that was stored.
        certificate=None if run.certificate is None else json.loads(canonical(run.certificate.as_dict())),
        seconds=run.seconds,
        units=run.units,
        batches=len(history),
        distinct=history.distinct,
        policies=history.policies,
        horizon=horizon,
        states=states,
        actions=actions,
    )
