"""The learning loop: the whole system in one function. Read this first."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from shufflerl import checks
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.errors import InvalidInputError
from shufflerl.history import History, Recorder
from shufflerl.learners.base import Learner
from shufflerl.mdp import MDP, Problem
from shufflerl.population import Population
from shufflerl.privatizers.base import Privatizer
from shufflerl.registry import Entry
from shufflerl.steps import StepProblem

#: Called with (episodes played, episodes in all) as learning goes on.
Progress = Callable[[int, int], None]


class CompiledLoop(Protocol):
    """Many batches of one user each, played in compiled code; bit for bit what the loop would do."""

    def play(self, most: int | None) -> tuple[PolicyArray, FloatArray]:
        """Play at most `most` episodes: the policies[t, h, x] that were deployed and their true values."""


@runtime_checkable
class HasCompiledLoop(Protocol):
    """A learner that names the compiled loop of its batches, as it would spend its time between them."""

    compiled_loop: ClassVar[Entry]


def compiled_loop_of(learner: Learner, population: Population, privatizer: Privatizer) -> CompiledLoop | None:
    """What plays the learner's next batches in compiled code, if these three allow it."""
    if not isinstance(learner, HasCompiledLoop):
        return None
    compiled: CompiledLoop | None = learner.compiled_loop.load()(learner, population, privatizer)
    return compiled


def learn(
    learner: Learner,
    population: Population,
    privatizer: Privatizer,
    *,
    progress: Progress | None = None,
    batches: int | None = None,
) -> History:
    """Let the learner learn from the population through the privatizer, for at most `batches` batches if given.

    Calling it again goes on where it stopped: two halves equal one whole.
    """
    if batches is not None:
        checks.whole("batches", batches, least=0)
    if population.mdp is not None and isinstance(learner.problem, Problem):
        _check_fits(learner.problem, population.mdp)
    if noise := privatizer.expected_noise(learner.widest_query):
        learner.expect(noise)
    recorder = Recorder(population.mdp, learner.deployed)
    while learner.episodes_left and (batches is None or recorder.batches < batches):
        if compiled := compiled_loop_of(learner, population, privatizer):
            # The four steps below, many times, compiled.
            recorder.record_episodes(*compiled.play(None if batches is None else batches - recorder.batches))
        elif batch := learner.next_batch():
            counts = population.play(batch)
            release = privatizer.release(counts)
            learner.observe(release)
            recorder.record(counts)
        if progress:
            progress(learner.episodes_played, learner.problem.episodes)
    return recorder.finish()


def _check_fits(problem: Problem, mdp: MDP) -> None:
    """Refuse a population that does not live in the problem that the learner was made for."""
    steps = problem.steps if isinstance(problem, StepProblem) else problem.horizon
    learners, populations = (steps, problem.n_states, problem.n_actions), mdp.rewards.shape
    if learners != populations:
        raise InvalidInputError(
            f"The learner was made for (steps, states, actions) = {learners} but the population lives in "
            f"{populations}; make the learner for the problem of the population's MDP."
        )
    if isinstance(problem, StepProblem) or problem.layout.is_complete or problem.layout.same(mdp.layout):
        return
    possible = mdp.layout.positions[mdp.probabilities > 0]
    ruled_out = possible[~problem.layout.find(possible)[1]]
    if len(ruled_out):
        where = [int(i) for i in np.unravel_index(ruled_out[0], (*mdp.layout.shape, mdp.n_states))]
        raise InvalidInputError(
            f"The population can make the transition [h, x, a, x'] = {where}, which the support that the learner "
            "was told rules out; make the learner for the problem of the population's MDP."
        )
