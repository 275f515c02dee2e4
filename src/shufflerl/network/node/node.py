"""A node: one user's device. It plays one episode, adds its noise, seals what it says, and says it once.

`Node` is the whole of it for one user:

    env = gymnasium.make("shufflerl.envs.gym:shufflerl/RiverSwim-v0")
    node = Node(env, invitation, Terms(Budget(1.0, 1e-5)), token, folder)
    receipt = node.participate()

What keeps it from its shuffler is told by the logger `shufflerl.network.node`: on standard error, if nothing else is
set.

Before it plays it checks both signatures and computes from the announcement itself what taking part costs. Whether it
reports, and how much it sends, depends on nothing that happened in the episode, nor on the noise it drew.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import httpx2

from shufflerl.errors import ContractError, InvalidInputError, ShuffleRLError
from shufflerl.network.node.outbox import Outbox, Parcel
from shufflerl.network.node.reporting import (
    Checked,
    Environment,
    Invitation,
    check_environment,
    check_signatures,
    from_hex,
    make_report,
    play,
)
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import Terms
from shufflerl.network.protocol.wire import OpenBatch, Outcome, ProblemError, Reason, Report, State, Upload, Verdict
from shufflerl.network.web import contact
from shufflerl.privacy.ledger import Ledger


def take_part(env: Environment, checked: Checked, terms: Terms, token: bytes, ledger: Ledger) -> Report:
    """Check the terms, charge the ledger, and only then play."""
    agreement = checked.agreement
    check_environment(env, agreement)
    terms.check(agreement)
    ledger.record(f"run {agreement.announcement.task.hex()}", terms.charge(agreement), cohort="this node")
    return make_report(checked, play(env, agreement), token)


def settled(outcome: Outcome, *, again: bool) -> str:
    """The verdict to note for an outcome of a report that may have arrived before, or of one that cannot have.

    If it may, a token that is spent was spent by this very report, as nodes make one; if not, by somebody else's.
    """
    if outcome.verdict in (Verdict.accepted, Verdict.duplicate):
        return Verdict.accepted.value
    assert outcome.problem is not None
    reason = outcome.problem.type.rpartition(":")[2]
    return Verdict.accepted.value if again and reason == Reason.replayed else f"refused: {reason}"


class Backoff:
    """Growing waits with random parts, so that many nodes do not come back at once."""

    def __init__(self, first: float = 0.1, limit: float = 30.0) -> None:
        self._first, self._limit, self._next = first, limit, first

    def wait(self) -> float:
        """Seconds to wait now."""
        now, self._next = self._next, min(2 * self._next, self._limit)
        return now * (0.5 + secrets.randbelow(1000) / 1000)

    def reset(self) -> None:
        """It went well."""
        self._next = self._first


@dataclass(frozen=True)
class Receipt:
    """What became of a node's participation."""

    batch: int
    verdict: str


class Node:
    """One user's participation in one run; its folder remembers that, so that it happens once.

    The token is a line that `shufflerl tokens` wrote, or its bytes.
    """

    def __init__(
        self,
        env: Environment,
        invitation: Invitation,
        terms: Terms,
        token: bytes | str,
        folder: Path | str,
        *,
        name: str = "node",
    ) -> None:
        if not isinstance(invitation, Invitation):
            raise InvalidInputError(
                f"The invitation is {invitation!r}; expected an Invitation, such as Invitation.load(FILE)."
            )
        self._env = env
        self._invitation = invitation
        self._terms = terms
        self._token = from_hex("The token", token, wire.TOKEN_BYTES, "shufflerl tokens")
        self._name = name
        self._outbox = Outbox(Path(folder) / "outbox.db")
        self._outbox.check_ledger(Path(folder) / "ledger.db")
        self.ledger = Ledger("node", terms.budget, Path(folder) / "ledger.db")
        self._client = httpx2.Client(base_url=invitation.shuffler, timeout=contact.TIMEOUT, trust_env=False)
        self._contact = contact.Contact(invitation.task, invitation.shuffler)

    def participate(self, *, timeout: float = 3600.0) -> Receipt:
        """Wait for a batch with room that this node is drawn for, play, and report.

        Called again after a crash, it sends what it had prepared.
        Raises `RunOverError` where the run ended without this node.
        """
        deadline = time.monotonic() + timeout
        found = self._outbox.get(self._name, self._invitation.task)
        parcel = self.prepare(self._wait_for_batch(deadline)) if found is None else found
        if parcel.verdict is not None:
            raise ContractError(
                f"This node has taken part in the run already (batch {parcel.batch}, {parcel.verdict}); it "
                "does so once."
            )
        return self.deliver(parcel, deadline, again=found is not None)

    def _wait_for_batch(self, deadline: float) -> Checked:
        backoff = Backoff(limit=5.0)
        task = self._invitation.task.hex()
        offered: Checked | None = None
        while True:
            try:
                status = contact.status(self._client.get(f"/v1/tasks/{task}/status"))
                if status.state == State.finished:
                    raise RunOverError(
                        f"The run is over: batch {status.batch} was its last, and this node was in none. It has "
                        "neither played nor spent anything."
                    )
                trouble = f"batch {status.batch} is {status.state}"
                if status.state == State.open and status.accepted < status.users:
                    # How often it was extended is told unsigned here, and believed as the batch has it, signed.
                    if offered is None or not offered.is_of(status) or offered.extensions < status.extensions:
                        batch = wire.decode(OpenBatch, contact.content(self._client.get(f"/v1/tasks/{task}/batch")))
                        offered = check_signatures(self._invitation, batch)
                    if offered.is_of(status):
                        if offered.draws(self._token):
                            self._contact.answered()
                            return offered
                        trouble = f"{trouble}, and this node is not drawn for it"
                        self._contact.not_drawn(status.batch)
                self._contact.answered()
            except (httpx2.HTTPError, ProblemError) as reason:
                problem = self._contact.failed(reason)
                if problem.reason == Reason.unauthorized:
                    raise
                trouble = problem.detail
            self._pause(backoff, deadline, f"No batch was open in time; the last was: {trouble}")

    def prepare(self, checked: Checked) -> Parcel:
        """Take part; the report is on disk before it is sent."""
        announcement = checked.agreement.announcement
        report = take_part(self._env, checked, self._terms, self._token, self.ledger)
        parcel = Parcel(self._name, announcement.task, announcement.batch, announcement.attempt, wire.encode(report))
        self._outbox.put([parcel])
        return parcel

    def deliver(self, parcel: Parcel, deadline: float, *, again: bool = False) -> Receipt:
        """Send a report until it is answered; `again` if it may have been sent before."""
        assert parcel.report is not None
        report = wire.decode(Report, parcel.report)
        upload = wire.encode(Upload(batch=parcel.batch, attempt=parcel.attempt, reports=[report]))
        backoff = Backoff()
        while True:
            try:
                answer = self._client.post(
                    f"/v1/tasks/{parcel.task.hex()}/reports", content=upload, headers={"content-type": wire.MEDIA_TYPE}
                )
                outcome = contact.outcome(answer)
                self._contact.answered()
                break
            except (httpx2.HTTPError, ProblemError) as reason:
                trouble = self._contact.failed(reason).detail
                again = again or contact.may_have_arrived(reason)
            self._pause(backoff, deadline, f"The report was not delivered in time and is kept; the last was: {trouble}")
        verdict = settled(outcome, again=again)
        if outcome.problem is not None and verdict != Verdict.accepted:
            contact.log.warning("The report for batch %d was refused: %s", parcel.batch, outcome.problem.detail)
        self._outbox.settle([(parcel.node, parcel.task, verdict)])
        return Receipt(parcel.batch, verdict)

    def _pause(self, backoff: Backoff, deadline: float, otherwise: str) -> None:
        wait = backoff.wait()
        if time.monotonic() + wait > deadline:
            raise TimeLimitError(f"{otherwise.removesuffix('.')}. Try again later.")
        time.sleep(wait)

    def close(self) -> None:
        """Let go of the files and the connection."""
        self._client.close()
        self._outbox.close()
        self.ledger.close()


class TimeLimitError(ShuffleRLError):
    """Nothing went wrong, but it did not happen in the time given."""


class RunOverError(ShuffleRLError):
    """The run ended without this node: it has neither played nor spent anything, and there is nothing to wait for."""
