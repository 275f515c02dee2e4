"""The coordinator on HTTP: a task that drives the run against the shuffler, and pages that tell how it is doing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import httpx2
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shufflerl import checks
from shufflerl.errors import ShuffleRLError
from shufflerl.network import faults, logs
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.dashboard import learned
from shufflerl.network.protocol import costs, wire
from shufflerl.network.protocol.agreement import parse_announcement
from shufflerl.network.protocol.wire import Action, BatchStatus, ProblemError, Reason, Signed, State, Transport
from shufflerl.network.web import contact, http
from shufflerl.network.web.owner import Owner
from shufflerl.network.web.watching import LivePage
from shufflerl.policies import describe

#: Seconds after which a failed request is tried again, at first and at most.
FIRST_RETRY, LAST_RETRY = 0.1, 10.0


class CoordinatorServer:
    """Drives one `Coordinator` and answers questions about it."""

    def __init__(self, make: Callable[[], Coordinator], shuffler: str, *, poll: float = 0.5) -> None:
        self._address = checks.web_address("shuffler", shuffler)
        self.owner = Owner("coordinator")
        self.coordinator = self.owner.submit(make).result()  # in the thread that will use it
        self._poll = poll
        self._began, self._started = time.monotonic(), time.time()
        self._shuffler_status: BatchStatus | None = None  # what the shuffler last said
        self._trouble: ProblemError | None = None
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(self))
        self._open_at: float | None = None  # when the pending batch was last seen to be open
        self._seal_to_release: float | None = None  # of the last batch, at most
        self._release_to_learned: float | None = None
        self._status = self.owner.submit(self._summary).result()
        self._learned = self.owner.submit(learned, self.coordinator).result()

    @property
    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/status", self._show_status),
            Route("/v1/policy", self._show_policy),
            Route("/v1/certificate", self._show_certificate),
            Route("/v1/batches", self._show_batches),
            Route("/metrics", self._metrics),
        ]
        return http.application(
            "coordinator",
            routes,
            LivePage("coordinator.html", self.look),
            lambda: self._trouble,
            lambda: self.owner.lifespan(self._drive, self.coordinator.close),
        )

    # Driving the run.

    async def _drive(self) -> None:
        """Step until the run is over; whatever goes wrong is told and tried again."""
        wait = FIRST_RETRY
        async with httpx2.AsyncClient(base_url=self._address, timeout=contact.TIMEOUT, trust_env=False) as client:
            while True:
                try:
                    try:
                        idle = await self.step(client)
                    finally:
                        await self._refresh()
                    wait = FIRST_RETRY
                    self._tell(None)
                except Exception as reason:  # whatever it is, a coordinator that has stopped in silence would be worse
                    self._tell(reason)
                    idle, wait = wait, min(2 * wait, LAST_RETRY)
                await asyncio.sleep(idle)

    async def _refresh(self) -> None:
        self._status = await self.owner.run(self._summary)
        if self._learned["batches"] != self._status["batches_learned"]:
            self._learned = await self.owner.run(learned, self.coordinator)

    def _tell(self, reason: Exception | None) -> None:
        """Note what is in the way, and log it when it begins, changes and ends."""
        before, after = self._trouble, None
        if isinstance(reason, httpx2.HTTPError):
            after = contact.explained(reason, self._address)
        elif reason is not None:
            after = self.coordinator.problem(reason)
        self._trouble = after
        if after is not None and (before is None or before.reason != after.reason):
            unexpected = None if after.reason != Reason.failed or isinstance(reason, ShuffleRLError) else reason
            logs.log.warning("trouble", exc_info=unexpected, extra={"fields": {"detail": after.detail}})
        elif after is None and before is not None:
            logs.event("trouble over")

    async def step(self, client: httpx2.AsyncClient) -> float:
        """One step of the run; returns how long to wait before the next."""
        run = self.coordinator
        for number, attempt, action in await self.owner.run(run.store.unacknowledged):
            faults.reached("acknowledge")
            await self._ask(client, "/v1/scrubs", run.command(number, attempt, action))
            await self.owner.run(run.store.acknowledged, number)
        pending = await self.owner.run(lambda: run.pending)
        if pending is None:
            return self._poll
        number, attempt, announcement = pending
        last = self._shuffler_status
        if last is None or (last.batch, last.attempt) != (number, attempt):
            faults.reached("publish")
            answer = await self._ask(client, "/v1/announcements", announcement)
            logs.event("announced", batch=number, attempt=attempt)
            faults.reached("published")
        else:
            answer = await client.get(f"/v1/tasks/{run.task.hex()}/status")
            _raise_problem(answer)
        self._shuffler_status = status = contact.status(answer)
        if (status.batch, status.attempt) != (number, attempt):
            self._shuffler_status = None  # the shuffler forgot the batch: announce it again
        elif status.state == State.aborted or (status.state == State.released and status.chunks == 0):
            await self.owner.run(partial(run.reopen, filled=status.state == State.released))
            logs.event("announced again", batch=number, attempt=attempt + 1)
        elif status.state == State.released:
            released = time.monotonic()
            chunks = [
                (await self._ask(client, "/v1/releases", run.command(number, attempt, Action.collect, chunk))).content
                for chunk in range(status.chunks)
            ]
            await self.owner.run(run.absorb, chunks)
            self._seal_to_release = None if self._open_at is None else released - self._open_at
            self._release_to_learned, self._open_at = time.monotonic() - released, None
            logs.event("learned", batch=number, users=status.users)
            return 0.0
        elif status.state in (State.open, State.sealed):
            if status.state == State.open:
                self._open_at = time.monotonic()
            _raise_problem(await client.get("/readyz"))  # if its disk is in the way, tell that
            if status.state == State.sealed and parse_announcement(announcement.payload).transport == Transport.sums:
                await self._exclude(client, number, attempt, status.users)
        elif status.state in (State.scrubbed, State.finished):
            raise ProblemError(
                Reason.gone,
                f"The shuffler has scrubbed batch {number}, from which this coordinator has not learned. Was its "
                "folder restored from an old backup? The run cannot go on; begin another with other users.",
            )
        return self._poll

    async def _exclude(self, client: httpx2.AsyncClient, number: int, attempt: int, users: int) -> None:
        """Open the seeds of a sealed batch, once they are there, and tell the shuffler which cannot be opened."""
        run = self.coordinator
        if await self.owner.run(lambda: run.exclusion) is None:
            commands = [
                run.command(number, attempt, Action.seeds, chunk) for chunk in range(-(-users // wire.CHUNK_SEEDS))
            ]
            try:
                chunks = [(await self._ask(client, "/v1/seeds", command)).content for command in commands]
            except ProblemError as problem:
                if problem.reason != Reason.not_released:
                    raise
                return
            await self.owner.run(run.open_seeds, chunks)
        exclusion = await self.owner.run(lambda: run.exclusion)
        assert exclusion is not None
        faults.reached("excluding")
        await self._ask(client, "/v1/exclusions", exclusion)
        faults.reached("excluded")

    async def _ask(self, client: httpx2.AsyncClient, path: str, signed: Signed) -> httpx2.Response:
        answer = await client.post(path, content=wire.encode(signed), headers={"content-type": wire.MEDIA_TYPE})
        _raise_problem(answer)
        return answer

    # What can be asked.

    def _summary(self) -> dict[str, Any]:
        run, pending = self.coordinator, self.coordinator.pending
        agreed = None if pending is None else parse_announcement(pending[2].payload)
        learner, (batches, messages, invalid) = run.learner, run.store.tally()
        return {
            "task": run.task.hex(),
            "coordinator_key": str(run.identity.public),
            "learner": run.run.learner,
            "episodes": learner.problem.episodes,
            "episodes_played": learner.episodes_played,
            "finished": pending is None,
            "batch": None if pending is None else pending[0],
            "attempt": None if pending is None else pending[1],
            "noise": run.run.noise,
            "drawn": None if agreed is None else agreed.drawn,
            "transport": None if agreed is None else agreed.transport,
            "transport_costs": None if agreed is None else costs.in_words(agreed.source),
            "batches_learned": batches,
            "messages": messages,
            "invalid_messages": invalid,
            "epsilon_spent": run.ledger.spent,
            "epsilon_budget": run.run.budget.epsilon,
            "delta": run.run.budget.delta,
        }

    def describe(self) -> dict[str, Any]:
        """The run's status with what holds it up."""
        status = self._shuffler_status
        return self._status | {
            "shuffler": self._address,
            "shuffler_says": None if status is None else msgspec.to_builtins(status),
            "trouble": None if self._trouble is None else self._trouble.detail,
            "why": self._why(),
            "seconds": round(time.monotonic() - self._began, 1),
            "started": self._started,
            "seal_to_release_at_most": self._seal_to_release,
            "release_to_learned": self._release_to_learned,
        }

    async def look(self) -> dict[str, Any]:
        """What the page shows."""
        return {"status": self.describe(), "learned": self._learned}

    def _why(self) -> str:
        """Why the batch is not advancing, in a sentence."""
        status = self._shuffler_status
        if self._trouble is not None:
            return f"The last step failed and is tried again: {self._trouble.detail}"
        if self._status["finished"]:
            return "The run is over: every episode was played."
        if status is None:
            return f"Batch {self._status['batch']} is being announced to the shuffler."
        if status.state == State.open:
            more = f"; it was extended {status.extensions} times" if status.extensions else ""
            share = min(1.0, self._status["drawn"] * 2.0 ** min(status.extensions, 64))
            if share < 1:
                more += f"; {share:.1%} of all users are drawn for it, and twice as many then"
            return (
                f"Batch {status.batch} waits for users: {status.accepted:,} of {status.users:,} reports are in, "
                f"{status.users - status.accepted:,} are missing. In {_lasting(status.seconds_left)} its time is "
                f"up{more}."
            )
        return (
            f"Batch {status.batch} is {status.state}; its {status.users:,} reports are being mixed, opened or counted."
        )

    async def _show_status(self, _: Request) -> Response:
        return http.as_json(self.describe())

    async def _show_policy(self, _: Request) -> Response:
        policy = await self.owner.run(lambda: self.coordinator.policy)
        if policy is None:
            raise ProblemError(Reason.not_found, "No batch has been answered yet, so no policy was deployed.")
        played = self._status["episodes_played"]
        body = {"family": describe(policy.family), "weights": policy.weights.tolist()}
        return http.as_json({"episodes_played": played, **body, "policies": policy.policies.tolist()})

    async def _show_certificate(self, _: Request) -> Response:
        certificate = await self.owner.run(self.coordinator.certificate)
        return http.as_json(certificate.as_dict() | {"text": str(certificate), "spent": self._status["epsilon_spent"]})

    async def _show_batches(self, _: Request) -> Response:
        records = await self.owner.run(lambda: self.coordinator.records)
        body = [
            {
                "batch": record.batch.index,
                "users": record.batch.users,
                "transport": record.transport,
                "messages": record.messages,
                "invalid_messages": record.invalid,
                "noise": record.noise_by,
                "noise_sd": record.noise.sd,
                **record.batch.query.described(),
                "noisy_counts": record.values.tolist(),
            }
            for record in records
        ]
        return http.as_json({"batches": body})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")


class _Figures(Collector):
    def __init__(self, server: CoordinatorServer) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        now = self._server.describe()
        yield GaugeMetricFamily("shufflerl_episodes", "Episodes of the run.", value=now["episodes"])
        yield GaugeMetricFamily("shufflerl_episodes_played", "Episodes learned from.", value=now["episodes_played"])
        yield GaugeMetricFamily("shufflerl_batches_learned", "Batches learned from.", value=now["batches_learned"])
        yield CounterMetricFamily("shufflerl_messages", "Messages opened.", value=now["messages"])
        yield CounterMetricFamily("shufflerl_invalid_messages", "Messages left out.", value=now["invalid_messages"])
        yield GaugeMetricFamily("shufflerl_epsilon_spent", "Privacy spent by any user.", value=now["epsilon_spent"])
        yield GaugeMetricFamily("shufflerl_trouble", "1 while a step fails.", value=now["trouble"] is not None)


def _lasting(seconds: float) -> str:
    """A time to wait, as the page has it: no finer than is of use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _raise_problem(answer: httpx2.Response) -> None:
    try:
        contact.content(answer)
    except ProblemError as problem:
        if problem.reason == Reason.unreachable:
            raise
        raise ProblemError(problem.reason, f"The shuffler refuses: {problem.detail}") from None
