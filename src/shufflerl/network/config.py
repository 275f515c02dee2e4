"""What each role is told: a TOML file, every key of which can also be set on the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from shufflerl import learners
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, Problem
from shufflerl.network.node.reporting import Invitation, from_hex
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import NoiseBy, Terms
from shufflerl.network.protocol.wire import Positive
from shufflerl.privacy.accounting import Budget
from shufflerl.returns import ReturnProblem
from shufflerl.steps import StepProblem, step_law

if TYPE_CHECKING:  # each role imports what it needs
    from shufflerl.network.coordinator.run import Run
    from shufflerl.network.shuffler.shuffler import Limits


#: Where a shuffler listens unless told otherwise.
SHUFFLER = "http://127.0.0.1:8742"
#: Users that shufflers and nodes ask for in a batch, unless told otherwise.
MIN_BATCH_SIZE = 100
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all configurations."""


class Shape(Config, frozen=True):
    """A problem by its shape alone; nothing is known of its start and support."""

    horizon: int
    states: int
    actions: int


class ShufflerConfig(Config, frozen=True):
    """See docs/network.md."""

    coordinator_key: str
    enrolment_key: str | None = None
    folder: str = "shuffler"
    listen: str = "127.0.0.1:8742"
    min_batch_size: int = MIN_BATCH_SIZE
    max_messages: int = 100_000
    timeout_seconds: float = 3600.0
    when_late: Literal["extend", "abort"] = "extend"
    max_dummies: int = 10_000_000
    workers: Positive = 1
    store: str | None = None
    store_credentials: str | None = None
    store_authority: str | None = None

    @property
    def limits(self) -> Limits:
        """What the operator allows."""
        from shufflerl.network.shuffler.shuffler import Limits

        return Limits(self.min_batch_size, self.max_messages, self.timeout_seconds, self.when_late, self.max_dummies)


class CoordinatorConfig(Config, frozen=True):
    """See docs/network.md."""

    episodes: int
    epsilon: float
    delta: float = 1e-5
    noise: NoiseBy = "servers"
    honest_fraction: float = 1.0
    transport: Literal["auto", "tags", "sums"] = "tags"
    excludable: float = 0.01
    admission: float | None = None
    enrolled: int | None = None
    learner: str = learners.DEFAULT
    learner_parameters: dict[str, Any] = {}
    environment: str | None = None
    environment_parameters: dict[str, Any] = {}
    shape: Shape | None = None
    seed: int = 0
    folder: str = "coordinator"
    listen: str = "127.0.0.1:8741"
    shuffler: str = SHUFFLER
    workers: Positive = 1
    poll_seconds: Seconds = 0.5

    @property
    def run(self) -> Run:
        """What is learned."""
        from shufflerl.network.coordinator.run import Run

        return Run(
            self._problem(),
            self.learner,
            Budget(self.epsilon, self.delta),
            self.seed,
            learner_parameters=learners.batch_parameters(self.learner, MIN_BATCH_SIZE) | self.learner_parameters,
            honest_fraction=self.honest_fraction,
            transport=self.transport,
            excludable=self.excludable,
            noise=self.noise,
            admission=self.admission,
            enrolled=self.enrolled,
        )

    def _problem(self) -> Problem | ReturnProblem:
        if (self.environment is None) == (self.shape is None):
            raise InvalidInputError("Give either `environment`, whose public part is used, or [shape], and not both.")
        if self.shape is not None:
            return Problem(self.shape.horizon, self.shape.states, self.shape.actions, self.episodes)
        from shufflerl import envs

        assert self.environment is not None
        made = envs.make(self.environment, 0, **self.environment_parameters)
        if isinstance(made, MDP) and self.learner == learners.DEFAULTS[StepProblem]:
            step_law(made)  # which refuses actions that steer
        return made.problem(self.episodes)


class NodeConfig(Config, frozen=True):
    """See docs/network.md."""

    epsilon: float
    invitation: str | None = None
    task: str | None = None
    coordinator_key: str | None = None
    shuffler_key: str | None = None
    shuffler: str | None = None
    delta: float = 1e-5
    noise: NoiseBy | Literal["either"] = "either"
    honest_fraction: float = 1.0
    min_batch_size: int = MIN_BATCH_SIZE
    max_messages: int = 100_000
    tokens: str = "tokens.txt"
    environment: str = "riverswim"
    environment_parameters: dict[str, Any] = {}
    folder: str = "node"
    workers: Positive = 1
    poll_seconds: Seconds = 0.5

    def read_invitation(self) -> Invitation:
        """Whom the node trusts for what: in a file, or setting by setting."""
        task, keys = self.task, (self.coordinator_key, self.shuffler_key)
        if self.invitation is not None and {task, *keys, self.shuffler} == {None}:
            return Invitation.load(self.invitation)
        if self.invitation is not None or task is None or keys[0] is None or keys[1] is None:
            raise InvalidInputError(
                "Give either `invitation`, the file that `shufflerl invitation` writes, or all of `task`, "
                "`coordinator_key` and `shuffler_key`, and not both."
            )
        return Invitation(task, self.shuffler or SHUFFLER, keys[0], keys[1])

    @property
    def terms(self) -> Terms:
        """What the node accepts."""
        budget = Budget(self.epsilon, self.delta)
        return Terms(budget, self.honest_fraction, self.min_batch_size, self.max_messages, self.noise)

    def check_environment(self) -> None:
        """Refuse one that there is not, or with parameters that it does not have, before there is a batch to play."""
        from shufflerl import envs

        envs.ENVIRONMENTS.entry(self.environment)
        for key in self.environment_parameters:
            envs.ENVIRONMENTS.parameter(self.environment, key)

    def read_tokens(self) -> list[bytes]:
        """The tokens, one per line and user."""
        try:
            lines = Path(self.tokens).read_text().split()
        except (OSError, ValueError) as reason:
            raise InvalidInputError(f"{self.tokens} cannot be read ({reason}); `shufflerl tokens` writes it.") from None
        if not lines:
            raise InvalidInputError(f"{self.tokens} has no tokens; `shufflerl tokens` writes some.")
        return [
            from_hex(f"Line {number} of {self.tokens}", line, wire.TOKEN_BYTES, "shufflerl tokens")
            for number, line in enumerate(lines, 1)
        ]


AnyConfig = TypeVar("AnyConfig", bound=Config)


def read(kind: type[AnyConfig], path: Path | None, **flags: Any) -> AnyConfig:
    """The configuration in a file, with what the command line says on top; either may be left out."""
    try:
        values = {} if path is None else tomllib.loads(path.read_text())
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as reason:
        raise InvalidInputError(f"{path} cannot be read: {reason}. See docs/network.md for an example.") from None
    values |= {key: value for key, value in flags.items() if value is not None}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as reason:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise InvalidInputError(
            f"The settings{'' if path is None else f' in {path}'} are wrong: {reason}. Known: {known}."
        ) from None


def address(listen: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidInputError(f"listen is {listen!r}; expected host:port, such as 127.0.0.1:8741.")
    return host.strip("[]"), int(port)
