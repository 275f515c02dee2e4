"""Five weaknesses that were found on the wire, each tried against noise by users and by servers.

docs/security.md has the table of what each withstands; what is shown here to be weak is stated there to be so.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from shufflerl.network.node.reporting import make_report, play, randomize_episode, seal_report
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import by_users
from shufflerl.network.protocol.wire import Report, Transport, Upload
from shufflerl.noise import NoiseSum
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ServersNoise
from tests.support.network_world import EPISODE, QUERY, World, agreement_of, pretend_to_seal, terms

Mode = Literal["users", "servers"]
BUDGET = Budget(1.0, 1e-5)
LAWS = ServersNoise(BUDGET).noise(QUERY)
NEEDED = by_users(BUDGET).noise(QUERY).mean
USERS = 8
TRUE = np.bincount(QUERY.tags(EPISODE)[0], minlength=QUERY.size)


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_seal(monkeypatch)


def world(mode: Mode, transport: Transport = Transport.tags) -> World:
    laws: NoiseSum | None = LAWS if mode == "servers" else None
    made = World(users=USERS, noise_mean=NEEDED, transport=transport, servers=laws)
    made.announce()
    terms().check(agreement_of(made))
    return made


def counted(there: World, reports: list[Report]) -> Any:
    """What the coordinator opens, counted, if it looks at groups."""
    assert all(outcome.problem is None for outcome in there.upload(*reports))
    assert there.shuffler.advance()
    groups, counts = agreement_of(there).source.groups, np.zeros(QUERY.size, dtype=np.int64)
    for group, tags in wire.sections(there.collect()):
        read = there.tags(wire.SECTION.pack(group, len(tags) // wire.SEALED_TAG_BYTES) + bytes(tags))
        np.add.at(counts, [tag for tag in read if tag in groups[group]], 1)
    return counts


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("mode", ["users", "servers"])
def test_length(mode: Mode, transport: Transport) -> None:
    """Whoever drops reports by their length finds only one."""
    there = world(mode, transport)
    reports = [there.report() for _ in range(30)]
    assert {len(report.envelope) for report in reports} == {agreement_of(there).envelope_bytes}
    assert len({len(wire.encode(Upload(batch=0, attempt=0, reports=[report]))) for report in reports}) == 1


class Broken:
    """An environment that fails once it is left."""

    def reset(self) -> tuple[int, dict[str, Any]]:
        return 1, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("out of order")


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("mode", ["users", "servers"])
def test_silence(mode: Mode, transport: Transport) -> None:
    """A user whose environment fails reports all the same, and nobody can tell."""
    there = world(mode, transport)
    checked = there.checked()
    report = make_report(checked, play(Broken(), checked.agreement), there.mint())
    assert len(report.envelope) == len(there.report().envelope)
    assert there.upload(report)[0].problem is None


@pytest.mark.parametrize("mode", ["users", "servers"])
def test_n_minus_one(mode: Mode) -> None:
    """Of a batch all but one are somebody's own, who sees the release: what is left for that one.

    By users a part in n of the noise: most counters have less than a deviation of what is needed, and the user is seen.
    By servers all of it, whoever the others are.
    """
    there = world(mode)
    checked = there.checked()
    bare = QUERY.tags(EPISODE)[0].tolist()
    false = [seal_report(checked, bare, there.mint()) for _ in range(USERS - 1)]
    noise = counted(there, [there.report(), *false]) - USERS * TRUE
    if mode == "users":
        assert noise.sum() < 0.3 * QUERY.size * NEEDED  # a part in eight; so many with probability 1e-60
        law = privacy_loss(agreement_of(there).source.noise(1), QUERY.changed_counters)
        assert law.delta(BUDGET.epsilon) > 1e-3
    else:
        dummies = LAWS.parts[0]
        spread = 8 * np.sqrt(QUERY.size * dummies.variance)
        assert abs(noise.sum() - QUERY.size * dummies.mean) < spread
        assert privacy_loss(dummies, QUERY.changed_counters).delta(BUDGET.epsilon) <= BUDGET.delta


@pytest.mark.parametrize("mode", ["users", "servers"])
def test_flooding(mode: Mode) -> None:
    """How far one liar moves a counter: as far as its report is long, or by one."""
    there = world(mode)
    checked, tag = there.checked(), 9
    lie = [tag] * checked.agreement.max_messages
    others = [there.report() for _ in range(USERS - 1)]
    moved = counted(there, [seal_report(checked, lie, there.mint()), *others])[tag] - (USERS - 1) * TRUE[tag]
    most = {"users": checked.agreement.max_messages, "servers": 1}[mode]
    noise = {"users": 2 * NEEDED, "servers": agreement_of(there).source.count_range[1] - USERS}[mode]
    assert most * (mode == "users") <= moved <= most + noise


@pytest.mark.parametrize("mode", ["users", "servers"])
def test_users_without_noise(mode: Mode) -> None:
    """What a node has if all others leave their noise out."""
    agreed = agreement_of(world(mode))
    tags = len(randomize_episode(agreed, EPISODE))
    assert (tags > QUERY.touched_counters) == (mode == "users")
    alone, together = (terms(honest_fraction=honest).charge(agreed) for honest in (1 / USERS, 1.0))
    assert (alone == together) == (mode == "servers")
    spent = privacy_loss(alone.noise, alone.changed).epsilon(BUDGET.delta)
    assert (spent <= BUDGET.epsilon) == (mode == "servers")
