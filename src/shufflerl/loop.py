"""The learning loop: the whole system in one function. Read this first."""

from __future__ import annotations

from collections.abc import Callable

from shufflerl.episodes import EpisodeStretch
from shufflerl.history import History, Recorder
from shufflerl.learners.base import Learner
from shufflerl.population import Population
from shufflerl.privatizers.base import Privatizer

#: Called with (episodes played, episodes in all) as learning goes on.
Progress = Callable[[int, int], None]


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
    recorder = Recorder(population.mdp)
    stretch = EpisodeStretch.if_possible(learner, population, privatizer)
    while learner.episodes_left and (batches is None or recorder.batches < batches):
        if stretch:  # the four steps below, compiled, for a learner that plans anew after every episode
            recorder.record_episodes(*stretch.play(None if batches is None else batches - recorder.batches))
        elif batch := learner.next_batch():
            counts = population.play(batch)
            release = privatizer.release(counts)
            learner.observe(release)
            recorder.record(counts)
        if progress:
            progress(learner.episodes_played, learner.problem.episodes)
    return recorder.finish()
