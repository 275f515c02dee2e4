"""The shuffler on HTTP. One thread owns the state machine and its file; requests queue for it and commit in groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shufflerl.errors import StorageError
from shufflerl.network import logs
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import Outcome, Outcomes, ProblemError, Reason, Report, Signed, Upload
from shufflerl.network.shuffler import dummies
from shufflerl.network.shuffler.shuffler import Shuffler
from shufflerl.network.stores.commits import GroupCommit
from shufflerl.network.stores.store import Store
from shufflerl.network.web import http
from shufflerl.network.web.owner import Owner
from shufflerl.network.web.watching import LivePage
from shufflerl.network.workers import pool

#: Uploads that may wait for the disk; more are sent away to try again.
MAX_QUEUED = 20_000
#: Bytes of them.
MAX_QUEUED_BYTES = 256 * 2**20
#: Seconds between looks at the clock.
TICK = 1.0
#: By how much sealing dummies is nicer than taking reports: they are needed when the batch is full, reports now.
NICENESS = 5
#: Bytes of an announcement or command.
MAX_COMMAND = 64 * 2**20


class ShufflerServer:
    """Answers requests about one `Shuffler`."""

    def __init__(self, shuffler: Shuffler, store: Store, *, max_body: int = 32 * 2**20, workers: int = 1) -> None:
        self._shuffler = shuffler
        self._store = store
        self._max_body = max_body
        self.owner = Owner("shuffler")
        self._uploads = GroupCommit(self._commit)
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._announced = asyncio.Event()
        self._workers = workers
        self._sealers = pool(workers, NICENESS)  # processes begin when there is something to seal
        self._started = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(shuffler, self._uploads))
        self._commit_seconds = Histogram(
            "shufflerl_commit_seconds", "Time to validate and store a group of uploads.", registry=self._registry
        )

    @property
    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/tasks/{task}/batch", self._batch),
            Route("/v1/tasks/{task}/status", self._status),
            Route("/v1/tasks/{task}/reports", self._reports, methods=["POST"]),
            Route("/v1/announcements", self._announce, methods=["POST"]),
            Route("/v1/seeds", self._seeds, methods=["POST"]),
            Route("/v1/exclusions", self._exclude, methods=["POST"]),
            Route("/v1/releases", self._release, methods=["POST"]),
            Route("/v1/scrubs", self._scrub, methods=["POST"]),
            Route("/metrics", self._metrics),
        ]
        return http.application(
            "shuffler",
            routes,
            LivePage("shuffler.html", self.look),
            self._trouble,
            lambda: self.owner.lifespan(self._work, self._store.close),
        )

    async def _work(self) -> None:
        """Bring batches on, and seal dummies in other processes, so that uploads need not wait for it."""
        try:
            await asyncio.gather(self._tick(), *(self._seal() for _ in range(self._workers)))
        finally:
            self._sealers.shutdown(cancel_futures=True)

    async def _seal(self) -> None:
        """Seal the dummies of announced batches, slice by slice; what goes wrong is tried again."""
        while True:
            try:
                while await self._seal_slice():
                    pass
                self._wake.set()  # a full batch may have waited for its dummies
            except BrokenExecutor:
                logs.log.warning("a process that seals dummies has died; others are started")
                self._sealers = pool(self._workers, NICENESS)
            except StorageError:
                pass  # `trouble` tells it
            except Exception:  # nor may this end in silence: no batch would be released any more
                logs.log.exception("dummies could not be sealed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._announced.wait(), TICK)
            self._announced.clear()

    async def _seal_slice(self) -> bool:
        """Seal one slice; says if there was one to seal."""
        job = await self.owner.run(self._shuffler.next_dummies)
        if job is None:
            return False
        id, payload, number = job
        tags = await asyncio.get_running_loop().run_in_executor(self._sealers, dummies.sealed, payload, number)
        await self.owner.run(self._shuffler.add_dummies, id, number, tags)
        return True

    async def _tick(self) -> None:
        """Release full batches at once and look after overdue ones; disk trouble is tried again."""
        trouble: str | None = None
        while True:
            try:
                await self.owner.run(partial(self._shuffler.advance, seal=False))
            except Exception:  # `trouble` tells it; a shuffler that has stopped mixing in silence would be worse
                logs.log.exception("a look at the batches failed")
            if self._shuffler.trouble != trouble:
                trouble = self._shuffler.trouble
                logs.event("trouble" if trouble else "trouble over", detail=trouble)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK)
            self._wake.clear()

    # Nodes.

    async def _batch(self, request: Request) -> Response:
        return http.message(await self.owner.run(self._shuffler.current, _task(request)))

    async def _status(self, request: Request) -> Response:
        return http.as_json(await self.owner.run(self._shuffler.status, _task(request)))

    async def _reports(self, request: Request) -> Response:
        self._check_queue(0)
        try:
            task = _task(request)
            body = await http.read_body(request, self._max_body)
            upload = wire.decode(Upload, body)
        except ProblemError as problem:
            self._shuffler.refused[problem.reason] += 1
            raise
        self._check_queue(len(body))
        self._queued_bytes += len(body)
        try:
            return http.message(Outcomes(outcomes=await self._uploads.submit((task, upload))))
        finally:
            self._queued_bytes -= len(body)

    def _check_queue(self, more: int) -> None:
        if self._uploads.queued >= MAX_QUEUED or self._queued_bytes + more > MAX_QUEUED_BYTES:
            raise ProblemError(Reason.busy, "Too many uploads wait for the disk; send the same bytes again later.")

    async def _commit(self, group: list[tuple[bytes, Upload]]) -> list[list[Outcome]]:
        with self._commit_seconds.time():
            outcomes = await self.owner.run(self._store_uploads, group)
        self._wake.set()
        return outcomes

    def _store_uploads(self, group: list[tuple[bytes, Upload]]) -> list[list[Outcome]]:
        reports: dict[bytes, list[tuple[int, int, Report]]] = {}
        for task, upload in group:
            reports.setdefault(task, []).extend((upload.batch, upload.attempt, report) for report in upload.reports)
        outcomes = {task: iter(self._shuffler.upload(task, sent)) for task, sent in reports.items()}
        return [[next(outcomes[task]) for _ in upload.reports] for task, upload in group]

    # The coordinator.

    async def _announce(self, request: Request) -> Response:
        status = await self.owner.run(self._shuffler.announce, await _signed(request))
        self._announced.set()
        logs.event("announced", batch=status.batch, attempt=status.attempt, users=status.users, state=status.state)
        return http.as_json(status)

    async def _seeds(self, request: Request) -> Response:
        seeds = await self.owner.run(self._shuffler.seeds, await _signed(request))
        return Response(seeds, media_type="application/octet-stream")

    async def _exclude(self, request: Request) -> Response:
        status = await self.owner.run(self._shuffler.exclude, await _signed(request))
        self._wake.set()
        return http.as_json(status)

    async def _release(self, request: Request) -> Response:
        tags = await self.owner.run(self._shuffler.collect, await _signed(request))
        return Response(tags, media_type="application/octet-stream")

    async def _scrub(self, request: Request) -> Response:
        status = await self.owner.run(self._shuffler.scrub, await _signed(request))
        logs.event(status.state, batch=status.batch)
        return http.as_json(status)

    # Operators.

    def _trouble(self) -> ProblemError | None:
        detail = self._shuffler.trouble
        return None if detail is None else ProblemError(Reason.storage, detail)

    async def look(self) -> dict[str, Any]:
        """What the page shows: states and sums, nothing of any one report."""
        shuffler, seconds = self._shuffler, self._shuffler.release_seconds
        view = {
            "started": self._started,
            "batches": await self.owner.run(shuffler.unfinished),
            "accepted": shuffler.accepted,
            "refused": dict(sorted(shuffler.refused.items())),
            "queued": self._uploads.queued,
            # As announced: how many there are, or how fast they come, would tell the coordinator of its noise.
            "dummies": await self.owner.run(shuffler.expected_dummies),
            "released": len(seconds),
            "release_seconds": seconds[-1] if seconds else None,
            "trouble": shuffler.trouble,
        }
        return {"status": view}

    async def _metrics(self, _: Request) -> Response:
        text = await self.owner.run(generate_latest, self._registry)
        return Response(text, media_type="text/plain; version=0.0.4")


class _Figures(Collector):
    """The state machine's own counters, read when they are asked for."""

    def __init__(self, shuffler: Shuffler, uploads: GroupCommit) -> None:
        self._shuffler, self._uploads = shuffler, uploads

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        yield CounterMetricFamily("shufflerl_reports_accepted", "Reports accepted.", value=self._shuffler.accepted)
        refused = CounterMetricFamily("shufflerl_reports_refused", "Reports refused, by reason.", labels=["reason"])
        for reason, count in sorted(self._shuffler.refused.items()):
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily("shufflerl_uploads_queued", "Uploads that wait.", value=self._uploads.queued)
        batches = GaugeMetricFamily("shufflerl_batch_reports", "Reports in unfinished batches.", labels=["what"])
        unfinished = self._shuffler.unfinished()
        batches.add_metric(["accepted"], sum(batch.accepted for batch in unfinished))
        batches.add_metric(["wanted"], sum(batch.users for batch in unfinished))
        yield batches
        yield GaugeMetricFamily(
            "shufflerl_trouble", "1 while the disk gives trouble.", value=bool(self._shuffler.trouble)
        )


def _task(request: Request) -> bytes:
    return wire.task_from_text(request.path_params["task"])


async def _signed(request: Request) -> Signed:
    return wire.decode(Signed, await http.read_body(request, MAX_COMMAND))
