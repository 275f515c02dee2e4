"""Putting each role together from its configuration and running it until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from shufflerl.network import http
from shufflerl.network.config import CoordinatorConfig, NodeConfig, ShufflerConfig, address
from shufflerl.network.crypto import Enrolment, SigningKey, VerifyKey, write_secret


def say(**fields: Any) -> None:
    """One JSON object on standard output, for whoever started this process."""
    print(json.dumps(fields), flush=True)


def run_shuffler(config: ShufflerConfig) -> None:
    """Serve the shuffler."""
    from shufflerl.network.shuffler import Shuffler
    from shufflerl.network.shuffler_app import ShufflerServer
    from shufflerl.network.store import SQLiteStore

    folder = Path(config.folder)
    identity = SigningKey.load(folder / "identity.pem")
    store = SQLiteStore(folder / "shuffler.db")
    shuffler = Shuffler(
        store,
        identity,
        VerifyKey.from_text(config.coordinator_key),
        Enrolment.load(folder / "enrolment.key"),
        config.limits,
    )
    app = ShufflerServer(shuffler, store).app
    key = str(identity.public)
    http.serve(app, *address(config.listen), lambda port: say(role="shuffler", port=port, key=key))


def run_coordinator(config: CoordinatorConfig) -> None:
    """Serve the coordinator and drive its run."""
    from shufflerl.network.coordinator import Coordinator
    from shufflerl.network.coordinator_app import CoordinatorServer
    from shufflerl.network.opening import Opener

    run, folder = config.run, Path(config.folder)
    server = CoordinatorServer(
        lambda: Coordinator(folder, run, Opener(config.workers)), config.shuffler, poll=config.poll_seconds
    )
    about = server.describe()
    http.serve(
        server.app,
        *address(config.listen),
        lambda port: say(role="coordinator", port=port, key=about["coordinator_key"], task=about["task"]),
    )


def run_nodes(config: NodeConfig) -> None:
    """Let one node per token take part, and say what became of them."""
    from shufflerl.network.fleet import Fleet

    fleet = Fleet(
        config.environment,
        config.environment_parameters,
        config.invitation,
        config.terms,
        config.read_tokens(),
        Path(config.folder),
        workers=config.workers,
        poll=config.poll_seconds,
    )

    async def run() -> None:
        await fleet.run()

    try:
        asyncio.run(run())
    finally:
        fleet.close()
    say(role="node", verdicts=fleet.verdicts, uploaded_bytes=fleet.messages_bytes, peak_mb=peak_memory(config.workers))


def mint_tokens(folder: Path, count: int, path: Path) -> None:
    """Write tokens for so many users, readable by the owner only."""
    enrolment = Enrolment.load(folder / "enrolment.key")
    write_secret(path, "".join(f"{enrolment.mint().hex()}\n" for _ in range(count)).encode())


def peak_memory(workers: int) -> float:
    """The most memory this process and its workers, which have ended, can have had together, in MB."""
    import resource

    scale = 2**20 if sys.platform == "darwin" else 2**10
    own, worker = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round((own + workers * worker) / scale, 1)
