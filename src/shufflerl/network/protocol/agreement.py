"""What a batch means to all who take part in it, read from the signed announcement, and what a node accepts of it.

Nobody takes the coordinator's word for the noise: from the announcement alone every node computes how much will be on
every counter, if users or servers add what they are asked to, and what it costs, and the shuffler how many reports it
must wait for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from shufflerl import checks
from shufflerl.arrays import BoolArray
from shufflerl.counts import Batch, CountQuery, Query
from shufflerl.errors import InvalidInputError, ShuffleRLError
from shufflerl.mdp import Mixture, Problem
from shufflerl.network.protocol import crypto, masking, sources, wire
from shufflerl.network.protocol.sources import Source
from shufflerl.network.protocol.wire import Announcement, ProblemError, Reason, Transport
from shufflerl.noise import NoiseSum, PoissonNoise
from shufflerl.policies import Family, Scores, Table, describe, pack, parse, unpack
from shufflerl.returns import MAX_POLICIES, ReturnProblem, ReturnQuery, is_range
from shufflerl.steps import StepProblem

if TYPE_CHECKING:  # the accountant is large; those who only read announcements do without
    from shufflerl.privacy.accounting import Budget
    from shufflerl.privacy.ledger import Charge
    from shufflerl.privacy.mechanism import ServersNoise, ShuffledPoisson

# Tables beyond this are refused before anything is built from an announcement.
_MAX_CELLS = 50_000_000

#: Who adds the noise, as the settings have it.
NoiseBy = Literal["users", "servers"]


class UnacceptableError(ShuffleRLError):
    """A batch that a node does not take part in, because it would not get the privacy it was promised."""


@dataclass(frozen=True)
class Agreement:
    """An announcement as values: the batch, who adds its noise, and the contexts that messages are bound to."""

    announcement: Announcement
    digest: bytes
    batch: Batch
    source: Source

    @property
    def query(self) -> Query:
        """The counters that are asked for."""
        query: Query = self.batch.query
        return query

    @functools.cached_property
    def tag_info(self) -> bytes:
        """The context of a sealed tag."""
        announcement = self.announcement
        return crypto.tag_info(announcement.task, announcement.batch, announcement.attempt, self.digest)

    @functools.cached_property
    def seed_info(self) -> bytes:
        """The context of a sealed seed."""
        announcement = self.announcement
        return crypto.seed_info(announcement.task, announcement.batch, announcement.attempt, self.digest)

    def envelope_info(self, report_id: bytes) -> bytes:
        """The context of the envelope of this report."""
        announcement = self.announcement
        return crypto.envelope_info(announcement.task, announcement.batch, announcement.attempt, self.digest, report_id)

    @functools.cached_property
    def max_messages(self) -> int:
        """Messages of 52 bytes in every report; a masked vector counts as the messages it is as long as.

        Computed, not announced: a coordinator that could lower it would cut off noise.
        """
        if self.transport == Transport.sums:
            return -(-self._vector_bytes // wire.SEALED_TAG_BYTES)
        return self.source.tags_per_report

    @property
    def transport(self) -> Transport:
        """How reports travel."""
        return self.announcement.transport

    @property
    def drawn(self) -> float:
        """The share of all tokens that may take part."""
        drawn = self.announcement.drawn
        return 1.0 if drawn is msgspec.UNSET else drawn

    def draws(self, envelope_key: bytes, token: bytes, extensions: int) -> bool:
        """Whether a token may take part: nodes and shufflers find the same.

        Twice as many may each time that the batch is given more time, the former among them: it fills at last.
        """
        return crypto.lot(envelope_key, token) >> extensions < self.drawn * 2**64

    @property
    def min_users(self) -> int:
        """The fewest users whose reports are released together: all but those who may be excluded."""
        return self.announcement.users - self.announcement.excludable

    def charge(self, budget: Budget, honest_fraction: float, excluded: int) -> Charge:
        """What the batch costs each of its users if only the honest fraction add their noise.

        All reports that are excluded from a sum are taken to be honest ones, whose noise goes with them.
        """
        return self.source.stated(budget, honest_fraction, excluded).charge(self.query)

    @functools.cached_property
    def word_bytes(self) -> int:
        """Bytes of a counter in a masked vector."""
        return masking.word_bytes(*self.source.count_range)

    @property
    def _vector_bytes(self) -> int:
        return wire.SEALED_SEED_BYTES + self.query.size * self.word_bytes

    @property
    def envelope_bytes(self) -> int:
        """Bytes of every envelope of the batch: one that told its noise by its length could be dropped for it."""
        sums = self.transport == Transport.sums
        sealed = self._vector_bytes if sums else self.max_messages * wire.SEALED_TAG_BYTES
        return wire.TOKEN_BYTES + sealed + crypto.SEAL_BYTES


def announce(
    batch: Batch,
    noise: PoissonNoise | NoiseSum,
    *,
    task: bytes,
    attempt: int,
    tag_key: bytes,
    transport: Transport = Transport.tags,
    excludable: int = 0,
    problem: Problem | ReturnProblem | None = None,
    drawn: float = 1.0,
) -> Announcement:
    """The announcement of a learner's batch; its noise as a mechanism has it, of users or of both servers.

    Of returns and of random steps the problem must be given too: it says how long episodes are, and in which range
    returns lie.
    """
    query, mixture = batch.query, batch.mixture
    if isinstance(mixture.family, Table) and mixture.policies.max() >= 2**16:
        raise InvalidInputError("There is an action above 65,535; expected at most 65,536 actions on the network.")
    return Announcement(
        task=task,
        batch=batch.index,
        attempt=attempt,
        users=batch.users,
        query=_asked(query, mixture.family, problem),
        policies=pack(mixture.family, mixture.policies),
        weights=mixture.weights.tolist(),
        noise=sources.source(query, batch.users, noise, excludable).as_wire(),
        tag_key=tag_key,
        transport=transport,
        excludable=excludable,
        drawn=drawn if drawn < 1 else msgspec.UNSET,
    )


def _asked(
    query: Query, family: Family, problem: Problem | ReturnProblem | None
) -> wire.Counts | wire.Returns | wire.Steps:
    """A query as it is announced."""
    if isinstance(family, Scores):
        assert isinstance(problem, Problem)
        steps = _bounded(StepProblem.of(problem).steps)
        return wire.Steps(horizon=steps, states=family.states, actions=family.actions)
    if isinstance(query, CountQuery):
        return wire.Counts(
            horizon=query.horizon,
            states=query.n_states,
            actions=query.n_actions,
            transitions=list(query.transition_steps),
            rewards=list(query.reward_steps),
            support=None if query.support is None else np.packbits(query.support).tobytes(),
        )
    assert isinstance(query, ReturnQuery)
    assert problem is not None
    low, high = (problem.low, problem.high) if isinstance(problem, ReturnProblem) else (0.0, float(problem.horizon))
    steps = _bounded(problem.horizon)
    return wire.Returns(family=describe(family), horizon=steps, points=list(query.points), low=low, high=high)


def _bounded(steps: int) -> int:
    if steps > wire.MAX_STEPS:
        raise InvalidInputError(f"Episodes have {steps:,} steps; expected at most {wire.MAX_STEPS:,} on the network.")
    return steps


@functools.lru_cache(maxsize=64)
def parse_announcement(payload: bytes) -> Agreement:
    """What the bytes of a signed announcement ask a node to agree to; a problem if they are none."""
    announcement = wire.decode(Announcement, payload)
    try:
        return _parse(announcement, payload)
    except (InvalidInputError, ValueError, ArithmeticError) as reason:
        raise ProblemError(
            Reason.malformed, f"The announcement of batch {announcement.batch} makes no sense: {reason}"
        ) from None


def _parse(announcement: Announcement, payload: bytes) -> Agreement:
    asked, users, excludable = announcement.query, announcement.users, announcement.excludable
    if len(announcement.policies) > _MAX_CELLS:
        raise InvalidInputError(f"Its policies have {len(announcement.policies):,} bytes; at most {_MAX_CELLS:,} fit.")
    query: Query
    family: Family
    if isinstance(asked, wire.Counts):
        query, family = _counts(asked, users), Table(asked.horizon, asked.states)
    elif isinstance(asked, wire.Steps):
        query = CountQuery.everything(StepProblem(asked.horizon, asked.states, asked.actions, users))
        family = Scores(asked.states, asked.actions)
        if len(announcement.weights) > MAX_POLICIES:
            raise InvalidInputError(
                f"It has {len(announcement.weights):,} policies; expected at most {MAX_POLICIES:,}."
            )
    else:
        query, family = ReturnQuery(len(announcement.weights), tuple(asked.points)), _played(asked)
    mixture = Mixture(unpack(family, announcement.policies), announcement.weights, family)
    batch = Batch(announcement.batch, users, mixture, query)
    if excludable > (users - 1 if announcement.transport == Transport.sums else 0):
        raise InvalidInputError(
            f"It may exclude {excludable} of {users} users; of sums somebody must be left, of tags nobody is excluded."
        )
    source = sources.from_wire(query, users, announcement.noise, excludable)
    agreement = Agreement(announcement, crypto.digest(payload), batch, source)
    _ = agreement.envelope_bytes  # of sums that could wrap, and of noise that is too small a number, there is no length
    return agreement


def _counts(asked: wire.Counts, users: int) -> CountQuery:
    horizon, states, actions = asked.horizon, asked.states, asked.actions
    cells = horizon * states * actions * states
    if cells > _MAX_CELLS:
        raise InvalidInputError(f"It has {cells:,} counters; expected at most {_MAX_CELLS:,}.")
    support: BoolArray | None = None
    if asked.support is not None:
        shape = (horizon - 1, states, actions, states)
        packed = np.frombuffer(asked.support, dtype=np.uint8)
        if len(packed) != -(-math.prod(shape) // 8):
            raise InvalidInputError(f"Its support has {len(packed)} bytes; expected one bit per transition.")
        support = np.unpackbits(packed, count=math.prod(shape)).astype(np.bool_).reshape(shape)
    problem = Problem(horizon, states, actions, users, support=support)
    return CountQuery(problem, asked.transitions, asked.rewards)


def _played(asked: wire.Returns) -> Family:
    """The family of the policies whose returns are compared; what else is asked must go with it."""
    family = parse(asked.family)
    if isinstance(family, Scores):
        raise InvalidInputError("Its policies are scores; expected tables or networks where returns are compared.")
    if isinstance(family, Table) and family.horizon != asked.horizon:
        raise InvalidInputError(f"Its tables are for {family.horizon} steps; expected {asked.horizon}, as it has.")
    ends = [end for end in (asked.low, asked.high) if end is not None]
    if ends and (len(ends) == 1 or not is_range(*ends)):
        raise InvalidInputError(f"Its returns lie in [{asked.low}, {asked.high}]; expected a range, or none.")
    return family


def mechanism(
    noise: NoiseBy, budget: Budget, honest_fraction: float = 1.0, excludable: float = 0.0
) -> ShuffledPoisson | ServersNoise:
    """What every node with this budget and assumption will accept; `excludable` is a share of the users."""
    from shufflerl.privacy.mechanism import ServersNoise

    return ServersNoise(budget) if noise == "servers" else by_users(budget, honest_fraction, excludable)


def by_users(budget: Budget, honest_fraction: float = 1.0, excludable: float = 0.0) -> ShuffledPoisson:
    """Noise by the users: so much that what the honest add suffices, less what may be excluded or not fit."""
    from shufflerl.privacy.loss import failure_delta
    from shufflerl.privacy.mechanism import ShuffledPoisson

    if (spare := failure_delta(masking.OVERFLOW, budget.epsilon)) > budget.delta / 2:
        raise InvalidInputError(
            f"epsilon is {budget.epsilon:g}: that noise may not fit into a report then takes delta {spare:.2g}, more "
            f"than half of {budget.delta:g}. Use an epsilon below {math.log(budget.delta / 2 / masking.OVERFLOW):.1f}."
        )
    # A hair more, so that dividing here and multiplying at the node cannot round below what was certified.
    return ShuffledPoisson(budget, 1, honest_fraction, excludable, margin=1e-12, failure=masking.OVERFLOW)


@dataclass(frozen=True)
class Terms:
    """What a node was told to accept: its user's budget for a run, and how it wants to be mixed.

    `honest_fraction`: the share of all users it relies on to add their noise, where users do; `min_batch_size`: the
    fewest it is mixed with, whoever is excluded; `max_messages`: how many messages it is willing to send; `noise`: whom
    it relies on to add the noise.
    """

    budget: Budget
    honest_fraction: float = 1.0
    min_batch_size: int = 100
    max_messages: int = 100_000
    noise: NoiseBy | Literal["either"] = "either"

    def __post_init__(self) -> None:
        checks.fraction("honest_fraction", self.honest_fraction)
        checks.whole("min_batch_size", self.min_batch_size, least=1)
        checks.whole("max_messages", self.max_messages, least=1)
        checks.choice("noise", self.noise, ("users", "servers", "either"))

    def charge(self, agreement: Agreement) -> Charge:
        """What taking part costs if only the honest add their noise and as many as may be are excluded."""
        announcement, by_users = agreement.announcement, agreement.source.name == "users"
        if by_users and self.honest_fraction <= announcement.excludable / announcement.users:
            raise UnacceptableError(
                f"Of batch {announcement.batch}'s {announcement.users} users {announcement.excludable} may be "
                f"excluded; this node relies on the noise of {self.honest_fraction:g} of them, of which none need be "
                "left. It does not take part."
            )
        return agreement.charge(self.budget, self.honest_fraction, announcement.excludable)

    def check(self, agreement: Agreement) -> None:
        """Refuse a batch that gives less privacy than these terms ask for."""
        from shufflerl.privacy import accounting

        announcement, source = agreement.announcement, agreement.source
        if self.noise not in ("either", source.name):
            raise UnacceptableError(
                f"Batch {announcement.batch} has noise by {source.name}; this node was told to accept noise by "
                f"{self.noise} alone (noise). It does not take part."
            )
        if agreement.min_users < self.min_batch_size:
            less = f" less {announcement.excludable} that may be excluded" if announcement.excludable else ""
            raise UnacceptableError(
                f"Batch {announcement.batch} mixes {announcement.users} users{less}; this node was told to accept no "
                f"fewer than {self.min_batch_size} (min_batch_size). It does not take part."
            )
        if agreement.max_messages > self.max_messages:
            raise UnacceptableError(
                f"Batch {announcement.batch} may take {agreement.max_messages:,} messages from one node; this one "
                f"was told to send no more than {self.max_messages:,} (max_messages). It does not take part."
            )
        if source.dummies is not None and source.own is not None and not accounting.covers(source.own, source.dummies):
            raise UnacceptableError(
                f"Batch {announcement.batch} has {sources.in_words(source.dummies)} by the shuffler and "
                f"{sources.in_words(source.own)} by the coordinator; this node accepts of the coordinator the same law "
                "uncut, or a wider one, as its ledger adds up one of both. It does not take part."
            )
        epsilon = self.budget.epsilon
        delta = self.charge(agreement).delta(epsilon)
        if delta > self.budget.delta:
            raise UnacceptableError(
                f"Batch {announcement.batch} has {source.relied_on(self.honest_fraction)} for delta {delta:.3g} at "
                f"epsilon {epsilon:g}; this node was told to accept no more than {self.budget.delta:g}. It does not "
                f"take part; the coordinator must announce {self._enough(source)}."
            )

    def _enough(self, source: Source) -> str:
        share = source.excludable / source.users
        enough = mechanism(source.name, self.budget, self.honest_fraction, share).noise(source.query)
        return f"at least {sources.in_words(enough)}"
