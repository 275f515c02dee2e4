"""Many nodes in one process, for load and for demonstrations: each has a token, an episode and a report of its own.

Nodes of a fleet share one outbox and one ledger, and processes that play and seal. They answer each batch with as many
nodes as it still wants.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from shufflerl.network.node.composing import check, checked_batch, compose
from shufflerl.network.node.node import Backoff, charge, settled
from shufflerl.network.node.outbox import Outbox, Parcel
from shufflerl.network.node.reporting import Invitation
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Terms
from shufflerl.network.protocol.wire import ProblemError, Reason, Report, State, Upload
from shufflerl.network.stores.commits import GroupCommit
from shufflerl.network.web import contact
from shufflerl.network.workers import pool
from shufflerl.privacy.ledger import Ledger

#: Called with the number of reports that have a verdict.
Progress = Callable[[int], None]


class Fleet:
    """Runs until every token has been used, or the run is over; then `unused` says how many were not needed.

    It also ends if its first tokens are all refused as not issued: the others would be charged for nothing.
    """

    def __init__(
        self,
        env: str,
        parameters: dict[str, Any],
        invitation: Invitation,
        terms: Terms,
        tokens: Sequence[bytes],
        folder: Path,
        *,
        workers: int = 1,
        connections: int = 64,
        poll: float = 0.1,
    ) -> None:
        self._env, self._parameters = env, parameters
        self._invitation, self._terms = invitation, terms
        # A node is its token, wherever that stands in the list: another order must not give it a second turn.
        self._tokens = {crypto.report_id(invitation.task, token).hex(): token for token in tokens}
        self._outbox = Outbox(folder / "outbox.db")
        # Of one run: what nodes have spent in others is not added up here, so another run is refused.
        self._ledger = Ledger(f"fleet in run {invitation.task.hex()}", terms.budget, folder / "ledger.db")
        self._pool = pool(workers)
        self._at_once = connections
        self._kept = GroupCommit(self._keep)
        self._settled = GroupCommit(self._settle)
        self._poll = poll
        self._contact = contact.Contact(invitation.task, invitation.shuffler)
        self.unused, self.over = 0, False
        self.verdicts: Counter[str] = Counter()
        self.uploaded_bytes = 0

    async def run(self, progress: Progress | None = None) -> None:
        """Answer batch after batch; reports of an earlier process that were not delivered go first."""
        task = self._invitation.task
        used = {parcel.node: parcel for parcel in self._outbox.of_run(task)}
        charged = set(self._ledger.releases)  # a node that was charged but has no parcel lost its turn in a crash
        waiting = [node for node in self._tokens if self._charge_name(node) not in charged]
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(
            base_url=self._invitation.shuffler, timeout=contact.TIMEOUT, limits=limits, trust_env=False
        ) as client:
            again = [parcel for parcel in used.values() if parcel.verdict is None]
            if not again and not waiting:
                contact.log.warning("Every token has had its turn in this run; there is nothing to do.")
            await self._all(self._deliver(client, parcel, progress, again=True) for parcel in again)
            backoff = Backoff(first=self._poll, most=2.0)
            self.unused = len(waiting)
            while waiting and set(self.verdicts) != {f"refused: {Reason.unauthorized}"}:
                try:
                    wanted, batch = await self._open_batch(client)
                except (httpx2.HTTPError, ProblemError) as reason:
                    self._contact.failed(reason)
                    await asyncio.sleep(backoff.wait())
                    continue
                self._contact.answered()
                backoff.reset()
                if wanted is None:
                    self.over = True
                    break
                if wanted == 0:
                    await asyncio.sleep(self._poll)
                    continue
                sent, waiting = waiting[:wanted], waiting[wanted:]
                self.unused = len(waiting)
                await self._answer(client, batch, sent, progress)

    async def _open_batch(self, client: httpx2.AsyncClient) -> tuple[int | None, bytes]:
        """How many reports the current batch wants, None if the run is over; and that batch."""
        task = self._invitation.task.hex()
        status = contact.status(await client.get(f"/v1/tasks/{task}/status"))
        if status.state != State.open:
            return None if status.state == State.finished else 0, b""
        return status.users - status.accepted, contact.content(await client.get(f"/v1/tasks/{task}/batch"))

    async def _answer(
        self, client: httpx2.AsyncClient, batch: bytes, nodes: list[str], progress: Progress | None
    ) -> None:
        """Let these nodes take part in a batch: terms, ledger, episode, outbox, delivery."""
        agreement = checked_batch(batch, self._invitation).agreement
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, check, self._env, self._parameters, batch, self._invitation)
        await asyncio.to_thread(self._terms.check, agreement)
        announcement = agreement.announcement
        self._ledger.record_all([self._charge_name(node) for node in nodes], charge(self._terms, agreement))

        async def take_part(node: str) -> None:
            report = await loop.run_in_executor(
                self._pool, compose, self._env, self._parameters, batch, self._invitation, self._tokens[node]
            )
            parcel = Parcel(node, announcement.task, announcement.batch, announcement.attempt, report)
            await self._kept.submit(parcel)
            await self._deliver(client, parcel, progress)

        await self._all(take_part(node) for node in nodes)

    def _charge_name(self, node: str) -> str:
        return f"node {node} in run {self._invitation.task.hex()}"

    async def _keep(self, parcels: list[Parcel]) -> list[None]:
        await asyncio.to_thread(self._outbox.put, parcels)
        return [None] * len(parcels)

    async def _settle(self, verdicts: list[tuple[str, bytes, str]]) -> list[None]:
        await asyncio.to_thread(self._outbox.settle, verdicts)
        return [None] * len(verdicts)

    async def _deliver(
        self, client: httpx2.AsyncClient, parcel: Parcel, progress: Progress | None, *, again: bool = False
    ) -> None:
        """Send until there is a verdict; always the same bytes."""
        assert parcel.report is not None
        report = wire.decode(Report, parcel.report)
        upload = wire.encode(Upload(batch=parcel.batch, attempt=parcel.attempt, reports=[report]))
        backoff = Backoff(most=5.0)
        while True:
            try:
                answer = await client.post(
                    f"/v1/tasks/{parcel.task.hex()}/reports", content=upload, headers={"content-type": wire.MEDIA_TYPE}
                )
                outcome = contact.outcome(answer)
                break
            except (httpx2.HTTPError, ProblemError) as reason:
                self._contact.failed(reason)  # nothing is known of it; the same bytes again
                again = again or contact.may_have_arrived(reason)
            await asyncio.sleep(backoff.wait())
        self._contact.answered()
        verdict = settled(outcome, again=again)
        self.verdicts[verdict] += 1
        self.uploaded_bytes += len(upload)
        await self._settled.submit((parcel.node, parcel.task, verdict))
        if progress is not None:
            progress(sum(self.verdicts.values()))

    async def _all(self, actions: Iterator[Coroutine[Any, Any, None]]) -> None:
        """Do all of it, as many at once as there may be connections."""

        async def one_after_the_other() -> None:
            for action in actions:
                await action

        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(one_after_the_other())

    def close(self) -> None:
        """End the workers and let go of the files."""
        self._pool.shutdown(cancel_futures=True)
        self._outbox.close()
        self._ledger.close()
