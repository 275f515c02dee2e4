"""One random step of every episode, where actions do not steer the state: what is public of such a problem.

Every user plays a whole episode under one policy, the same at every step, and is counted once: for the state, the
action and the reward bit of one step, which it draws at random. A replaced user then changes two counters, however long
episodes are. What is asked is an ordinary `CountQuery` of a problem of one step, whose rewards are the means over all
steps. That is all there is to learn only if actions change no later state: where they do, a step's reward says nothing
of what an action leads to, and a table of all steps or whole returns must be counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shufflerl import checks
from shufflerl.arrays import FloatArray
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, Problem, Units, digest
from shufflerl.policies import Scores


@dataclass(frozen=True, eq=False)
class StepProblem(Problem):
    """A problem of one step: any of an episode's `steps`, drawn at random.

    A user may see one state for all actions or one for each, of `n_states`; policies are `Scores` of them. `scale[a]`
    is public knowledge of how much actions earn beside each other, such as the rates of channels; 1 unless given.

    >>> StepProblem(steps=20, n_states=6, n_actions=8, episodes=1000).horizon
    1
    """

    steps: int
    scale: FloatArray

    def __init__(
        self, steps: int, n_states: int, n_actions: int, episodes: int, scale: ArrayLike | None = None
    ) -> None:
        Scores(n_states, n_actions)  # which refuses too many of them
        super().__init__(1, n_states, n_actions, episodes)
        object.__setattr__(self, "steps", checks.whole("steps", steps, least=1))
        scales = checks.array("scale", np.ones(n_actions) if scale is None else scale, (n_actions,))
        if not ((scales > 0) & (scales <= 1)).all():
            raise InvalidInputError(f"scale is {scales.tolist()}; expected numbers above 0 and at most 1.")
        object.__setattr__(self, "scale", checks.frozen(scales))

    @classmethod
    def of(cls, problem: Problem) -> StepProblem:
        """One random step of a problem of states and actions, or the problem itself if it is of one already."""
        if isinstance(problem, StepProblem):
            return problem
        return cls(problem.horizon, problem.n_states, problem.n_actions, problem.episodes)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The problem in a form that JSON can hold; equal for equal problems."""
        return super().fingerprint | {"steps": self.steps, "scale": digest(self.scale)}


def step_law(mdp: MDP) -> FloatArray:
    """law[h, x]: how likely users are in each state at each step, whatever they do; refused if actions steer that."""
    law = np.empty((mdp.horizon, mdp.n_states))
    law[0] = mdp.start
    for h, moves in enumerate(mdp.transitions):
        reached = law[h] > 0
        apart = np.ptp(moves[reached], axis=1).max(axis=1)  # [x]: over actions, the most of any next state
        if (apart > checks.SUM_TOLERANCE).any():
            state = int(np.flatnonzero(reached)[apart.argmax()])
            raise InvalidInputError(
                f"Where users go from state {state} at step {h} depends on their action; one random step is enough "
                "only where actions do not steer the state. Use a learner of tables, or policy-search."
            )
        law[h + 1] = law[h] @ moves[:, 0]
    return law


def one_step(mdp: MDP) -> MDP:
    """A random step of an MDP as an MDP of its own, for learners of tables too; refused if actions steer.

    Whoever plays it sees what users see of one step, drawn at random; `units` are those of whole episodes.

    >>> coin = MDP([[[[0.5, 0.5]] * 2] * 2], [[[0.2, 0.7]] * 2, [[0.4, 0.7]] * 2], start=[1.0, 0.0])
    >>> alone = one_step(coin)
    >>> alone.horizon, alone.start.tolist(), alone.rewards[0, 0].round(3).tolist()
    (1, [0.75, 0.25], [0.267, 0.7])
    """
    law = step_law(mdp)
    often = law.sum(axis=0)[:, None]
    paid = np.einsum("hx,hxa->xa", law, mdp.rewards)
    rewards = np.divide(paid, often, out=np.zeros_like(paid), where=often > 0).clip(0.0, 1.0)
    states, actions = paid.shape
    alone = MDP(np.empty((0, states, actions, states)), rewards[None], law.mean(axis=0))
    return alone.measured_in(Units(mdp.units.low * mdp.horizon, mdp.units.high * mdp.horizon))
