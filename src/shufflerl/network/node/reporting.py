"""From an episode to sealed bytes: what a node does with what its user did, without network or disk.

Imports little, as fleets run it in workers.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.envs.playing import Interface, play_episode
from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import Agreement, UnacceptableError, parse_announcement
from shufflerl.network.protocol.crypto import VerifyKey
from shufflerl.network.protocol.wire import Announcement, OpenBatch, Opening, ProblemError, Report, Transport
from shufflerl.policies import Network, Scores
from shufflerl.privacy import randomness
from shufflerl.returns import ReturnQuery, Returns

log = logging.getLogger("shufflerl.network.node")


class Environment(Protocol):
    """A Gymnasium environment. Of counters of tables, with discrete observations and actions and rewards in [0, 1]."""

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take an action."""
        ...


@dataclass(frozen=True, init=False)
class Invitation:
    """What a node must know beforehand, by a way it trusts: the run, where the shuffler is, and both public keys.

    Task and keys may be given as the commands print them. Nothing in it is secret, and all of it must be right.
    """

    task: bytes
    shuffler: str
    coordinator_key: VerifyKey
    shuffler_key: VerifyKey

    def __init__(
        self, task: bytes | str, shuffler: str, coordinator_key: VerifyKey | str, shuffler_key: VerifyKey | str
    ) -> None:
        keys = (coordinator_key, shuffler_key)
        values = (
            from_hex("The task", task, wire.TASK_BYTES, "shufflerl status"),
            checks.web_address("shuffler", shuffler),
            *(key if isinstance(key, VerifyKey) else VerifyKey.from_text(key) for key in keys),
        )
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)
        if self.coordinator_key == self.shuffler_key:
            raise InvalidInputError(
                "Coordinator and shuffler have the same key in this invitation: one role would see who sent what. "
                "Expected two keys, of two operators."
            )

    @classmethod
    def load(cls, path: Path | str) -> Invitation:
        """The invitation in a file that `save` or `shufflerl invitation` wrote."""
        try:
            found = tomllib.loads(Path(path).read_text())
        except (OSError, UnicodeError, tomllib.TOMLDecodeError) as reason:
            raise InvalidInputError(
                f"The invitation {path} cannot be read ({reason}); `shufflerl invitation` writes one."
            ) from None
        names = [field.name for field in fields(cls)]
        if sorted(found) != sorted(names):
            raise InvalidInputError(f"{path} is no invitation: it has {sorted(found)}; expected {', '.join(names)}.")
        return cls(**found)

    def save(self, path: Path | str) -> None:
        """Write it to a file that can be handed out."""
        lines = {
            "task": self.task.hex(),
            "shuffler": self.shuffler,
            "coordinator_key": str(self.coordinator_key),
            "shuffler_key": str(self.shuffler_key),
        }
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())
        place = Path(path)
        partial = place.with_name(f".{place.name}.partial")
        try:
            partial.write_text(f"# {_ABOUT_INVITATIONS}\n{text}")
            partial.replace(place)
        except OSError as reason:
            partial.unlink(missing_ok=True)
            raise StorageError(f"The invitation {path} cannot be written ({reason}).") from None


_ABOUT_INVITATIONS = "An invitation to a run of shufflerl. Nothing here is secret; take it only from whom you trust."


def from_hex(name: str, value: bytes | str, size: int, command: str) -> bytes:
    """So many bytes, or the text of twice as many hexadecimal digits that a command prints."""
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else value
    except ValueError:
        raw = b""
    if not isinstance(raw, bytes) or len(raw) != size:
        raise InvalidInputError(f"{name} is wrong; expected the {2 * size} hexadecimal digits that `{command}` gives.")
    return raw


@dataclass(frozen=True)
class Checked:
    """An open batch whose signatures are right."""

    agreement: Agreement
    envelope_key: bytes
    extensions: int = 0

    def is_of(self, status: wire.BatchStatus) -> bool:
        """Whether it is this batch that is told of."""
        announcement = self.agreement.announcement
        return (announcement.batch, announcement.attempt) == (status.batch, status.attempt)

    def draws(self, token: bytes) -> bool:
        """Whether the token is drawn for the batch, which was given more time as often as its shuffler signed."""
        return self.agreement.draws(self.envelope_key, token, self.extensions)


def check_signatures(invitation: Invitation, batch: OpenBatch) -> Checked:
    """The batch, if coordinator and shuffler both signed it and it is of the run the node was invited to."""
    try:
        announcement = invitation.coordinator_key.verify(Announcement, batch.announcement)
        opening = invitation.shuffler_key.verify(Opening, batch.opening)
    except ProblemError as problem:
        raise ProblemError(problem.reason, f"{problem.detail} Check both keys in the invitation.") from None
    for key in (announcement.tag_key, opening.envelope_key):
        crypto.check_box_key(key)
    agreement = parse_announcement(batch.announcement.payload)
    if announcement.task != invitation.task or opening.announcement != agreement.digest:
        raise UnacceptableError(
            "The shuffler offers a batch of another run, or a key made for another batch; this node does not take "
            "part. Check the task in its invitation."
        )
    extensions = 0 if opening.extensions is msgspec.UNSET else opening.extensions
    return Checked(agreement, opening.envelope_key, extensions)


def check_environment(env: Any, agreement: Agreement) -> None:
    """Refuse a batch made for another kind of environment, before anything is charged for it."""
    mixture, asked = agreement.batch.mixture, agreement.announcement.query
    if isinstance(mixture.family, Network):
        try:
            Interface.of(env).check_fits(mixture.family)
        except InvalidInputError as reason:
            raise UnacceptableError(f"{reason} This node does not take part.") from None
        return
    if isinstance(mixture.family, Scores):
        _check_tiles(env, mixture.family)
        return
    needed = asked.actions if isinstance(asked, wire.Counts) else int(mixture.policies.max()) + 1
    states = getattr(getattr(env, "observation_space", None), "n", None)
    actions = getattr(getattr(env, "action_space", None), "n", None)
    some = mixture.family.states
    enough = actions in (None, needed) or (isinstance(asked, wire.Returns) and actions >= needed)
    if states not in (None, some, some - 1) or not enough:
        raise UnacceptableError(
            f"The batch is for {some} states and {needed} actions, but the environment has {states} and {actions}; "
            "expected as many, or one state less if it may end early. This node does not take part."
        )


def _check_tiles(env: Any, family: Scores) -> None:
    """Refuse an environment with other states than these, one for all actions or one for each; or other actions."""
    seen, actions = getattr(env, "observation_space", None), getattr(getattr(env, "action_space", None), "n", None)
    states = getattr(seen, "n", None)
    if (each := getattr(seen, "nvec", None)) is not None:
        states = family.states if np.array_equal(each, np.full(family.actions, family.states)) else 0
    if states not in (None, family.states, family.states - 1) or actions not in (None, family.actions):
        raise UnacceptableError(
            f"The batch is for {family.states} states and {family.actions} actions, but the environment has "
            f"observations {seen} and {actions} actions; expected a Discrete space of as many states, or of one less "
            "if it may end early, or a MultiDiscrete one of as many for each action. This node does not take part."
        )


def play(env: Environment, agreement: Agreement) -> Any:
    """One episode under a policy drawn from the batch's mixture: its trajectory, a random step of it, or its return.

    An environment that ends early stays in the last state of the problem, where nothing is paid, as the Gymnasium
    bridge has it. A reward between 0 and 1 becomes a bit with that probability. What the batch has no counters for is
    reported as the nearest that it has, and an episode that cannot be played or read as one that never leaves the
    first state and earns nothing, or as the least return: whether a node reports must not depend on what its user met.
    """
    mixture = agreement.batch.mixture
    (drawn,) = random.SystemRandom().choices(range(len(mixture.weights)), mixture.weights.tolist())
    if isinstance(agreement.query, ReturnQuery):
        return _returned(env, agreement, agreement.query, drawn)
    if isinstance(agreement.announcement.query, wire.Steps):
        return _random_step(env, agreement.announcement.query, mixture.policies[drawn])
    policy: PolicyArray = mixture.policies[drawn]
    try:
        return _episode(env, policy)
    except BaseException:  # whatever an environment raises, and if it asks the program to end
        log.warning("The episode failed; one that never leaves the first state is reported instead.", exc_info=True)
    still = np.zeros((1, len(policy)), dtype=np.int64)
    return Trajectories(still, policy[None, :, 0].astype(np.int64), still)


def _returned(env: Any, agreement: Agreement, query: ReturnQuery, drawn: int) -> Returns:
    """Which policy was played, and at which point its return lies, between two of them by chance."""
    asked = agreement.announcement.query
    assert isinstance(asked, wire.Returns)
    family, policy = agreement.batch.mixture.family, agreement.batch.mixture.policies[drawn]
    try:
        if isinstance(family, Network):
            returned = play_episode(env, Interface.of(env), family, policy, asked.horizon)
        else:
            returned = float(_episode(env, policy).rewards.sum())
        (below,), (above,) = query.position([returned])
        if asked.low is not None and asked.high is not None and not asked.low <= returned <= asked.high:
            _odd(f"The episode returned {returned:g}; expected a return in [{asked.low:g}, {asked.high:g}].")
        return Returns([drawn], [int(below) + int(randomness.bernoulli(Fraction(float(above)), 1)[0])])
    except BaseException:  # whatever an environment raises, and if it asks the program to end
        log.warning("The episode failed; the least return is reported instead.", exc_info=True)
    return Returns([drawn], [0])


def _random_step(env: Environment, asked: wire.Steps, scores: FloatArray) -> Trajectories:
    """One step, drawn before the episode, which is played to its end; a failed one is reported as `play` says."""
    family, told = Scores(asked.states, asked.actions), random.SystemRandom().randrange(asked.horizon)
    ended = np.full(asked.actions, asked.states - 1)
    try:
        observation, _ = env.reset()
        over = False
        for step in range(asked.horizon):
            # A copy: an environment may show what it sees next in the same array.
            states = ended if over else np.broadcast_to(np.array(observation, dtype=np.int64), asked.actions)
            if not ((states >= 0) & (states < asked.states)).all():
                _odd(f"The environment is in state {observation}; the batch is for {asked.states} states.")
                states = np.where((states >= 0) & (states < asked.states), states, ended)
            action, reward = int(family.act(scores, states)), 0.0
            if not over:
                observation, reward, terminated, truncated, _ = env.step(action)
                over = bool(terminated or truncated)
            if step == told:
                reported = Trajectories([[int(states[action])]], [[action]], [[int(_bit(float(reward)))]])
        return reported
    except BaseException:  # whatever an environment raises, and if it asks the program to end
        log.warning("The episode failed; a step in the first state is reported instead.", exc_info=True)
    return Trajectories([[0]], [[int(family.act(scores, 0))]], [[0]])


def _episode(env: Environment, policy: PolicyArray) -> Trajectories:
    horizon, n_states = policy.shape
    states, actions, rewards = (np.zeros((1, horizon), dtype=np.int64) for _ in range(3))
    observation, _ = env.reset()
    over = False
    for h in range(horizon):
        state = n_states - 1 if over else int(observation)
        if not 0 <= state < n_states:
            _odd(f"The environment is in state {state}; the batch is for {n_states} states.")
            state = n_states - 1
        states[0, h], actions[0, h] = state, policy[h, state]
        if not over:
            observation, reward, terminated, truncated, _ = env.step(policy[h, state])
            rewards[0, h] = _bit(float(reward))
            over = bool(terminated or truncated)
    return Trajectories(states, actions, rewards)


def _bit(reward: float) -> bool:
    if not 0 <= reward <= 1:
        _odd(f"The environment paid {reward:g}; expected a reward in [0, 1]. Rescale its rewards.")
        reward = 1.0 if reward > 1 else 0.0
    return bool(randomness.bernoulli(Fraction(reward), 1)[0])


def _odd(what: str) -> None:
    """Tell the device, and nobody else: a node that stayed silent would tell what its user met.

    Logged, not warned of: a program may have made errors of warnings, and the report would not be sent.
    """
    log.warning("%s The nearest thing that can be said is reported.", what)


def within_support(query: CountQuery, trajectory: Trajectories) -> Trajectories:
    """The trajectory with every move that the announced support rules out led to the first state that it allows.

    A node must not stay silent about such moves: whether it reports would then depend on what its user did, and a
    coordinator could announce a support to find out.
    """
    support = query.support
    if support is None:
        return trajectory
    states = trajectory.states.copy()
    for h in range(states.shape[1] - 1):
        allowed = support[h, states[0, h], trajectory.actions[0, h]]
        if not allowed[states[0, h + 1]]:
            states[0, h + 1] = int(np.flatnonzero(allowed)[0])
    return Trajectories(states, trajectory.actions, trajectory.rewards)


def make_report(checked: Checked, episode: Trajectories | Returns, token: bytes) -> Report:
    """Randomize one episode and seal it, to the coordinator and then to the shuffler."""
    return seal_report(checked, randomize_episode(checked.agreement, episode), token)


def randomize_episode(agreement: Agreement, episode: Trajectories | Returns) -> IntArray:
    """An episode's tags, and noise where users add it, from the operating system's random source."""
    if isinstance(episode, Trajectories) and isinstance(agreement.query, CountQuery):
        episode = within_support(agreement.query, episode)
    tags = agreement.source.tags(episode)
    # Tags that are counted have no order to hide, and sorting them would take longer than drawing them.
    return tags if agreement.transport == Transport.sums else np.sort(tags)


def seal_report(checked: Checked, tags: Iterable[int], token: bytes) -> Report:
    """Tags as a report: as the batch's transport has it, in one envelope with the token."""
    agreement = checked.agreement
    sealed = (sealed_vector if agreement.transport == Transport.sums else sealed_tags)(agreement, tags)
    report_id = crypto.report_id(agreement.announcement.task, token)
    envelope = crypto.seal(
        crypto.public_box_key(checked.envelope_key), agreement.envelope_info(report_id), b"".join([token, *sealed])
    )
    return Report(report_id=report_id, envelope=envelope)


def sealed_tags(agreement: Agreement, tags: Iterable[int]) -> list[bytes]:
    """Each tag sealed by itself in its group's place, and padding sealed alike: as many as every report has."""
    key, info = crypto.public_box_key(agreement.announcement.tag_key), agreement.tag_info
    filled = itertools.islice(itertools.chain(tags, itertools.repeat(wire.PADDING)), agreement.max_messages)
    return [crypto.seal(key, info, int(tag).to_bytes(wire.TAG_BYTES)) for tag in filled]


def sealed_vector(agreement: Agreement, tags: Iterable[int]) -> list[bytes]:
    """The tags counted under a mask, and its seed sealed; equally long whatever the tags are."""
    seed = secrets.token_bytes(wire.SEED_BYTES)
    key = crypto.public_box_key(agreement.announcement.tag_key)
    counted = tags if isinstance(tags, np.ndarray) else list(tags)
    vector = masking.masked(counted, seed, agreement.query.size, agreement.word_bytes)
    return [crypto.seal(key, agreement.seed_info, seed), vector]
