"""What every learner must do, whatever it learns: subclass, define `make`, and pytest runs the suite.

from shufflerl.testing import LearnerContract

class TestMine(LearnerContract):
    def make(self, problem, seed=0):
        return MyLearner(problem, seed)
"""

from __future__ import annotations

import ast
import inspect
import io
import json
from dataclasses import asdict

import numpy as np

from shufflerl import envs, state
from shufflerl.counts import Batch, Release
from shufflerl.errors import ContractError, InvalidInputError, MissingExtraError, StateMismatchError
from shufflerl.history import History
from shufflerl.learners.base import Learner
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Problem
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.privatizers.base import Privatizer
from shufflerl.privatizers.none import NoPrivacy

try:
    import pytest
except ImportError as missing:
    raise MissingExtraError("The contract of learners is tested by pytest; install it with: pip install pytest.") from (
        missing
    )

#: Of the problems that a learner is tried on.
EPISODES = 500


def _random_mdp(seed: int, horizon: int) -> MDP:
    mdp = envs.make("random", seed, n_states=3, n_actions=2, horizon=horizon)
    assert isinstance(mdp, MDP)
    return mdp


def _same(first: History, second: History) -> None:
    np.testing.assert_array_equal(first.users, second.users)
    np.testing.assert_array_equal(first.regret, second.regret)
    assert [first.mixture(b) for b in range(len(first))] == [second.mixture(b) for b in range(len(second))]


def _listed(value: object) -> object:
    """Tuples as lists, as they come back; numbers of NumPy are refused."""
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(one) for one in value]
    assert value is None or type(value) in (bool, int, float, str), f"{value!r} is no plain value"
    return value


def _joined(*parts: History) -> tuple[list[int], list[float]]:
    users = [int(n) for part in parts for n in part.users]
    return users, [float(r) for part in parts for r in part.regret]


class LearnerContract:
    """The suite. `mdp` and `privatizer` may be overridden to suit a learner."""

    mdp: MDP = _random_mdp(21, horizon=3)

    def make(self, problem: Problem, seed: int = 0) -> Learner:
        """The learner to be tested."""
        raise NotImplementedError

    def privatizer(self) -> Privatizer:
        """What answers it."""
        return NoPrivacy()

    def learner(self, seed: int = 0) -> Learner:
        """The learner for the suite's own problem."""
        return self.make(self.mdp.problem(EPISODES), seed)

    def test_all_episodes_are_played_exactly(self) -> None:
        for episodes in (EPISODES, EPISODES + 1, EPISODES + 7):
            learner = self.make(self.mdp.problem(episodes))
            history = learn(learner, CountPopulation(self.mdp, 0), self.privatizer())
            assert history.users.sum() == episodes
            assert len(history) <= learner.max_batches
            assert learner.next_batch() is None

    def test_same_seed_same_result_other_seed_other_result(self) -> None:
        first, again, other = (
            learn(self.learner(seed), CountPopulation(self.mdp, seed), self.privatizer()) for seed in (1, 1, 2)
        )
        _same(first, again)
        assert not np.array_equal(first.regret, other.regret)

    def test_two_halves_equal_one_whole(self) -> None:
        whole = learn(self.learner(), CountPopulation(self.mdp, 0), self.privatizer())
        learner, population, privatizer = self.learner(), CountPopulation(self.mdp, 0), self.privatizer()
        half = len(whole) // 2
        parts = [learn(learner, population, privatizer, batches=half), learn(learner, population, privatizer)]
        assert len(parts[0]) == half
        assert _joined(*parts) == _joined(whole)
        assert sum(part.switches for part in parts) == whole.switches

    @pytest.mark.parametrize("kind", [CountPopulation, TrajectoryPopulation])
    @pytest.mark.parametrize("with_batch_waiting", [False, True])
    def test_save_and_restore_in_the_middle_changes_nothing(
        self, kind: type[CountPopulation] | type[TrajectoryPopulation], with_batch_waiting: bool
    ) -> None:
        """With a fresh privatizer too: what a new process makes."""
        whole = learn(self.learner(), kind(self.mdp, 0), NoPrivacy())
        learner, population = self.learner(), kind(self.mdp, 0)
        first = learn(learner, population, NoPrivacy(), batches=len(whole) // 2)
        waiting = learner.next_batch() if with_batch_waiting else None
        restored = self.learner(seed=99)  # another seed: the saved stream of random numbers must come back too
        restored.restore(learner.save())
        assert restored.rng.bit_generator.state == learner.rng.bit_generator.state
        if with_batch_waiting:
            assert restored.next_batch() == waiting
        second = learn(restored, population, NoPrivacy())
        assert _joined(first, second) == _joined(whole)
        assert first.switches + second.switches == whole.switches

    def test_a_restored_learner_saves_the_same_bytes(self) -> None:
        """At every batch, with it waiting and without: nothing that matters is left out of a saved state."""
        learner, population, privatizer = self.learner(), CountPopulation(self.mdp, 0), self.privatizer()
        for _ in range(12):
            for waiting in (False, True):
                if waiting:
                    batch = learner.next_batch()
                restored = self.learner(seed=7)
                restored.restore(learner.save())
                assert restored.save() == learner.save()
            if batch is None:
                break
            learner.observe(privatizer.release(population.play(batch)))

    def test_decisions_depend_on_releases_alone(self) -> None:
        """Replayed with no population in sight, recorded releases lead to the same batches: no access to truth."""
        learner, population, privatizer = self.learner(), CountPopulation(self.mdp, 0), self.privatizer()
        batches: list[Batch] = []
        releases: list[Release] = []
        while (batch := learner.next_batch()) is not None and len(batches) < 50:
            batches.append(batch)
            releases.append(privatizer.release(population.play(batch)))
            learner.observe(releases[-1])
        replayed = self.learner()
        for batch, release in zip(batches, releases, strict=True):
            assert replayed.next_batch() == batch
            replayed.observe(release)

    def test_the_module_cannot_reach_the_truth(self) -> None:
        tree = ast.parse(inspect.getsource(inspect.getmodule(type(self.learner()))))  # type: ignore[arg-type]
        imported = {
            f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
        }
        rooms = {name.split(".")[1] for name in imported if name.startswith("shufflerl.")}
        assert not rooms & {"population", "envs", "privatizers", "loop", "experiments", "history"}

    def test_what_it_tells_changes_nothing_and_survives_a_restart(self) -> None:
        """The view follows from the saved state, so from releases alone; what is not known is None, not zero."""
        learner, population, privatizer = self.learner(), CountPopulation(self.mdp, 0), self.privatizer()
        assert learner.view().estimate is None
        assert learner.playing is None
        for _ in range(12):
            batch = learner.next_batch()
            if batch is None:
                break
            assert learner.playing == batch.mixture
            learner.observe(privatizer.release(population.play(batch)))
            assert learner.playing == batch.mixture
            saved, view = learner.save(), learner.view()
            assert learner.save() == saved
            restored = self.learner(seed=7)
            restored.restore(saved)
            assert restored.view() == view
            assert restored.records == learner.records
            if view.estimate is not None:
                known = view.estimate
                assert 0 <= known.low <= known.value <= known.high <= self.mdp.horizon
                assert known.description.startswith("of the ")

    def test_what_it_tells_can_be_encoded_at_every_point_of_a_run(self) -> None:
        """As plain Python, which every encoder takes: pages are fed by one that refuses numbers of NumPy."""
        learner, population, privatizer = self.learner(), CountPopulation(self.mdp, 0), self.privatizer()

        def check() -> None:
            told = [asdict(learner.view()), learner.records, learner.parameters, learner.max_batches]
            assert json.loads(json.dumps(told, allow_nan=False)) == _listed(told)

        check()
        while (batch := learner.next_batch()) is not None:
            check()
            learner.observe(privatizer.release(population.play(batch)))
            check()

    def test_asking_twice_gives_the_same_batch(self) -> None:
        learner = self.learner()
        assert learner.next_batch() is learner.next_batch()

    def test_releases_out_of_order_are_refused_and_change_nothing(self) -> None:
        learner, population, privatizer = self.learner(), CountPopulation(self.mdp, 0), self.privatizer()
        batch = learner.next_batch()
        assert batch is not None
        release = privatizer.release(population.play(batch))
        learner.observe(release)
        with pytest.raises(ContractError, match="No batch is waiting"):
            learner.observe(release)
        before = learner.next_batch()
        with pytest.raises(ContractError, match=f"answers batch {batch.index}"):
            learner.observe(release)
        assert learner.next_batch() is before

    def test_restoring_into_another_problem_is_refused(self) -> None:
        saved = self.learner().save()
        for problem in (self.mdp.problem(EPISODES + 1), _random_mdp(0, horizon=4).problem(EPISODES)):
            with pytest.raises(StateMismatchError, match="problem"):
                self.make(problem).restore(saved)

    def test_restoring_rubbish_is_refused(self) -> None:
        array = io.BytesIO()
        np.save(array, np.zeros(3))
        no_header = state.pack([1, 2], {})  # type: ignore[arg-type]
        for rubbish in (b"", b"rubbish", self.learner().save()[:100], array.getvalue(), no_header):
            with pytest.raises(StateMismatchError, match="not a saved state"):
                self.learner().restore(rubbish)

    def test_it_is_made_for_a_problem_with_a_seed(self) -> None:
        with pytest.raises(InvalidInputError, match=r"give mdp\.problem\(episodes=\.\.\.\)"):
            self.make(self.mdp)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="seed is None"):
            self.make(self.mdp.problem(EPISODES), None)  # type: ignore[arg-type]
