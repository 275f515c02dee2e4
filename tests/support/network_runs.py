"""Whole runs in one process, and what all parties refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.dashboard import learned
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node.reporting import Checked, make_report, play
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Agreement, parse_announcement
from shufflerl.network.protocol.wire import Action, Announcement, ProblemError, Reason, Transport
from tests.support.network_world import World


def refused_everywhere(said: Announcement, sentence: str) -> None:
    """Shuffler and node refuse what makes no sense, in one line."""
    world = World()
    world.task = said.task
    signed = world.coordinator.sign(said)
    for receive in (lambda: parse_announcement(signed.payload), lambda: world.shuffler.announce(signed)):
        with pytest.raises(ProblemError, match=sentence) as refused:
            receive()
        assert refused.value.reason == Reason.malformed
        assert "\n" not in refused.value.detail


def length_of_report(agreed: Agreement, episode: Any) -> int:
    """How long a node's report of an episode is."""
    checked = Checked(agreed, crypto.new_box_key().public_key().public_bytes_raw())
    return len(make_report(checked, episode, bytes(wire.TOKEN_BYTES)).envelope)


class System:
    """A coordinator, a shuffler, and nodes who play an environment, in one process."""

    def __init__(self, folder: Path, run: Run, env: Any) -> None:
        self.folder, self.run, self.env = folder, run, env
        self.coordinator = Coordinator(folder, run)
        self.world = World()
        self.world.coordinator, self.world.task = self.coordinator.identity, self.coordinator.task
        self.world.restart()

    def learn(self) -> None:
        """One batch: announced, played, mixed or added up, learned from."""
        assert self.coordinator.pending is not None
        number, attempt, signed = self.coordinator.pending
        self.world.shuffler.announce(signed)
        checked = self.world.checked()
        reports = [
            make_report(checked, play(self.env, checked.agreement), self.world.mint())
            for _ in range(checked.agreement.batch.users)
        ]
        assert {len(report.envelope) for report in reports} == {checked.agreement.envelope_bytes}
        assert not any(outcome.problem for outcome in self.world.upload(*reports, number=number, attempt=attempt))
        assert self.world.shuffler.advance()
        if checked.agreement.transport == Transport.sums:
            self.coordinator.open_seeds(
                [self.world.shuffler.seeds(self.coordinator.command(number, attempt, Action.seeds))]
            )
            assert self.coordinator.exclusion is not None
            self.world.shuffler.exclude(self.coordinator.exclusion)
            assert self.world.shuffler.advance()
        self.coordinator.absorb([self.world.collect(number, attempt)])
        self.world.scrub(number, attempt)

    def restart(self) -> None:
        self.coordinator.close()
        self.coordinator = Coordinator(self.folder, self.run)

    def learn_all(self) -> dict[str, Any]:
        """A replay of the releases is the learner that was told them, after restarts too; what the page shows."""
        try:
            replayed = self.run.make_learner()
            while self.coordinator.pending is not None:
                self.learn()
                self.restart()
                replayed.next_batch()
                replayed.observe(self.coordinator.records[-1].release)
            replayed.next_batch()
            assert self.coordinator.learner.save() == replayed.save()
            assert self.coordinator.policy == replayed.deployed
            told = learned(self.coordinator)
            assert told == msgspec.json.decode(msgspec.json.encode(told))
            certificate = self.coordinator.certificate()
            assert certificate.changed_counters == 2
            assert self.coordinator.ledger.spent <= certificate.epsilon <= 8.0
        finally:
            self.coordinator.close()
        return told
