"""Putting each role together from its configuration and running it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shufflerl.errors import InvalidInputError, MissingExtraError, ShuffleRLError, StateMismatchError
from shufflerl.network import logs
from shufflerl.network.config import CoordinatorConfig, NodeConfig, ShufflerConfig, address
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.crypto import SigningKey, VerifyKey, mint, write_secret
from shufflerl.network.protocol.wire import ProblemError, Reason, Verdict
from shufflerl.network.web import contact

if TYPE_CHECKING:
    from shufflerl.network.node.fleet import Fleet
    from shufflerl.network.node.reporting import Invitation
    from shufflerl.network.stores.store import Store

#: The key by which users are enrolled, in the folder of whoever does so.
ENROLMENT = "enrolment.pem"


def say(**fields: Any) -> None:
    """One JSON object on standard output, for whoever started this process."""
    print(json.dumps(fields), flush=True)


def own_folder(path: str, other: str) -> Path:
    """The role's folder; refused if the other role lives there, as one folder with both would undo the mixing."""
    folder = Path(path)
    if (folder / f"{other}.db").exists():
        raise StateMismatchError(f"{folder} is the folder of a {other}; keep the two apart, and use another folder.")
    return folder


@contextlib.contextmanager
def telling_what_is_new(*secrets: Path) -> Iterator[None]:
    """Say which of these files are made: in a mistyped folder a role is somebody else, or has spent nothing."""
    missing = [path for path in secrets if not path.exists()]
    yield
    for path in missing:
        if path.exists():
            logs.log.warning("There was no %s: a new one is made.", path)


def run_shuffler(config: ShufflerConfig) -> None:
    """Serve the shuffler."""
    from shufflerl.network.shuffler.app import ShufflerServer
    from shufflerl.network.shuffler.shuffler import Shuffler
    from shufflerl.network.web import http

    logs.to_standard_error()
    folder = own_folder(config.folder, "coordinator")
    with http.listening(*address(config.listen)) as sockets:
        with telling_what_is_new(folder / "identity.pem", folder / ENROLMENT):
            identity, enrolment = SigningKey.load(folder / "identity.pem"), _enrolment(config, folder)
        store = _shuffler_store(config, folder)
        shuffler = Shuffler(store, identity, VerifyKey.from_text(config.coordinator_key), enrolment, config.limits)
        app = ShufflerServer(shuffler, store, workers=config.workers).app
        key = str(identity.public)
        http.serve(app, sockets, lambda port: say(role="shuffler", port=port, key=key))


def _enrolment(config: ShufflerConfig, folder: Path) -> VerifyKey:
    """What verifies tokens: the key that was told; without one, that of a key of its own."""
    if config.enrolment_key is not None:
        return VerifyKey.from_text(config.enrolment_key)
    return SigningKey.load(folder / ENROLMENT).public


def _shuffler_store(config: ShufflerConfig, folder: Path) -> Store:
    if config.store is None:
        from shufflerl.network.stores.store import SQLiteStore

        return SQLiteStore(folder / "shuffler.db")
    if (folder / "shuffler.db").exists():
        raise StateMismatchError(
            f"{folder} has a shuffler.db, whose spent tokens the servers in `store` do not know; use another folder "
            "with its own enrolment.pem, or no `store`."
        )
    try:
        from shufflerl.network.stores.nats_store import NatsStore
    except ImportError:
        raise MissingExtraError("NATS is not installed; install it with: pip install 'shufflerl[nats]'") from None
    files = (config.store_credentials, config.store_authority)
    credentials, authority = (None if path is None else Path(path) for path in files)
    return NatsStore(config.store, credentials=credentials, authority=authority)


def run_coordinator(config: CoordinatorConfig) -> None:
    """Serve the coordinator and drive its run."""
    from shufflerl.network.coordinator.app import CoordinatorServer
    from shufflerl.network.coordinator.coordinator import Coordinator
    from shufflerl.network.coordinator.opening import Opener
    from shufflerl.network.web import http

    logs.to_standard_error()
    run, folder = config.run, own_folder(config.folder, "shuffler")
    with http.listening(*address(config.listen)) as sockets:
        with telling_what_is_new(folder / "identity.pem", folder / "ledger.db"):
            server = CoordinatorServer(
                lambda: Coordinator(folder, run, Opener(config.workers)), config.shuffler, poll=config.poll_seconds
            )
        about = server.describe()
        http.serve(
            server.app,
            sockets,
            lambda port: say(role="coordinator", port=port, key=about["coordinator_key"], task=about["task"]),
        )


def run_nodes(config: NodeConfig) -> None:
    """Let one node per token take part, and say what became of them."""
    from shufflerl.network.node.fleet import Fleet

    logging.basicConfig(format="shufflerl: %(message)s")
    config.check_environment()
    with telling_what_is_new(Path(config.folder) / "ledger.db"):
        fleet = Fleet(
            config.environment,
            config.environment_parameters,
            config.read_invitation(),
            config.terms,
            config.read_tokens(),
            Path(config.folder),
            workers=config.workers,
            poll=config.poll_seconds,
        )

    try:
        asyncio.run(_until_stopped(fleet))
        peak = peak_memory(os.getpid())
    finally:
        fleet.close()
    say(
        role="node",
        verdicts=fleet.verdicts,
        unused_tokens=fleet.unused,
        charged_without_report=fleet.lost,
        uploaded_bytes=fleet.uploaded_bytes,
        peak_mb=peak,
    )
    _conclude(fleet)


def _conclude(fleet: Fleet) -> None:
    """Tell what was refused or lost, an error: its users were charged and not counted. Tokens left over are none."""
    refused = Counter({how: count for how, count in fleet.verdicts.items() if how != Verdict.accepted})
    if fleet.undelivered:
        contact.log.warning(
            "%s reports are not delivered; they are kept, and sent when it is started again.", f"{fleet.undelivered:,}"
        )
    troubles = []
    if fleet.lost:
        troubles.append(f"{fleet.lost:,} tokens were charged without a report: they have had their turn.")
    if refused:
        reasons = [(how.removeprefix("refused: "), count) for how, count in refused.most_common()]
        titles = {str(reason): f"{ProblemError(reason, '').problem.title}: see" for reason in Reason}
        first = reasons[0][0]
        troubles.append(
            f"{refused.total():,} of {fleet.verdicts.total():,} reports were refused "
            f"({', '.join(f'{count:,} as {reason}' for reason, count in reasons)}), {fleet.unused:,} tokens are left. "
            f"{titles.get(first, 'See')} docs/errors/{first}.md."
        )
    if troubles:
        raise ShuffleRLError(" ".join(troubles))
    if fleet.over:
        contact.log.warning(
            "The run is over: %s tokens were not needed; their users neither played nor spent.", f"{fleet.unused:,}"
        )


async def _until_stopped(fleet: Fleet) -> None:
    """Run the fleet until its tokens are used or it is told to stop; told twice, it does not finish what it began."""
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None

    def stop() -> None:
        if fleet.stopped:
            running.cancel()
        fleet.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await fleet.run()
    except asyncio.CancelledError:
        pass
    except ExceptionGroup as several:  # of nodes that failed alike, one tells enough
        if (known := several.subgroup(ShuffleRLError)) is not None:
            raise known.exceptions[0] from None
        raise


def try_invitation(invitation: Invitation) -> None:
    """See that the shuffler offers a batch of this run, signed by both keys: any other is refused by every node."""
    import httpx2

    from shufflerl.network.node.reporting import check_signatures

    path = f"{invitation.shuffler}/v1/tasks/{invitation.task.hex()}/batch"
    try:
        answer = httpx2.get(path, timeout=contact.TIMEOUT, trust_env=False)
        check_signatures(invitation, wire.decode(wire.OpenBatch, contact.content(answer)))
    except httpx2.HTTPError as reason:
        raise contact.explained(reason, invitation.shuffler) from None


def mint_tokens(folder: Path, count: int, path: Path) -> None:
    """Write tokens for so many users, readable by the owner only."""
    if not (key := folder / ENROLMENT).exists():
        raise InvalidInputError(
            f"There is no enrolment key {key}; expected the folder of whoever enrols users, which is the shuffler's "
            f"unless its settings have an `enrolment_key`. To make a new key: shufflerl keys --enrolment {folder}"
        )
    enrolment = SigningKey.load(key)
    write_secret(path, "".join(f"{mint(enrolment).hex()}\n" for _ in range(count)).encode())


def peak_memory(process: int) -> float | None:
    """The most memory a process and its workers have had, in MB; None where the kernel does not tell.

    Libraries are mapped from their files into all of them and are in memory once: they are counted for one.
    """
    kilobytes = 0
    with contextlib.suppress(OSError, KeyError):  # a process that has just ended has no sizes
        workers = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for one in (str(process), *workers):
            lines = (line.split() for line in Path(f"/proc/{one}/status").read_text().splitlines())
            sizes = {line[0]: int(line[1]) for line in lines if line[0] in ("VmHWM:", "RssFile:")}
            kilobytes += sizes["VmHWM:"] - (sizes["RssFile:"] if one in workers else 0)
    return round(kilobytes / 1024, 1) or None
