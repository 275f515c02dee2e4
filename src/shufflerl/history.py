"""What a run did and what it cost, as the experimenter sees it. Learners never do."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from shufflerl import html
from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.counts import Counts
from shufflerl.mdp import MDP, Mixture
from shufflerl.planning import mixture_value


@dataclass(frozen=True)
class Record:
    """One batch: its users, the mixture they played, what they earned and lost by it, all users together."""

    users: int
    mixture: Mixture
    reward: float
    regret: float


@dataclass(frozen=True, eq=False)
class History:
    """A run, batch by batch.

    Where the truth is known, `reward` and `regret` are exact expectations; elsewhere `reward` is what the users got
    (nan if the population does not say) and `regret` is nan. `deployed[b]` says which of `deployments` batch b
    played. Those stand in order of deployment, each once for all batches in a row that played it; a bare policy[h, x]
    stands for the mixture of it alone. `switches` is how many times the deployed mixture changed, from what was
    deployed before the first batch on: the switches of two halves add up to those of the whole.
    """

    users: IntArray
    reward: FloatArray
    regret: FloatArray
    deployed: IntArray
    deployments: tuple[Mixture | PolicyArray, ...]
    switches: int

    def __repr__(self) -> str:
        return f"History({len(self)} batches, {self.users.sum()} users, regret {self.total_regret:.6g})"

    def _repr_html_(self) -> str:
        rows = {
            "batches": f"{len(self):,}",
            "users": f"{self.users.sum():,}",
            "regret": "unknown" if np.isnan(self.total_regret) else f"{self.total_regret:,.1f}",
            "switches": f"{self.switches:,}",
            "distinct mixtures": f"{self.distinct:,}",
            "distinct policies": f"{self.policies:,}",
        }
        if len(self) == 0 or np.isnan(self.total_regret):
            return html.table("History", rows)
        episodes, regret = self.curve
        grid = np.linspace(0, episodes[-1], 200)
        drawn = html.curve(grid.tolist(), np.interp(grid, episodes, regret).tolist(), "regret as users go by")
        return html.table("History", rows, drawn)

    @property
    def total_regret(self) -> float:
        """Expected reward lost against the optimal policy, over all users."""
        return float(self.regret.sum())

    @property
    def curve(self) -> tuple[IntArray, FloatArray]:
        """Episodes played and cumulative regret after each batch, from (0, 0)."""
        return np.concatenate([[0], np.cumsum(self.users)]), np.concatenate([[0.0], np.cumsum(self.regret)])

    @property
    def distinct(self) -> int:
        """How many different mixtures were deployed; one that comes back is counted once."""
        return len({_identity(deployment) for deployment in self.deployments})

    @property
    def policies(self) -> int:
        """How many different deterministic policies were deployed, by themselves or in mixtures."""
        return len(
            {
                policy.tobytes()
                for deployment in self.deployments
                for policy in (
                    deployment.policies[deployment.weights > 0] if isinstance(deployment, Mixture) else deployment[None]
                )
            }
        )

    def mixture(self, batch: int) -> Mixture:
        """What was deployed in a batch."""
        deployment = self.deployments[self.deployed[batch]]
        return deployment if isinstance(deployment, Mixture) else Mixture.single(deployment)

    def __len__(self) -> int:
        return len(self.users)

    def __iter__(self) -> Iterator[Record]:
        for batch in range(len(self)):
            numbers = float(self.reward[batch]), float(self.regret[batch])
            yield Record(int(self.users[batch]), self.mixture(batch), *numbers)


def _identity(deployment: Mixture | PolicyArray) -> Hashable:
    if isinstance(deployment, Mixture):
        return deployment if len(deployment.policies) > 1 else deployment.policies[0].tobytes()
    return deployment.tobytes()


class Recorder:
    """Builds a History, measuring every deployment against the truth; `deployed` is what was so before."""

    def __init__(self, truth: MDP | None, deployed: Mixture | None = None) -> None:
        self._truth = truth
        self._deployed = deployed
        self._value = np.nan  # of the mixture deployed last
        self._switches = 0
        self._rows: list[tuple[IntArray, FloatArray, FloatArray, IntArray]] = []
        self._deployments: list[Mixture | PolicyArray] = []
        self.batches = 0

    def record(self, counts: Counts) -> None:
        """Add one batch."""
        batch = counts.batch
        if self._deploy(batch.mixture) or not self._deployments:
            self._deployments.append(batch.mixture)
            if self._truth is not None:
                self._value = mixture_value(self._truth, batch.mixture)
        best = np.nan if self._truth is None else self._truth.optimal_value
        reward = counts.earned if self._truth is None else batch.users * self._value
        regret = batch.users * (best - self._value)
        self._append(
            np.array([batch.users]), np.array([reward]), np.array([regret]), np.array([len(self._deployments) - 1])
        )

    def _deploy(self, mixture: Mixture) -> bool:
        """Whether this is another mixture than the one deployed last."""
        changed = self._deployed != mixture
        self._switches += changed and self._deployed is not None
        self._deployed = mixture
        return changed

    def record_episodes(self, policies: PolicyArray, values: FloatArray) -> None:
        """Add batches of one user each, who played policies[t, h, x] of true values[t]."""
        assert self._truth is not None
        changed = np.empty(len(policies), dtype=np.bool_)
        changed[0] = self._deploy(Mixture.single(policies[0])) or not self._deployments
        changed[1:] = (policies[1:] != policies[:-1]).any(axis=(1, 2))
        self._switches += int(changed[1:].sum())
        self._deployed, self._value = Mixture.single(policies[-1]), float(values[-1])
        deployed = np.cumsum(changed) + len(self._deployments) - 1
        self._deployments += list(policies[changed])
        self._append(np.ones(len(policies), dtype=np.int64), values, self._truth.optimal_value - values, deployed)

    def _append(self, users: IntArray, reward: FloatArray, regret: FloatArray, deployed: IntArray) -> None:
        self._rows.append((users, reward, regret, deployed))
        self.batches += len(users)

    def finish(self) -> History:
        """The history so far."""
        nothing = (np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.int64))
        users, reward, regret, deployed = (np.concatenate(c) for c in zip(nothing, *self._rows, strict=True))
        return History(
            users=users,
            reward=reward,
            regret=regret,
            deployed=deployed,
            deployments=tuple(self._deployments),
            switches=self._switches,
        )
