"""Both transports beside what they must reach and what the cost formulas say."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from statistics import median

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from bench.measure import Figure, cpu_seconds
from shufflerl import Batch, CountQuery, Mixture
from shufflerl.counts import Trajectories
from shufflerl.mdp import Problem
from shufflerl.network.coordinator.opening import count, open_seeds
from shufflerl.network.node.reporting import Checked, make_report
from shufflerl.network.protocol import agreement, costs, crypto, masking, wire
from shufflerl.network.protocol.agreement import Agreement, by_users, parse_announcement
from shufflerl.network.protocol.costs import Cost
from shufflerl.network.protocol.sources import Users
from shufflerl.network.protocol.wire import Report, Transport
from shufflerl.network.shuffler import mixing, summing
from shufflerl.privacy.accounting import Budget

BUDGET = Budget(1.0, 1e-5)
#: 1,022,000 counters.
MILLION = Problem(11, 100, 10, 1)
#: 11,200 counters: small enough for tags, large enough for a switch-over.
SMALL = Problem(6, 20, 5, 1)
_PLACES = (1_000, 10_000, 100_000)


def run() -> list[Figure]:
    """A report of a million counters made and added; the formulas of both costs, and where they cross."""
    return [*million(), *predicted()]


class Bench:
    """One batch with the keys of all roles."""

    def __init__(self, problem: Problem, users: int, transport: Transport) -> None:
        query = CountQuery.everything(problem)
        policy = np.zeros((problem.horizon, problem.n_states), dtype=int)
        batch = Batch(0, users, Mixture.single(policy), query)
        self.tag_key, self.envelope_key = crypto.new_box_key(), crypto.new_box_key()
        said = agreement.announce(
            batch,
            by_users(BUDGET, 1.0).noise(query),
            task=bytes(16),
            attempt=0,
            tag_key=self.tag_key.public_key().public_bytes_raw(),
            transport=transport,
        )
        self.agreed: Agreement = parse_announcement(wire.encode(said))
        self.checked = Checked(self.agreed, self.envelope_key.public_key().public_bytes_raw())
        zeros = np.zeros((1, problem.horizon), dtype=int)
        self.episode = Trajectories(zeros, zeros, zeros)
        self.token = secrets.token_bytes(wire.TOKEN_BYTES)

    def make(self) -> Report:
        """What a node does after its episode."""
        return make_report(self.checked, self.episode, self.token)

    def cost(self, repeats: int) -> Cost:
        """One report through all roles: made, opened on arrival and for the release, and counted."""
        sizes, times = [], []
        for _ in range(repeats):
            made: list[Report] = []
            core = cpu_seconds(lambda: made.append(self.make()))  # noqa: B023 - called at once
            core += cpu_seconds(lambda: self._through(made[0]))  # noqa: B023
            sizes.append(len(made[0].envelope))
            times.append(core)
        return Cost(median(sizes), median(times))

    def _through(self, report: Report) -> None:
        agreed, size = self.agreed, self.agreed.query.size
        key: X25519PrivateKey = self.envelope_key
        body = mixing.opened(agreed, key, report.report_id, report.envelope)[1]
        raw = self.tag_key.private_bytes_raw()
        if agreed.transport == Transport.tags:
            body = mixing.opened(agreed, key, report.report_id, report.envelope)[1]
            count(raw, agreed.tag_info, range(size), body.tobytes())
            return
        total = masking.zeros(size, agreed.word_bytes)
        summing.add(total, agreed, key, report.report_id, report.envelope)
        (seed,) = open_seeds(raw, agreed.seed_info, body[: wire.SEALED_SEED_BYTES].tobytes())
        assert seed is not None
        total -= masking.mask(seed, size, agreed.word_bytes)


def million() -> list[Figure]:
    """Seconds of one core for a report of a million counters, and for adding it to the running sum."""
    rows = []
    for users in _PLACES:
        bench = Bench(MILLION, users, Transport.sums)
        size, words = bench.agreed.query.size, bench.agreed.word_bytes
        assert isinstance(bench.agreed.source, Users)
        tags = bench.agreed.source.protocol.messages_per_user
        report, total = bench.make(), masking.zeros(size, words)
        key = bench.envelope_key
        made = _milliseconds(bench.make, 9)
        added = _milliseconds(
            lambda: summing.add(total, bench.agreed, key, report.report_id, report.envelope),  # noqa: B023
            25,
        )
        what = f"{size:,} counters of {words} bytes, n={users:,}"
        rows += [
            Figure.under(50, f"report made, {what}, about {tags:,.0f} tags in it", "ms", made),
            Figure.under(5, f"report opened and added, {what}", "ms", added),
        ]
    return rows


def _milliseconds(action: Callable[[], object], repeats: int) -> float:
    action()
    return 1e3 * median(cpu_seconds(action) for _ in range(repeats))


def predicted() -> list[Figure]:
    """Costs by formula beside measured ones, on both sides of the switch-over and at it."""
    tags = Bench(SMALL, 1_000, Transport.tags).agreed.source
    after = costs.switch_over(tags)
    assert after is not None
    rows = []
    for users in (after // 20, after, 20 * after):
        source = tags.of(users)
        measured = {transport: Bench(SMALL, users, transport).cost(25) for transport in Transport}
        for transport, formula in ((Transport.tags, costs.of_tags), (Transport.sums, costs.of_sums)):
            what = f"{transport}, {source.query.size:,} counters, n={users:,}"
            ours, theirs = measured[transport], formula(source)
            rows.append(alike(f"bytes of a report, {what}", "kB", ours.bytes / 1e3, theirs.bytes / 1e3))
            rows.append(alike(f"core time of a report, {what}", "ms", 1e3 * ours.core, 1e3 * theirs.core))
        ratio = measured[Transport.tags].seconds / measured[Transport.sums].seconds
        formula_ratio = costs.of_tags(source).seconds / costs.of_sums(source).seconds
        rows.append(alike(f"cost of tags over cost of sums, n={users:,}", "times", ratio, formula_ratio))
    return rows


def alike(what: str, unit: str, ours: float, formula: float) -> Figure:
    """What was found must be near what the formula says."""
    return Figure(what, unit, ours, formula, "formula", "ratio from 0.5 to 2", 0.5 <= ours / formula <= 2)
