from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shufflerl import envs, learners, privatizers
from shufflerl.errors import InvalidInputError
from shufflerl.experiments import setting as settings
from shufflerl.experiments.setting import Setting, run
from shufflerl.loop import learn
from shufflerl.population import CountPopulation, TrajectoryPopulation
from shufflerl.seeding import ROLES, Seed, stream
from tests.support.examples import random_mdp

MDP_ = random_mdp(0)


def test_one_integer_gives_every_role_a_stream_of_its_own() -> None:
    draws = {role: tuple(stream(0, role).random(4)) for role in ROLES}
    assert len(set(draws.values())) == len(ROLES)
    for role in ROLES:
        assert tuple(stream(0, role).random(4)) == draws[role]
        assert tuple(stream(1, role).random(4)) != draws[role]


def test_the_streams_of_an_integer_are_what_its_seed_sequence_spawns() -> None:
    for role, child in zip(ROLES, np.random.SeedSequence(7).spawn(4), strict=True):
        assert stream(7, role).random() == np.random.default_rng(child).random()


def test_one_seed_sequence_for_all_roles_gives_different_streams() -> None:
    shared = np.random.SeedSequence(7)
    assert len({stream(shared, role).random() for role in ROLES} | {stream(shared, "noise", 3).random()}) == 5


@pytest.mark.parametrize("wrong", [None, -1, 1.5, "0", True])
def test_what_is_no_seed_is_refused_where_results_must_be_reproducible(wrong: Any) -> None:
    learner = learners.make("ucbvi", MDP_.problem(10), 0)
    message = "needs the learner it serves and a seed" if wrong is None else f"seed is {wrong!r}; expected"
    with pytest.raises(InvalidInputError, match=message):
        privatizers.make("local", learner, epsilon=1.0, delta=1e-6, seed=wrong)
    for make in (
        lambda seed: learners.make("ucbvi", MDP_.problem(10), seed),
        lambda seed: CountPopulation(MDP_, seed),
        lambda seed: TrajectoryPopulation(MDP_, seed),
    ):
        with pytest.raises(InvalidInputError, match=f"seed is {wrong!r}; expected .* or a numpy.random.SeedSequence"):
            make(wrong)


def test_an_experiment_gives_environment_users_noise_and_learner_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, np.random.Generator] = {}
    make = envs.ENVIRONMENTS.make

    def watched_make(name: str, rng: np.random.Generator, **parameters: Any) -> Any:
        seen["environment"] = rng
        return make(name, rng, **parameters)

    def watched_learn(learner: Any, population: Any, privatizer: Any, **options: Any) -> Any:
        seen.update(learner=learner.rng, users=population.rng, noise=privatizer.rng)
        return learn(learner, population, privatizer, **options)

    monkeypatch.setattr(envs.ENVIRONMENTS, "make", watched_make)
    monkeypatch.setattr(settings, "learn", watched_learn)

    def origins(seed: Seed) -> set[tuple[Any, ...]]:
        assert isinstance(seed, int)
        run(Setting("random", "ucbvi", "local", 5, epsilon=1.0, delta=1e-6), seed)
        sequences: list[Any] = [rng.bit_generator.seed_seq for rng in seen.values()]
        return {(sequence.entropy, sequence.spawn_key) for sequence in sequences}

    first, second = origins(3), origins(4)
    assert len(first) == len(second) == 4
    assert not first & second
