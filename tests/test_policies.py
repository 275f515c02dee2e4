"""Families of policies and queries of returns: what they are, what they cost, and what is refused of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shufflerl import policies
from shufflerl.counts import Batch, CountQuery, Counts, Query, parse_query
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Mixture, Problem
from shufflerl.policies import Network, Scores, Table
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import ShuffledBinomial, ShuffledPoisson
from shufflerl.privacy.protocol import Protocol, randomize
from shufflerl.returns import ReturnProblem, ReturnQuery, Returns

NETWORKS = [Network(4, 2), Network(4, 2, (16,)), Network(3, 2, (5, 4), "box"), Network(6, 3, (2,), "score")]
TAGS = ReturnQuery(3, (-1.0, 0.0, 4.0))


@pytest.mark.parametrize("family", [Table(2, 3), Scores(3, 4), *NETWORKS])
def test_a_family_and_its_policies_survive_bytes_and_json(family: policies.Family) -> None:
    rng = np.random.default_rng(0)
    numbers = (
        rng.integers(4, size=(5, *family.shape)) if isinstance(family, Table) else rng.normal(size=(5, *family.shape))
    )
    checked = family.checked(numbers)
    told = policies.parse(json.loads(json.dumps(policies.describe(family))))
    assert told == family
    np.testing.assert_array_equal(policies.unpack(told, policies.pack(family, checked)), checked)
    assert Mixture(checked, np.full(5, 0.2), family) == Mixture(checked, np.full(5, 0.2), told)


@pytest.mark.parametrize("family", NETWORKS)
def test_many_policies_on_many_observations_act_as_each_alone(family: Network) -> None:
    rng = np.random.default_rng(1)
    parameters, seen = rng.normal(size=(7, family.size)), rng.normal(size=(7, family.inputs))
    together = family.act(parameters, seen)
    for one, observation, action in zip(parameters, seen, together, strict=True):
        np.testing.assert_allclose(family.act(one, observation), action, rtol=1e-12)
        before, after = family.layers[:2]
        first = one[: before * after].reshape(before, after), one[before * after : (before + 1) * after]
        if family.head == "choice" and not family.hidden:
            outputs = [0.0, *(observation @ first[0] + first[1])]
            assert action == int(np.argmax(outputs))


BAD: list[tuple[Any, str]] = [
    ({}, "family is None; expected one of"),
    ({"family": "forest"}, "'forest'; expected one of: table, scores, linear, mlp"),
    ({"family": "linear", "inputs": 4}, "is described by"),
    ({"family": "mlp", "inputs": 4, "actions": 2, "hidden": [], "head": "choice"}, "expected sizes of layers"),
    ({"family": "mlp", "inputs": 4, "actions": 2, "hidden": [10**6], "head": "choice"}, "at most 100000"),
    (
        {"family": "mlp", "inputs": 4000, "actions": 2, "hidden": [900], "head": "choice"},
        "parameters; expected at most",
    ),
    ({"family": "mlp", "inputs": 4, "actions": 2, "hidden": [2] * 5, "head": "choice"}, "at most 4"),
    ({"family": "linear", "inputs": 4, "actions": 2, "hidden": [], "head": "python"}, "head is 'python'"),
    ({"family": "linear", "inputs": 4, "actions": 3, "hidden": [], "head": "score"}, "as many for each of 3"),
    ({"family": "linear", "inputs": "4", "actions": 2, "hidden": [], "head": "choice"}, "inputs is '4'"),
    ({"family": "table", "horizon": 0, "states": 3}, "horizon is 0"),
    ({"family": [1]}, r"The policy family is \[1\]; expected one of"),
]


@pytest.mark.parametrize(("described", "complaint"), BAD)
def test_what_is_no_family_is_refused(described: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        policies.parse(described)


def test_what_is_no_policy_of_its_family_is_refused() -> None:
    linear = Network(4, 2)
    for bad, complaint in (
        (np.full((1, 5), np.nan), "expected finite"),
        (np.full((1, 5), 1e300), "32-bit numbers.*expected finite"),
        (np.zeros((1, 6)), "shape"),
        (np.zeros((900_000, 5)), "too many"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            linear.checked(bad)
    for packed in (b"", bytes(19), np.full(5, np.inf, dtype="<f4").tobytes()):
        with pytest.raises(InvalidInputError):
            policies.unpack(linear, packed)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
def test_rounding_to_points_keeps_the_mean_within_their_range(values: list[float]) -> None:
    below, above = TAGS.position(values)
    points = np.array(TAGS.points)
    mean = points[below] * (1 - above) + points[below + 1] * above
    np.testing.assert_allclose(mean, np.clip(values, -1, 4), atol=1e-12)


def test_a_replaced_user_changes_two_counters_at_most() -> None:
    """By enumeration: every answer a user may give, against every other."""
    answers = [Returns([g], [i]) for g in range(TAGS.policies) for i in range(len(TAGS.points))]
    counts = np.array([np.bincount(TAGS.tags(one)[0], minlength=TAGS.size) for one in answers])
    changes = np.abs(counts[:, None] - counts[None])
    assert changes.max() == 1
    assert changes.sum(axis=-1).max() == TAGS.changed_counters
    assert (counts.sum(axis=-1) == TAGS.touched_counters).all()


@pytest.mark.parametrize("query", [TAGS, CountQuery(Problem(2, 2, 2, 1), [], [0])])
def test_what_noise_goes_by_is_the_same_for_every_query(query: Query) -> None:
    assert parse_query(json.loads(json.dumps(query.described())), Problem(2, 2, 2, 1)) == query
    assert len(query.groups) == query.size
    for touched in range(1, query.widest.touched_counters + 1):
        assert query.touching(touched).touched_counters == touched
    noise = ShuffledPoisson(Budget(1.0, 1e-6)).noise(query)
    assert noise == ShuffledPoisson(Budget(1.0, 1e-6)).noise(ReturnQuery(50, (0.0, 1.0)))
    assert ShuffledBinomial(Budget(1.0, 1e-6)).noise(query, 100).variance > noise.variance


def test_returns_are_counted_and_randomized_like_trajectories() -> None:
    rng = np.random.default_rng(3)
    linear = Network(4, 2)
    batch = Batch(0, 500, Mixture(rng.normal(size=(3, 5)), [0.5, 0.25, 0.25], linear), TAGS)
    played = rng.choice(3, size=500, p=batch.mixture.weights)
    counts = Counts.of(batch, Returns.drawn(TAGS, played, rng.normal(size=500), rng)).checked()
    assert counts.values.reshape(3, 3).sum(axis=1).tolist() == np.bincount(played).tolist()
    noise = ShuffledPoisson(Budget(1.0, 1e-6)).noise(TAGS)
    tags = randomize(Protocol(TAGS, 500, noise), Returns([2], [1]))
    assert 7 in tags
    assert (np.diff(tags) >= 0).all()


def test_returns_and_mixtures_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="expected 3, as many as are compared"):
        Batch(0, 5, Mixture(np.zeros((2, 5)), [0.5, 0.5], Network(4, 2)), TAGS)
    with pytest.raises(InvalidInputError, match=r"expected tables of actions"):
        Batch(0, 5, Mixture(np.zeros((1, 5)), [1.0], Network(4, 2)), CountQuery.everything(Problem(2, 2, 2, 1)))
    with pytest.raises(InvalidInputError, match="expected policies below 3"):
        TAGS.tags(Returns([3], [0]))
    with pytest.raises(InvalidInputError, match="not a finite number"):
        TAGS.position([np.nan])
    with pytest.raises(InvalidInputError, match="whole number for each user"):
        Returns([0, 1], [0])
    for points in ((0.0,), (1.0, 1.0), (1.0, 0.0)):
        with pytest.raises(InvalidInputError, match="that increase"):
            ReturnQuery(2, points)
    for low, high in ((1.0, 1.0), (None, 1.0), (2.0, 1.0), (0.0, np.inf), (0.0, 1e200), (1e17, 1e17 + 64)):
        with pytest.raises(InvalidInputError):
            ReturnProblem(4, 2, 10, 100, low, high)
