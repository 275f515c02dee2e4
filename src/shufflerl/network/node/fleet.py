"""Many nodes in one process, for load and for demonstrations: each has a token, an episode and a report of its own.

Nodes of a fleet share one outbox and one ledger, and processes that play and seal. They answer each batch with as many
nodes as it still wants, of those that are drawn for it. These are charged in small groups just before they play: told
to stop, a fleet charges no others and finishes what it began.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from shufflerl.errors import LostWorkersError
from shufflerl.network.node.composing import check, checked_batch, compose
from shufflerl.network.node.node import Backoff, settled
from shufflerl.network.node.outbox import Outbox, Parcel
from shufflerl.network.node.reporting import Checked, Invitation
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Terms
from shufflerl.network.protocol.wire import BatchStatus, ProblemError, Reason, Report, State, Upload
from shufflerl.network.stores.commits import GroupCommit
from shufflerl.network.web import contact
from shufflerl.network.workers import pool
from shufflerl.privacy.ledger import Charge, Ledger

#: The most nodes that are charged at once, for each worker: a commit takes as long as a report or two.
GROUP = 8
#: Called with the number of reports that have a verdict.
Progress = Callable[[int], None]

Result = TypeVar("Result")


class Fleet:
    """Runs until every token has been used, or the run is over; then `unused` says how many were not needed.

    It also ends if its first tokens are all refused as not issued: the others would be charged for nothing. Once it has
    ended, `lost` nodes were charged and have no report, and `undelivered` reports wait in the outbox.
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
        self._outbox.check_ledger(folder / "ledger.db")
        # Of one run: what nodes have spent in others is not added up here, so another run is refused.
        self.ledger = Ledger(f"fleet in run {invitation.task.hex()}", terms.budget, folder / "ledger.db")
        self._pool = pool(workers)
        self._workers, self._at_once = workers, connections
        self._kept = GroupCommit(self._keep)
        self._settled = GroupCommit(self._settle)
        self._poll = poll
        self._contact = contact.Contact(invitation.task, invitation.shuffler)
        self._waiting: dict[str, None] = {}  # in order
        self._looking: asyncio.Task[tuple[list[str], bytes] | None] | None = None
        self.stopped = self.over = False
        self.lost = self.undelivered = 0
        self.verdicts: Counter[str] = Counter()
        self.uploaded_bytes = 0

    async def run(self, progress: Progress | None = None) -> None:
        """Answer batch after batch; reports of an earlier process that were not delivered go first."""
        task = self._invitation.task
        used = {parcel.node: parcel for parcel in self._outbox.of_run(task)}
        charged = set(self.ledger.releases)
        self._waiting = {node: None for node in self._tokens if self._charge_name(node) not in charged}
        if crashed := len(self._tokens) - len(self._waiting) - len(used.keys() & self._tokens.keys()):
            contact.log.warning(
                "%s tokens were charged by a process that was killed before their reports were on disk; they have had "
                "their turn.",
                f"{crashed:,}",
            )
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(
            base_url=self._invitation.shuffler, timeout=contact.TIMEOUT, limits=limits, trust_env=False
        ) as client:
            again = [parcel for parcel in used.values() if parcel.verdict is None]
            if not again and not self._waiting:
                contact.log.warning("Every token has had its turn in this run; there is nothing to do.")
            self.undelivered = len(again)
            await self._all(self._deliver(client, parcel, progress, again=True) for parcel in again)
            while self._waiting and self._begins:
                self._looking = asyncio.create_task(self._wanted(client))
                try:
                    found = await self._looking
                except asyncio.CancelledError:
                    if not self.stopped:
                        raise
                    break
                if found is None:
                    self.over = True
                    break
                await self._answer(client, *found, progress)

    def stop(self) -> None:
        """Let no other node begin. Those who were charged play; a report that cannot be sent now is kept."""
        self.stopped = True
        if self._looking is not None:
            self._looking.cancel()

    @property
    def unused(self) -> int:
        """Tokens that were not charged."""
        return len(self._waiting)

    @property
    def _begins(self) -> bool:
        """Whether other nodes may begin: not when told to stop, nor after refusals as not issued alone."""
        return not self.stopped and set(self.verdicts) != {f"refused: {Reason.unauthorized}"}

    async def _wanted(self, client: httpx2.AsyncClient) -> tuple[list[str], bytes] | None:
        """Wait for a batch that wants reports of nodes here: which, and the batch; None if the run is over."""
        backoff = Backoff(first=self._poll, limit=2.0)
        task, in_vain = self._invitation.task.hex(), None
        while True:
            try:
                status = contact.status(await client.get(f"/v1/tasks/{task}/status"))
                # Who was not drawn stays so until there is another batch, or this one is given more time.
                batch = b""
                this = (status.batch, status.attempt, status.extensions)
                if status.state == State.open and status.accepted < status.users and this != in_vain:
                    batch = contact.content(await client.get(f"/v1/tasks/{task}/batch"))
            except (httpx2.HTTPError, ProblemError) as reason:
                self._contact.failed(reason)
                await asyncio.sleep(backoff.wait())
                continue
            self._contact.answered()
            backoff.reset()
            if status.state == State.finished:
                return None
            if batch:
                checked = checked_batch(batch, self._invitation)
                if drawn := self._drawn(status, checked):
                    return drawn, batch
                in_vain = (*this[:2], checked.extensions)  # as they were drawn, not as the status has it unsigned
            await asyncio.sleep(self._poll)

    def _drawn(self, status: BatchStatus, checked: Checked) -> list[str]:
        """As many nodes as the batch still wants, of those that are drawn for it."""
        if not checked.is_of(status):  # it is over already
            return []
        drawn = (node for node in self._waiting if checked.draws(self._tokens[node]))
        if not (some := list(itertools.islice(drawn, status.users - status.accepted))):
            self._contact.not_drawn(status.batch)
        return some

    async def _answer(
        self, client: httpx2.AsyncClient, nodes: list[str], batch: bytes, progress: Progress | None
    ) -> None:
        """Let these nodes take part in a batch: terms, ledger, episode, outbox, delivery."""
        agreement = checked_batch(batch, self._invitation).agreement
        await self._at_work(check, self._env, self._parameters, batch, self._invitation)
        await asyncio.to_thread(self._terms.check, agreement)
        announcement = agreement.announcement
        charged = self._charged(nodes, self._terms.charge(agreement))
        playing = asyncio.Semaphore(2 * self._workers)  # what keeps the workers busy, and is soon done

        async def take_turns() -> None:
            while True:
                async with playing:
                    if (node := next(charged, None)) is None:
                        return
                    report = await self._at_work(
                        compose, self._env, self._parameters, batch, self._invitation, self._tokens[node]
                    )
                    parcel = Parcel(node, announcement.task, announcement.batch, announcement.attempt, report)
                    await self._kept.submit(parcel)
                    self.lost, self.undelivered = self.lost - 1, self.undelivered + 1
                await self._deliver(client, parcel, progress)

        await self._all(take_turns() for _ in range(self._at_once))

    async def _at_work(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Let a worker do it."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        except BrokenExecutor:
            raise LostWorkersError(
                "A worker has died; was there too little memory? Those it played for were charged and have had their "
                "turn. Use fewer workers and start the nodes again: the others go on."
            ) from None

    def _charged(self, nodes: list[str], cost: Charge) -> Iterator[str]:
        """These nodes, each to play at once: charged in growing groups, when the first of a group is asked for."""
        for size in itertools.chain((2,), itertools.repeat(GROUP * self._workers)):
            group, nodes = (nodes[:size], nodes[size:]) if self._begins else ([], [])
            if not group:
                return
            self.ledger.record_all([self._charge_name(node) for node in group], cost)
            for node in group:
                del self._waiting[node]
            self.lost += len(group)
            yield from group

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
        """Send until there is a verdict, always the same bytes; when told to stop, until that does not go well."""
        assert parcel.report is not None
        report = wire.decode(Report, parcel.report)
        upload = wire.encode(Upload(batch=parcel.batch, attempt=parcel.attempt, reports=[report]))
        backoff = Backoff(limit=5.0)
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
            if self.stopped:
                return
            await asyncio.sleep(backoff.wait())
        self._contact.answered()
        verdict = settled(outcome, again=again)
        self.verdicts[verdict] += 1
        self.uploaded_bytes += len(upload)
        await self._settled.submit((parcel.node, parcel.task, verdict))
        self.undelivered -= 1
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
        self.ledger.close()
