"""Reports that told their noise by their length could be dropped for it: the attack, played on the real objects."""

from __future__ import annotations

import numpy as np
import pytest

from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import Transport, Upload
from tests.support.network_world import EPISODE, QUERY, World, agreement_of, pretend_to_seal

#: Users of a batch, and users who offer to be in it.
USERS, OFFERED = 10, 400
#: Noise tags on a counter, all users' together.
MEAN = 40.0


@pytest.mark.parametrize("transport", list(Transport))
def test_all_reports_of_a_batch_have_the_same_bytes(transport: Transport) -> None:
    """With real seals; queues, body limits and time limits go by these bytes, and see nothing either."""
    world = World(users=USERS, noise_mean=MEAN, transport=transport)
    world.announce()
    reports = [world.report() for _ in range(20)]
    assert {len(report.envelope) for report in reports} == {agreement_of(world).envelope_bytes}
    assert len({len(wire.encode(Upload(batch=0, attempt=0, reports=[report]))) for report in reports}) == 1


@pytest.mark.slow
def test_whoever_drops_the_longest_reports_keeps_all_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network lets through the shortest of many reports; the coordinator opens what the shuffler mixed.

    The noise on all counters together is Poisson, and lies outside six deviations with probability 1e-8. Reports as
    long as what is in them would have a fifth less of it, 6.5 deviations.
    """
    pretend_to_seal(monkeypatch)
    world = World(users=USERS, noise_mean=MEAN)
    world.announce()
    offered = sorted((world.report() for _ in range(OFFERED)), key=lambda report: len(wire.encode(report)))
    outcomes = world.upload(*offered[:USERS])
    assert all(outcome.problem is None for outcome in outcomes)
    world.shuffler.advance()
    counts = np.bincount(world.tags(world.collect()), minlength=QUERY.size)
    true = USERS * np.bincount(QUERY.tags(EPISODE)[0], minlength=QUERY.size)
    assert (counts >= true).all()
    expected = QUERY.size * MEAN
    assert abs((counts - true).sum() - expected) < 6 * np.sqrt(expected)
