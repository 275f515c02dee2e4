"""Reading what the shuffler answers, and saying what is in the way while it does not: for all who ask it over HTTP."""

from __future__ import annotations

import logging
import time

import httpx2
import msgspec

from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import BatchStatus, Outcome, Outcomes, ProblemDetail, ProblemError, Reason

#: Seconds without a good answer after which a node says so.
PATIENCE = 1.0
#: Seconds to wait for an answer, and for a connection.
TIMEOUT = httpx2.Timeout(60.0, connect=5.0)

log = logging.getLogger("shufflerl.network.node")


def content(answer: httpx2.Response) -> bytes:
    """The body of an answer; a refusal is raised as the problem it is."""
    if answer.status_code == 200:
        return answer.content
    try:
        problem = msgspec.json.decode(answer.content, type=ProblemDetail)
        reason = Reason(problem.type.rpartition(":")[2])
    except (msgspec.DecodeError, ValueError):
        raise _no_shuffler(answer) from None
    if reason in (Reason.not_found, Reason.not_allowed):  # every shuffler has what is asked for
        raise _no_shuffler(answer)
    raise ProblemError(reason, problem.detail)


def status(answer: httpx2.Response) -> BatchStatus:
    """How a batch is doing."""
    try:
        return msgspec.json.decode(content(answer), type=BatchStatus)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _no_shuffler(answer) from None


def outcome(answer: httpx2.Response) -> Outcome:
    """What became of an upload of one report.

    One whose token is not drawn is not settled: it may be when the batch is given more time. So it is a problem, and
    the same bytes are sent again until the batch is over.
    """
    outcomes = wire.decode(Outcomes, content(answer)).outcomes
    if len(outcomes) != 1:
        raise _no_shuffler(answer)
    problem = outcomes[0].problem
    if problem is not None and problem.type.rpartition(":")[2] == Reason.not_drawn:
        raise ProblemError(Reason.not_drawn, problem.detail)
    return outcomes[0]


def _no_shuffler(answer: httpx2.Response) -> ProblemError:
    at = f"{answer.url.scheme}://{answer.url.netloc.decode()}"
    return ProblemError(
        Reason.unreachable,
        f"What answers at {at} is no shuffler, or a proxy that does not reach it (status {answer.status_code}); check "
        "the address.",
    )


def explained(reason: httpx2.HTTPError | ProblemError, at: str) -> ProblemError:
    """What went wrong between us and the shuffler there, as a problem."""
    if isinstance(reason, ProblemError):
        return reason
    why = str(reason) or type(reason).__name__
    return ProblemError(Reason.unreachable, f"The shuffler at {at} cannot be reached ({why}).")


def may_have_arrived(reason: httpx2.HTTPError | ProblemError) -> bool:
    """Whether what was sent may be there though this came back: not if there never was a connection, or no lot."""
    if isinstance(reason, ProblemError):
        return reason.reason != Reason.not_drawn
    return not isinstance(reason, httpx2.ConnectError | httpx2.ConnectTimeout)


class Contact:
    """A node's contact with the shuffler of its run: what is in the way is told once, and when it is over."""

    def __init__(self, task: bytes, at: str) -> None:
        self._task, self._at = task, at
        self._heard = time.monotonic()
        self._warned: Reason | None = None
        self._told_of_lots = False

    def answered(self) -> None:
        """All is well."""
        if self._warned is not None:
            log.warning("The trouble with the shuffler at %s is over.", self._at)
        self._heard, self._warned = time.monotonic(), None

    def failed(self, reason: httpx2.HTTPError | ProblemError) -> ProblemError:
        """It is not, and will be tried again; returns why."""
        problem = explained(reason, self._at)
        if self._warned != problem.reason and time.monotonic() - self._heard > PATIENCE:
            self._warned = problem.reason
            log.warning("%s It is tried again.", self._sentence(problem))
        return problem

    def not_drawn(self, batch: int) -> None:
        """Of a batch that is open none here may take part."""
        if not self._told_of_lots:
            self._told_of_lots = True
            log.warning("No token left here is drawn for batch %d; users are drawn by lot, for each batch anew.", batch)

    def _sentence(self, problem: ProblemError) -> str:
        if problem.reason == Reason.unreachable:
            return problem.detail
        if problem.reason == Reason.unknown_batch:
            return (
                f"The shuffler at {self._at} knows no batch of run {self._task.hex()}: the first is not announced yet, "
                "or the invitation is of another run."
            )
        return f"The shuffler at {self._at} refuses: {problem.detail}"
