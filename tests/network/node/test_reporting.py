"""What a node reports of its episode, whatever its environment does: one report, like all others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shufflerl.counts import Batch
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import Mixture
from shufflerl.network.node.node import Node, Receipt
from shufflerl.network.node.reporting import play
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import announce, parse_announcement
from shufflerl.noise import PoissonNoise
from tests.support.network_world import PROBLEM, QUERY, World, agreement_of
from tests.support.nodes import ENV, TERMS, Place, Short, check_sent, place

__all__ = ["place"]


class Unspeakable(Exception):
    """Cannot even be told."""

    def __str__(self) -> str:
        raise ValueError


class Odd(Short):
    """Begins with one thing and answers a step with another; exceptions are raised."""

    def __init__(self, first: Any, then: Any) -> None:
        self.first, self.then = first, then

    def reset(self, **_: Any) -> Any:
        if isinstance(self.first, BaseException):
            raise self.first
        return self.first, {}

    def step(self, action: int) -> Any:
        if isinstance(self.then, BaseException):
            raise self.then
        return self.then


ODD = {
    "nothing": Odd(None, None),
    "not a number": Odd(float("nan"), None),
    "infinite": Odd(float("inf"), None),
    "text": Odd("left", None),
    "a list": Odd([0, 1], None),
    "too large to print": Odd(10**5000, (0, 0.0, False, False, {})),
    "reset raises": Odd(RuntimeError("at home"), None),
    "step raises": Odd(0, RuntimeError("at home")),
    "step raises something unspeakable": Odd(0, Unspeakable()),
    "step answers nothing": Odd(0, None),
    "step leads nowhere": Odd(0, (None, 0.0, False, False, {})),
    "no reward": Odd(0, (0, None, False, False, {})),
    "reward in words": Odd(0, (0, "much", False, False, {})),
    "step ends the program": Odd(0, SystemExit(3)),
    "step is interrupted": Odd(0, KeyboardInterrupt()),
    "reset closes a generator": Odd(GeneratorExit(), None),
}


def test_what_a_node_sends_tells_nothing_of_its_episode_but_sealed(place: Place) -> None:
    """No header, address or length differs between an episode that pays and one that fails."""
    for name, env in (("pays", Odd(0, (1, 1.0, False, False, {}))), ("fails", Odd(None, None))):
        node = place.node(name, env=env)
        node.participate()
        node.close()
    check_sent(place)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_whatever_an_environment_does_one_report_is_sent(place: Place, odd: Any, caplog: Any) -> None:
    """Silence would tell: the node is charged, and what it reports is an episode that nobody played."""
    node = place.node("a", env=odd)
    assert node.participate() == Receipt(0, "accepted")
    node.close()
    assert place.accepted == 1
    assert "The episode failed" in caplog.text
    episode = play(odd, agreement_of(place.world))
    assert (episode.states.tolist(), episode.rewards.tolist()) == ([[0, 0]], [[0, 0]])


@pytest.mark.parametrize("reward", [0, 1])
@pytest.mark.parametrize(("terminated", "truncated"), [(False, False), (True, False), (False, True)])
def test_what_is_as_it_should_be_is_reported_as_it_is(
    reward: int, terminated: bool, truncated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Rewards of nothing and of one are those very bits; after the end nothing is paid; and nothing is told."""
    episode = play(Odd(0, (1, float(reward), terminated, truncated, {})), agreement_of(World()))
    assert episode.states.tolist() == [[0, 1]]
    assert episode.rewards.tolist() == [[reward, 0 if terminated or truncated else reward]]
    assert caplog.messages == []


def test_an_episode_that_failed_is_one_the_policy_could_have_played() -> None:
    """In the first state it takes the policy's action there: what is impossible would tell that nobody played."""
    policy = np.array([[1, 0], [0, 1]], dtype="<u2")
    agreed = agreement_of(World(), policies=policy.tobytes())
    for env in ODD.values():
        episode = play(env, agreed)
        assert episode.actions.tolist() == [[policy[h, x] for h, x in enumerate(episode.states[0])]]


def test_a_program_that_makes_errors_of_warnings_still_reports(place: Place) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, odd in (("a", Odd(5, (0, 7.0, True, False, {}))), ("b", Odd(0, RuntimeError()))):
            node = place.node(name, env=odd)
            assert node.participate() == Receipt(0, "accepted")
            node.close()


def test_any_environment_with_reset_and_step_is_played(caplog: pytest.LogCaptureFixture) -> None:
    agreed = agreement_of(World())
    episodes = [play(Short(), agreed) for _ in range(400)]
    assert all(episode.states.tolist() == [[0, PROBLEM.n_states - 1]] for episode in episodes)
    assert all(episode.rewards[0, 1] == 0 for episode in episodes)
    paid = sum(int(episode.rewards[0, 0]) for episode in episodes)
    assert 120 < paid < 280  # a fair coin lies outside with probability 1e-15

    class Bad(Short):
        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            return 0, 1.5, True, False, {}

    class Elsewhere(Short):
        def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
            return 2, {}

    # Silence would tell the shuffler what the user met: such episodes are reported as the nearest that can be.
    assert play(Bad(), agreed).rewards.tolist() == [[1, 0]]
    assert "reward in [0, 1]" in caplog.text
    assert play(Elsewhere(), agreed).states.tolist() == [[1, 1]]
    assert "state 2" in caplog.text
    with pytest.raises(InvalidInputError, match="token"):
        Node(Short(), World().invitation, TERMS, b"short", Path("unused"))


def test_policies_are_played_as_often_as_their_weights_say() -> None:
    """Of 2,000 episodes those of the second policy are binomial; seven deviations, probability 3e-12."""
    policies = np.stack([np.zeros((2, 2)), np.ones((2, 2))]).astype(int)
    announced = announce(
        Batch(0, 3, Mixture(policies, [0.2, 0.8]), QUERY),
        PoissonNoise(2.0),
        task=bytes(16),
        attempt=0,
        tag_key=bytes(32),
        transport=wire.Transport.tags,
        excludable=0,
    )
    agreed, episodes = parse_announcement(wire.encode(announced)), 2000
    drawn = np.concatenate([play(ENV, agreed).actions for _ in range(episodes)])
    assert (drawn[:, 0] == drawn[:, 1]).all()
    assert abs(drawn[:, 0].sum() - 0.8 * episodes) < 7 * np.sqrt(0.8 * 0.2 * episodes)
