"""The commands of the networked system: thin, like the rest of the command line."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shufflerl.errors import StorageError
from shufflerl.network import check_installed as _installed
from shufflerl.options import DELTA_HELP, AsJson, NoiseBy, count

File = Annotated[Path | None, typer.Argument(help="Settings as TOML; see docs/network.md.", metavar="[FILE]")]
Address = Annotated[str, typer.Option(help="Where the coordinator listens.", metavar="URL")]
COORDINATOR = "http://127.0.0.1:8741"
TransportChoice = Literal["auto", "tags", "sums"]


def shuffler(
    file: File = None,
    folder: Annotated[str | None, typer.Option(help="Keys and database.", metavar="DIR")] = None,
    listen: Annotated[str | None, typer.Option(help="Address; port 0 takes a free one.", metavar="HOST:PORT")] = None,
    coordinator_key: Annotated[str | None, typer.Option(help="Whose batches to mix.", metavar="KEY")] = None,
    enrolment_key: Annotated[str | None, typer.Option(help="Verifies tokens; else its own.", metavar="KEY")] = None,
    min_batch_size: Annotated[int | None, typer.Option(help="Fewest users to mix.")] = None,
    max_messages: Annotated[int | None, typer.Option(help="Most messages in a report.")] = None,
    max_dummies: Annotated[int | None, typer.Option(help="Most dummies to seal for a batch.")] = None,
    timeout_seconds: Annotated[float | None, typer.Option(help="Time a batch has to fill.")] = None,
    when_late: Annotated[
        Literal["extend", "abort"] | None, typer.Option(help="What becomes of one that does not.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that seal dummies.")] = None,
    store: Annotated[str | None, typer.Option(help="NATS servers; else a file in the folder.", metavar="URLS")] = None,
    store_credentials: Annotated[str | None, typer.Option(help="Of its user there.", metavar="FILE")] = None,
    store_authority: Annotated[str | None, typer.Option(help="Signed their certificates.", metavar="FILE")] = None,
) -> None:
    """Run a shuffler: takes sealed reports, hands over whole batches in random order."""
    flags = {key: value for key, value in locals().items() if key != "file"}
    _installed()
    from shufflerl.network import config, roles

    roles.run_shuffler(config.read(config.ShufflerConfig, file, **flags))


def coordinator(
    file: File = None,
    folder: Annotated[str | None, typer.Option(help="Keys, database and ledger.", metavar="DIR")] = None,
    listen: Annotated[str | None, typer.Option(help="Address; port 0 takes a free one.", metavar="HOST:PORT")] = None,
    shuffler: Annotated[str | None, typer.Option(help="Where the shuffler listens.", metavar="URL")] = None,
    environment: Annotated[str | None, typer.Option(help="Learn this one; only its public part is used.")] = None,
    learner: Annotated[str | None, typer.Option(help="Learner; module:name is your own.")] = None,
    episodes: Annotated[int | None, count("Users in all, one episode each.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of every user.")] = None,
    delta: Annotated[float | None, typer.Option(help=DELTA_HELP)] = None,
    noise: Annotated[NoiseBy | None, typer.Option(help="Who adds it.")] = None,
    honest_fraction: Annotated[float | None, typer.Option(help="Share of users relied on for noise.")] = None,
    transport: Annotated[TransportChoice | None, typer.Option(help="How reports travel.")] = None,
    excludable: Annotated[float | None, typer.Option(help="Share of masked vectors that may be left out.")] = None,
    admission: Annotated[float | None, typer.Option(help="Draw so many times a batch's users by lot.")] = None,
    enrolled: Annotated[int | None, count("Users to draw from; else `episodes`.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the learner; noise has none.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that open messages.")] = None,
    poll_seconds: Annotated[float | None, typer.Option(help="Seconds between looks at the shuffler.")] = None,
) -> None:
    """Run a coordinator: announces batches, counts what the shuffler releases, learns."""
    flags = {key: value for key, value in locals().items() if key != "file"}
    _installed()
    from shufflerl.network import config, roles

    roles.run_coordinator(config.read(config.CoordinatorConfig, file, **flags))


def node(
    file: File = None,
    folder: Annotated[str | None, typer.Option(help="Outbox and ledger.", metavar="DIR")] = None,
    invitation: Annotated[str | None, typer.Option(help="In place of the next four.", metavar="FILE")] = None,
    shuffler: Annotated[str | None, typer.Option(help="Where the shuffler listens.", metavar="URL")] = None,
    task: Annotated[str | None, typer.Option(help="The run; `shufflerl status` tells it.")] = None,
    coordinator_key: Annotated[str | None, typer.Option(help="The coordinator's public key.", metavar="KEY")] = None,
    shuffler_key: Annotated[str | None, typer.Option(help="The shuffler's public key.", metavar="KEY")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens, one line and user each.", metavar="FILE")] = None,
    environment: Annotated[str | None, typer.Option(help="What to play.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget to accept.")] = None,
    delta: Annotated[float | None, typer.Option(help=DELTA_HELP)] = None,
    noise: Annotated[Literal["either", "servers", "users"] | None, typer.Option(help="Whose noise to rely on.")] = None,
    honest_fraction: Annotated[float | None, typer.Option(help="Share of other users to rely on.")] = None,
    min_batch_size: Annotated[int | None, typer.Option(help="Fewest users to be mixed with.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that play and seal.")] = None,
    poll_seconds: Annotated[float | None, typer.Option(help="Seconds between looks at the shuffler.")] = None,
) -> None:
    """Run a node for every token: each plays one episode and reports it."""
    flags = {key: value for key, value in locals().items() if key != "file"}
    _installed()
    from shufflerl.network import config, roles

    roles.run_nodes(config.read(config.NodeConfig, file, **flags))


def keys(
    folder: Annotated[Path, typer.Argument(help="A role's folder.", metavar="DIR")],
    enrolment: Annotated[bool, typer.Option("--enrolment", help="The key that verifies tokens instead.")] = False,
) -> None:
    """Print a role's public key; made if there is none."""
    _installed()
    from shufflerl.network import roles
    from shufflerl.network.protocol.crypto import SigningKey

    path = folder / (roles.ENROLMENT if enrolment else "identity.pem")
    with roles.telling_what_is_new(path):
        key = SigningKey.load(path)
    typer.echo(key.public)


def tokens(
    folder: Annotated[Path, typer.Argument(help="Where the enrolment key is.", metavar="DIR")],
    out: Annotated[Path, typer.Argument(help="File to write, one line and user each.", metavar="FILE")],
    count: Annotated[int, typer.Option(help="How many users.", min=1)] = 1,
) -> None:
    """Issue enrolment tokens, one per user."""
    _installed()
    from shufflerl.network import roles

    roles.mint_tokens(folder, count, out)


def invitation(
    file: Annotated[Path, typer.Argument(help="File to write.", metavar="FILE")],
    shuffler_key: Annotated[str, typer.Option(help="The shuffler's public key, by a way you trust.", metavar="KEY")],
    coordinator_key: Annotated[
        str | None, typer.Option(help="The coordinator's.", metavar="KEY", show_default="what it says itself")
    ] = None,
    shuffler: Annotated[
        str | None, typer.Option(help="Where nodes reach it.", metavar="URL", show_default="where the coordinator does")
    ] = None,
    at: Address = COORDINATOR,
) -> None:
    """Write all that nodes must know of a run to one file to hand out; both servers' signatures are checked first."""
    status = _ask(at, "/v1/status")
    from shufflerl.network import roles
    from shufflerl.network.node.reporting import Invitation

    made = Invitation(
        status["task"], shuffler or status["shuffler"], coordinator_key or status["coordinator_key"], shuffler_key
    )
    roles.try_invitation(made)
    made.save(file)


def status(at: Address = COORDINATOR, as_json: AsJson = False) -> None:
    """Tell how a run is doing, and why a batch is not advancing."""
    from shufflerl.privacy.certificate import at_most

    status = _ask(at, "/v1/status")
    if as_json:
        typer.echo(json.dumps(status))
        return
    typer.echo(f"task      {status['task']}")
    typer.echo(
        f"learner   {status['learner']}, {status['episodes_played']:,} of {status['episodes']:,} episodes played"
    )
    typer.echo(
        f"budget    epsilon {at_most(status['epsilon_spent'])} of {status['epsilon_budget']:g} spent, "
        f"delta {status['delta']:g}"
    )
    if status["transport"] is not None:
        typer.echo(
            f"reports   travel as {status['transport']}, noise by {status['noise']}; {status['transport_costs']}"
        )
    typer.echo(f"messages  {status['messages']:,} opened, {status['invalid_messages']:,} left out")
    typer.echo(f"now       {status['why']}")


def policy(at: Address = COORDINATOR, as_json: AsJson = False) -> None:
    """Print the policy a run has deployed last."""
    policy = _ask(at, "/v1/policy")
    if as_json:
        typer.echo(json.dumps(policy))
        return
    from shufflerl.network.demo import policy_text

    typer.echo(f"After {policy['episodes_played']:,} episodes.")
    typer.echo(policy_text(policy))


def _ask(at: str, path: str) -> dict[str, Any]:
    _installed()
    import httpx2

    from shufflerl import checks

    at = checks.web_address("--at", at)
    try:
        answer = httpx2.get(f"{at}{path}", timeout=10.0, trust_env=False)
    except httpx2.HTTPError as reason:
        raise StorageError(f"The coordinator at {at} does not answer ({reason}); is it running? See --at.") from None
    try:
        body: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            raise StorageError(f"The server at {at} refuses: {body['detail']}")
        if "episodes_played" not in body:
            raise LookupError
        return body
    except (ValueError, LookupError, TypeError):  # not JSON, or not what a coordinator says
        raise StorageError(f"What answers at {at} is no coordinator (status {answer.status_code}); see --at.") from None


def transport(
    epsilon: Annotated[float, typer.Option(help="Privacy budget of every user.")],
    delta: Annotated[float, typer.Option(help=DELTA_HELP)] = 1e-5,
    env: Annotated[str | None, typer.Option(help="An environment's counters, instead of a shape's.")] = None,
    horizon: Annotated[int, typer.Option(help="Steps of an episode.")] = 6,
    states: Annotated[int, typer.Option(help="States.")] = 4,
    actions: Annotated[int, typer.Option(help="Actions.")] = 2,
    users: Annotated[int, typer.Option(help="Users in a batch.")] = 1000,
    noise: Annotated[NoiseBy, typer.Option(help="Who adds it.")] = "servers",
    as_json: AsJson = False,
) -> None:
    """Compare what a report costs as sealed tags and as a masked vector, and say from where on which is cheaper."""
    _installed()
    from shufflerl.network.protocol import costs

    figures = costs.compared(epsilon, delta, env=env, shape=(horizon, states, actions), users=users, noise=noise)
    typer.echo(json.dumps(figures) if as_json else costs.as_text(figures))


def demo(
    users: Annotated[
        int | None,
        typer.Option(help="Users, one episode each.", min=30, show_default="5000, or 3000 compared by returns"),
    ] = None,
    env: Annotated[str, typer.Option(help="What they live in, such as riverswim or CartPole-v1.")] = "spectrum",
    learner: Annotated[str | None, typer.Option(help="Learner.", show_default="by the environment")] = None,
    epsilon: Annotated[float, typer.Option(help="Privacy budget of every user.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the learner; noise has none.")] = 0,
    noise: Annotated[NoiseBy, typer.Option(help="Who adds it.")] = "servers",
    transport: Annotated[TransportChoice, typer.Option(help="How reports travel.")] = "tags",
    folder: Annotated[Path | None, typer.Option(help="Keep everything here.", metavar="DIR")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the pages open until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start coordinator, shuffler and a fleet of nodes on this machine, and learn from them."""
    _installed()
    from shufflerl.network import demo as demonstration

    setting = demonstration.chosen(users, env, learner, epsilon=epsilon, seed=seed, transport=transport, noise=noise)

    # Told to end like this too, it ends the processes that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    typer.echo("Starting; the first time, its learner is compiled, which may take a minute.", err=True)

    def started(coordinator: str, shuffler: str) -> None:
        typer.echo(f"Watch it at {coordinator}/ and what the shuffler sees at {shuffler}/", err=True)

    with demonstration.learned(setting, folder, quiet=as_json, started=started) as figures:
        typer.echo(json.dumps(figures) if as_json else demonstration.as_text(figures))
        if keep:
            typer.echo("The pages stay open; Ctrl-C ends them.", err=True)
            ends = {signal.SIGINT, signal.SIGTERM}
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)


COMMANDS = (coordinator, shuffler, node, status, policy, transport, demo, keys, tokens, invitation)
