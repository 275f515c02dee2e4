"""What a node checks before it takes part: signatures, and by its own figures the privacy it is offered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from fractions import Fraction
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.counts import Batch, CountQuery, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Mixture, Problem
from shufflerl.network.node.reporting import check_signatures, randomize_episode, within_support
from shufflerl.network.protocol import agreement, wire
from shufflerl.network.protocol.agreement import UnacceptableError, by_users, parse_announcement
from shufflerl.network.protocol.wire import OpenBatch, ProblemError, Reason, Signed, Transport
from shufflerl.noise import PoissonNoise
from shufflerl.privacy.accounting import Budget, calibrate
from shufflerl.privacy.loss import privacy_loss
from tests.support.examples import full_batch, random_mdp, random_mixture
from tests.support.network_world import QUERY, World, agreement_of, new_identity, open_batch, protocol_of, terms

NO_DUMMIES: list[wire.Poisson | wire.TruncatedLaplace] = [
    *(wire.Poisson(mean=mean) for mean in (-1.0, 0.0, math.nan, math.inf)),
    *(wire.TruncatedLaplace(scale=scale, shift=34) for scale in (-1.0, 0.0, math.nan, math.inf, 1e30)),
    wire.TruncatedLaplace(scale=5.0, shift=4),
]
NO_NOISE: list[wire.Poisson | wire.Laplace] = [
    wire.Poisson(mean=math.nan),
    *(wire.Laplace(scale=scale) for scale in (-1.0, 0.0, math.nan, math.inf)),
]
NEEDED = calibrate(Budget(1.0, 1e-5), QUERY.changed_counters).mean


@pytest.mark.parametrize("seed", range(4))
def test_an_announcement_says_the_batch_and_nothing_is_lost(seed: int) -> None:
    mdp = random_mdp(seed, horizon=3, states=3, actions=4, sparse=seed % 2 == 0)
    batch = full_batch(mdp, 50, random_mixture(mdp, 3, seed), index=seed)
    if seed == 3:
        batch = dataclasses.replace(batch, query=CountQuery(mdp.problem(50), [1], []))
    noise = by_users(Budget(1.0, 1e-5), 0.9).noise(batch.query)
    said = agreement.announce(batch, noise, task=bytes(16), attempt=2, tag_key=bytes(32))
    agreed = parse_announcement(wire.encode(said))
    assert agreed.batch == batch
    assert protocol_of(agreed).noise == noise
    assert protocol_of(agreed).users == 50
    assert agreed.digest != parse_announcement(wire.encode(msgspec.structs.replace(said, attempt=3))).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": [0.5]},
        {"weights": []},
        {"policies": b"123"},
        {"policies": np.full((1, 2, 2), 7, dtype="<u2").tobytes()},
        {"support": b""},
        {"support": b"\xff\xff"},
        {"transitions": [5]},
        {"transitions": [], "rewards": []},
        *({"noise": wire.NoiseByUsers(mean=mean)} for mean in (-1.0, math.nan, math.inf, 1e12)),
        *({"noise": wire.NoiseByServers(dummies=law, own=wire.Laplace(scale=2.0))} for law in NO_DUMMIES),
        *({"noise": wire.NoiseByServers(dummies=wire.Poisson(mean=9.0), own=law)} for law in NO_NOISE),
        {"states": 2**40},
        {"horizon": 2**20, "states": 2**20},
    ],
    ids=str,
)
def test_nonsense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProblemError) as refused:
        parse_announcement(wire.encode(World().announcement(**changes)))
    assert refused.value.reason == Reason.malformed


@pytest.mark.parametrize(
    ("horizon", "states", "actions"), [(2, 5000, 2), (51, 1000, 1), (1, 1000, 51), (50_001, 10, 10)]
)
def test_tables_too_large_are_refused_before_they_are_made(horizon: int, states: int, actions: int) -> None:
    said = World().announcement(horizon=horizon, states=states, actions=actions)
    with pytest.raises(ProblemError, match="expected at most 50,000,000"):
        parse_announcement(wire.encode(said))


@pytest.mark.parametrize("actions", [256, 65_536, 65_537])
def test_actions_are_two_bytes(actions: int) -> None:
    problem = Problem(1, 1, actions, 5)
    batch = Batch(0, 5, Mixture.single(np.full((1, 1), actions - 1)), CountQuery.everything(problem))
    announced = partial(agreement.announce, batch, PoissonNoise(1.0), task=bytes(16), attempt=0, tag_key=bytes(32))
    if actions > 65_536:
        with pytest.raises(InvalidInputError, match="at most 65,536"):
            announced()
    else:
        assert parse_announcement(wire.encode(announced())).batch == batch


def test_a_node_accepts_what_meets_its_terms() -> None:
    noise = by_users(Budget(1.0, 1e-5), 1.0).noise(QUERY)
    terms().check(agreement_of(World(), noise_mean=noise.mean))
    assert noise.mean == pytest.approx(NEEDED, rel=1e-9)


def test_a_node_refuses_too_little_noise() -> None:
    """It computes that itself; nothing in the announcement claims a budget it could believe."""
    with pytest.raises(UnacceptableError, match="told to accept no more than 1e-05"):
        terms().check(agreement_of(World(), noise_mean=NEEDED * 0.99))
    with pytest.raises(UnacceptableError, match="It does not take part"):
        terms(epsilon=0.5).check(agreement_of(World(), noise_mean=NEEDED * 1.01))


def test_a_node_counts_on_its_own_honest_fraction_only() -> None:
    agreed = agreement_of(World(), noise_mean=NEEDED * 1.01)
    terms().check(agreed)
    with pytest.raises(UnacceptableError, match=r"honest 0\.9 suffice"):
        terms(honest_fraction=0.9).check(agreed)
    enough = by_users(Budget(1.0, 1e-5), 0.9).noise(QUERY)
    terms(honest_fraction=0.9).check(agreement_of(World(), noise_mean=enough.mean))


@pytest.mark.parametrize("fraction", [1.0, 0.9, 0.77, 1 / 3, 0.1])
def test_what_the_coordinator_announces_is_accepted_to_the_last_digit(fraction: float) -> None:
    for epsilon in (0.3, 1.0, 4.0):
        noise = by_users(Budget(epsilon, 1e-5), fraction).noise(QUERY)
        terms(epsilon=epsilon, honest_fraction=fraction).check(agreement_of(World(), noise_mean=noise.mean))


@given(honest=st.floats(0.05, 1), share=st.floats(0, 0.95))
def test_whoever_is_left_adds_what_is_certified_and_hardly_more(honest: float, share: float) -> None:
    """The honest less those who may be excluded, exactly."""
    announced = by_users(Budget(1.0, 1e-5), honest, share * honest)
    left = Fraction(announced.noise(QUERY).mean) * (Fraction(honest) - Fraction(announced.excludable))
    certified = calibrate(Budget(1.0, 1e-5 - (1 + math.e) * math.exp(-35)), QUERY.changed_counters).mean
    assert announced.charge(QUERY).noise.variance == certified >= NEEDED
    assert certified <= left <= certified * (1 + 1e-11)


@pytest.mark.parametrize("epsilon", [1.0, 10.0, 20.0, 22.0])
def test_delta_has_room_for_noise_that_does_not_fit_into_a_report(epsilon: float) -> None:
    """At either of two neighbours with probability exp(-35): it may cost 1 + e^epsilon times that."""
    budget, cost = Budget(epsilon, 1e-5), (1 + math.exp(epsilon)) * math.exp(-35)
    announced = by_users(budget, 1.0).noise(QUERY)
    assert privacy_loss(announced, QUERY.changed_counters).delta(epsilon) + cost <= budget.delta
    terms(epsilon=epsilon).check(agreement_of(World(), noise_mean=announced.mean))
    if epsilon >= 20:  # where it is a visible part of delta
        without = calibrate(budget, QUERY.changed_counters)
        with pytest.raises(UnacceptableError, match="told to accept no more than 1e-05"):
            terms(epsilon=epsilon).check(agreement_of(World(), noise_mean=without.mean))


def test_an_epsilon_that_makes_rare_events_count_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"epsilon is 30: .* Use an epsilon below 22\.8"):
        by_users(Budget(30.0, 1e-5), 1.0)


def test_a_node_refuses_small_crowds_and_endless_reports() -> None:
    agreed = agreement_of(World(), users=99, noise_mean=NEEDED * 1.01)
    with pytest.raises(UnacceptableError, match="99 users"):
        terms(min_batch_size=100).check(agreed)
    with pytest.raises(UnacceptableError, match="max_messages"):
        terms(max_messages=10).check(agreed)


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, 3),
    attempt=st.integers(0, 3),
    crowd=st.integers(3, 12),
    excludable=st.integers(0, 11),
    honest=st.sampled_from([0.5, 0.9, 1.0]),
    noise=st.sampled_from([0.99, 1.01]),
)
def test_a_node_looks_at_noise_and_crowd_in_every_batch_and_attempt(
    number: int, attempt: int, crowd: int, excludable: int, honest: float, noise: float
) -> None:
    """It takes part just if both are enough without those whom it cannot count on, to a hundredth of the noise."""
    users, transport = crowd + excludable, Transport.sums if excludable else Transport.tags
    relied_on = honest - excludable / users  # of all noise, as each adds as much
    mean = noise * NEEDED / max(relied_on, 0.01)
    world = World(users=users, transport=transport, excludable=excludable, noise_mean=mean)
    agreed = parse_announcement(wire.encode(world.announcement(number, attempt)))
    enough = crowd >= 5 and relied_on > 0 and noise >= 1
    with contextlib.nullcontext() if enough else pytest.raises(UnacceptableError, match="not take part"):
        terms(min_batch_size=5, honest_fraction=honest).check(agreed)


@pytest.mark.parametrize("name", ["min_batch_size", "honest_fraction", "max_messages"])
def test_terms_are_checked(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        terms(**{name: 0})


def test_signatures_of_both_are_needed() -> None:
    world = World()
    world.announce()
    batch = open_batch(world)
    check_signatures(world.invitation, batch)
    for role in ("coordinator_key", "shuffler_key"):
        changes: dict[str, Any] = {role: new_identity().public}
        stranger = dataclasses.replace(world.invitation, **changes)
        with pytest.raises(ProblemError, match="not signed by") as refused:
            check_signatures(stranger, batch)
        assert refused.value.reason == Reason.unauthorized


def test_a_changed_announcement_or_key_is_refused() -> None:
    world = World()
    world.announce()
    batch = open_batch(world)
    for part in ("announcement", "opening"):
        signed: Signed = getattr(batch, part)
        changed = bytearray(signed.payload)
        changed[-1] ^= 1
        forged = msgspec.structs.replace(signed, payload=bytes(changed))
        with pytest.raises(ProblemError, match="not signed by"):
            check_signatures(world.invitation, msgspec.structs.replace(batch, **{part: forged}))


def test_a_key_for_another_batch_or_another_run_is_refused() -> None:
    world, other = World(users=1), World(users=1)
    world.announce()
    first = open_batch(world)
    world.upload(world.report())
    world.shuffler.advance()
    world.announce(1)
    crossed = OpenBatch(announcement=open_batch(world).announcement, opening=first.opening)
    with pytest.raises(UnacceptableError, match="another"):
        check_signatures(world.invitation, crossed)
    with pytest.raises(UnacceptableError, match="another run"):
        check_signatures(dataclasses.replace(world.invitation, task=other.task), open_batch(world))


def test_one_kind_of_message_cannot_pass_for_another() -> None:
    """A signature covers what it signs as; equal bytes signed as something else are refused."""
    world = World()
    signed = world.coordinator.sign(world.announcement())
    with pytest.raises(ProblemError, match="not signed by"):
        world.coordinator.public.verify(wire.Command, signed)


@pytest.mark.parametrize(("number", "attempt"), [(0, 0), (0, 1), (3, 0), (7, 2)])
@pytest.mark.parametrize("transport", list(Transport))
def test_every_attempt_at_every_batch_has_the_noise_that_was_announced(
    number: int, attempt: int, transport: Transport
) -> None:
    """The noise tags of 200 reports are Poisson in all; outside six deviations with probability 2e-9."""
    world = World(users=4, noise_mean=40.0, transport=transport)
    agreed = parse_announcement(wire.encode(world.announcement(number, attempt)))
    episode = Trajectories([[0, 1]], [[0, 1]], [[0, 1]])
    drawn = sum(len(randomize_episode(agreed, episode)) - 3 for _ in range(200))
    expected = 200 * 24 * 40.0 / 4
    assert abs(drawn - expected) < 6 * np.sqrt(expected)


@given(
    honest=st.floats(0.2, 1.0),
    noise_mean=st.floats(5.0, 500.0),
    excludable=st.integers(0, 3),
)
def test_what_a_node_charges_is_the_noise_of_those_it_relies_on(
    honest: float, noise_mean: float, excludable: int
) -> None:
    """Less honest users, less noise, a higher charge: by hand."""
    world = World(users=20, noise_mean=noise_mean, transport=Transport.sums, excludable=excludable)
    agreed = agreement_of(world)
    charged = terms(honest_fraction=honest).charge(agreed)
    assert charged.changed == 2 * 3
    assert charged.noise == PoissonNoise(charged.noise.variance)
    assert charged.noise.variance == pytest.approx(noise_mean * (honest - excludable / 20))


def test_the_cap_on_messages_cannot_be_announced() -> None:
    """Were it lower, users with much noise would be kept out, and noise with them. It bounds what honest nodes send."""
    assert "max_messages" not in wire.Announcement.__struct_fields__
    agreed = agreement_of(World(), users=5, noise_mean=40.0)
    mean = 24 * 40.0 / 5
    assert mean + 6 * np.sqrt(mean) < agreed.max_messages < mean + 20 * np.sqrt(mean)
    episode = Trajectories([[0, 1]], [[0, 1]], [[0, 1]])
    sent = [len(randomize_episode(agreed, episode)) for _ in range(300)]
    assert max(sent) <= agreed.max_messages
    assert np.mean(sent) == pytest.approx(3 + mean, abs=6 * np.sqrt(mean / 300))


def test_a_move_outside_the_announced_support_is_reported_as_one_inside() -> None:
    """A node that stayed silent would tell what its user did."""
    mdp = random_mdp(5, horizon=3, states=3, actions=1)
    support = np.zeros((2, 3, 1, 3), dtype=bool)
    support[..., 1] = True
    problem = Problem(3, 3, 1, 4, mdp.start, support)
    batch = Batch(0, 4, Mixture.single(np.zeros((3, 3), dtype=int)), CountQuery.everything(problem))
    said = agreement.announce(
        batch, by_users(Budget(1.0, 1e-5), 1.0).noise(batch.query), task=bytes(16), attempt=0, tag_key=bytes(32)
    )
    agreed = parse_announcement(wire.encode(said))
    episode = Trajectories([[0, 2, 1]], [[0, 0, 0]], [[0, 1, 1]])
    with pytest.raises(InvalidInputError):
        agreed.query.tags(episode)
    inside = within_support(batch.table_query, episode)
    assert inside.states.tolist() == [[0, 1, 1]]
    for path in itertools.product(range(3), repeat=3):  # whichever of its moves are outside, the last one too
        episode = Trajectories([path], [[0, 0, 0]], [[0, 1, 1]])
        inside = within_support(batch.table_query, episode)
        assert inside.states.tolist() == [[path[0], 1, 1]]
        assert len(randomize_episode(agreed, episode)) >= 5
        assert len(set(agreed.query.groups[agreed.query.tags(inside)[0]])) == 5


@pytest.mark.parametrize(("users", "noise"), [(2, 300.0), (1000, 300.0), (10**12, 300.0), (10**6, 4e9)])
def test_the_cap_keeps_no_honest_noise_out_of_a_whole_batch(users: int, noise: float) -> None:
    """Noise that the cap cuts off is missing from the accountant's law: for all users together that must be nothing."""
    agreed = agreement_of(World(), users=users, noise_mean=noise)
    mean, most = 24 * noise / users, agreed.max_messages - agreed.query.touched_counters
    assert users * stats.poisson.sf(most, mean) < np.exp(-35)
