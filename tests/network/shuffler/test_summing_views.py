"""What each party sees of masked vectors: the shuffler random bytes, the coordinator seeds and one sum."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from shufflerl.network.protocol import masking, wire
from shufflerl.network.protocol.wire import Transport
from shufflerl.network.shuffler import summing
from shufflerl.network.stores.store import BatchId, SQLiteStore
from tests.network.shuffler.test_summing import fill, report_of, summing_world, unreadable
from tests.network.stores.test_store import left_of
from tests.support.network_world import QUERY, World, agreement_of, pretend_to_seal, sealed_seed


def test_a_report_is_as_long_and_as_random_whatever_it_says() -> None:
    """The shuffler sees uniform bytes; so are the differences of two users' vectors who did the same. Level 1e-7."""
    world = summing_world()
    sizes = {len(report_of(world, tags).envelope) for tags in ([], [1], [2] * 500, list(range(24)) * 30)}
    assert sizes == {world.checked().agreement.envelope_bytes}
    assert len(world.report().envelope) in sizes
    counters = 100_000
    one, other = (masking.masked([7] * 9, secrets.token_bytes(32), counters, 4) for _ in range(2))
    difference = (masking.words(one, 4) - masking.words(other, 4)).tobytes()
    for seen in (one, other, difference):
        found = np.bincount(np.frombuffer(seen, dtype=np.uint8), minlength=256)
        assert stats.chisquare(found).pvalue > 1e-7


@pytest.mark.slow
def test_the_order_of_seeds_says_nothing_of_who_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four users each one's seed lands on each place equally often; level 1e-7.

    Users come in order of their ids: whether a store has its reports by time or by id, they are handed out in order.
    """
    pretend_to_seal(monkeypatch)
    runs, users = 250, 4
    places = np.zeros((users, users))
    world = World(users=users, transport=Transport.sums)
    for number in range(runs):
        world.announce(number)
        reports = sorted((world.report() for _ in range(users)), key=lambda report: report.report_id)
        world.upload(*reports, number=number)
        assert world.shuffler.advance()
        sealed = [sealed_seed(report) for report in reports]
        places[np.arange(users), [world.seeds(number).index(one) for one in sealed]] += 1
        world.exclude(number=number)
        assert world.shuffler.advance()
    statistic = (users - 1) * ((places - runs / users) ** 2).sum() / runs
    assert stats.chi2.sf(statistic, (users - 1) ** 2) > 1e-7


def test_the_order_of_seeds_is_not_told_by_the_ids_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows all ids of a run, as whoever enrols does, cannot say in which order they were handed over.

    Two orders of the same twelve are equal with probability 2e-9.
    """
    pretend_to_seal(monkeypatch)
    world, orders = summing_world(users=12), []
    tokens = [world.mint() for _ in range(12)]
    for _ in range(2):
        world.store = SQLiteStore(None)
        world.restart()
        world.announce()
        reports = [world.report(token) for token in tokens]
        world.upload(*reports)
        assert world.shuffler.advance()
        seeds, sealed = world.seeds(), {sealed_seed(report): report.report_id for report in reports}
        orders.append([sealed[seed] for seed in seeds])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_the_coordinator_sees_the_sum_only() -> None:
    """Who of two crowds with the same counts did what is in nothing it is given, with all its keys; level 1e-7.

    One crowd's first user raises counter 0 three times and its second nobody's; in the other it is the second. All that
    the coordinator gets are seeds, drawn before anybody did anything, and a sum that is the same.
    """
    views: list[list[int]] = []
    for loud in (0, 1):
        world = summing_world(users=2)
        reports = [report_of(world, [0, 0, 0] if user == loud else []) for user in range(2)]
        world.upload(*reports)
        assert world.shuffler.advance()
        sealed = world.seeds()
        seeds = world.opened(sealed)
        world.exclude()
        assert world.shuffler.advance()
        total = world.collect()
        views.append(world.counts(seeds))
        # Nothing but seeds and a vector as long as one, and neither user's vector can be had from them.
        assert (len(total), len(b"".join(sealed))) == (2 * QUERY.size, 2 * wire.SEALED_SEED_BYTES)
        alone = {(masking.words(total, 2) - masking.mask(seed, QUERY.size, 2)).tobytes() for seed in seeds}
        quiet = {masking.mask(seed, QUERY.size, 2).tobytes() for seed in seeds}
        assert alone.isdisjoint(quiet)  # less one mask it is still under the other's
        for report in reports:
            assert report.report_id not in total + b"".join(sealed)
    assert views[0] == views[1] == [3] + [0] * (QUERY.size - 1)


def test_no_subset_can_be_read_but_the_one_that_was_summed() -> None:
    """With every seed in hand, only all masks together open a sum: any other choice leaves random numbers."""
    world = summing_world(users=4)
    expected = fill(world)
    seeds = world.opened(world.seeds())
    world.exclude()
    world.shuffler.advance()
    total = masking.words(world.collect(), 2)
    most = agreement_of(world).source.count_range[1]
    readable = [
        chosen
        for size in range(5)
        for chosen in itertools.combinations(seeds, size)
        if ((total - masking.sum_of_masks(chosen, QUERY.size, 2)) <= most).all()
    ]
    assert readable == [tuple(seeds)]
    assert world.counts(seeds) == expected


def test_the_shufflers_files_hold_nothing_after_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "SLICE", 2)
    world = summing_world(users=5, excludable=1, store=SQLiteStore(tmp_path / "shuffler.db"))
    fill(world, bad=1)
    id, kept = BatchId(world.task, 0, 0), {}
    real = world.store.keep

    def watched(id: BatchId, name: str, value: bytes) -> bytes:
        kept[name] = value
        return real(id, name, value)

    monkeypatch.setattr(world.store, "keep", watched)
    for name in ("order", "seeds 0"):
        part = world.store.kept(id, name)
        assert part is not None
        kept[name] = part
    envelopes, key = [envelope for _, envelope in world.store.reports(id)], world.store.key(id)
    assert key is not None
    world.exclude(*unreadable(world))
    assert left_of([key, kept["order"]], tmp_path)  # the search can find them
    assert world.shuffler.advance()
    assert set(kept) == {"order", "seeds 0", "exclusion", "sum 0", "sum 1"}
    # Ids of reports are the spent ones, which stay; what came with them does not.
    secret = [envelope[48:] for envelope in envelopes] + [key, kept["order"], kept["sum 0"][32:], kept["sum 1"][32:]]
    secret += [kept["seeds 0"][start + 16 : start + 96] for start in range(0, 5 * 96, 96)]
    total = world.collect()
    assert left_of([part for part in secret if part not in total], tmp_path) == []
    world.scrub()
    assert left_of([total], tmp_path) == []
    world.store.close()
