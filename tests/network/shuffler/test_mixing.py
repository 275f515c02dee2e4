"""Mixing a large batch slice by slice: any order is equally likely, whoever does which slice and however often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from scipy import stats

from shufflerl.errors import StorageError
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import State
from shufflerl.network.shuffler import mixing
from shufflerl.network.shuffler.shuffler import Shuffler
from shufflerl.network.stores.store import BatchId, Store
from tests.contracts.store import ID
from tests.support.network_world import World, killed_often, pretend_to_seal


class Parts:
    """Partial results alone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def keep(self, _: BatchId, name: str, value: bytes) -> bytes:
        return self.values.setdefault(name, value)

    def kept(self, _: BatchId, name: str) -> bytes | None:
        return self.values.get(name)


def of_one_group(sealed: bytes) -> mixing.Tags:
    rows = np.frombuffer(sealed, dtype=np.uint8).reshape(-1, wire.SEALED_TAG_BYTES)
    return mixing.Tags(np.zeros(len(rows), dtype=np.int64), rows)


@pytest.mark.slow
def test_every_order_of_a_batch_is_equally_likely() -> None:
    """Four tags from two slices over three buckets: 24 orders; level 1e-7."""
    runs, orders = 12_000, Counter[bytes]()
    for _ in range(runs):
        store = cast(Store, Parts())
        for number, tags in enumerate((b"ab", b"cd")):
            sealed = b"".join(bytes([tag]) * wire.SEALED_TAG_BYTES for tag in tags)
            store.keep(ID, f"slice {number}", mixing.spread(store, ID, of_one_group(sealed), [3]))
        orders[b"".join(rows[:, 0].tobytes() for _, rows in mixing.gathered(store, ID, 2, [3]))] += 1
    assert {bytes(sorted(order)) for order in orders} == {b"abcd"}
    counts = np.array(list(orders.values()))
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-7


@pytest.mark.parametrize("slices", [1, 3])
def test_a_large_batch_is_permuted_as_a_small_one(slices: int) -> None:
    """Of 300,000 tags about one stays in its place, and one before its successor: above 20 with probability 1e-19."""
    tags = 300_000
    rows = np.zeros((tags, wire.SEALED_TAG_BYTES), dtype=np.uint8)
    rows[:, :4] = np.arange(tags, dtype="<u4").view(np.uint8).reshape(-1, 4)
    if slices == 1:
        mixed = mixing.permuted(rows)
    else:
        store = cast(Store, Parts())
        for number, slice in enumerate(np.split(rows, slices)):
            store.keep(ID, f"slice {number}", mixing.spread(store, ID, of_one_group(slice.tobytes()), [3]))
        mixed = np.concatenate([some for _, some in mixing.gathered(store, ID, slices, [3])])
    order = np.ascontiguousarray(mixed[:, :4]).view("<u4").ravel().astype(np.int64)
    assert (np.sort(order) == np.arange(tags)).all()
    assert (order == np.arange(tags)).sum() <= 20
    assert (np.diff(order) == 1).sum() <= 20
    assert abs(np.corrcoef(order, np.arange(tags))[0, 1]) < 6 / np.sqrt(tags)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one report, buckets of a few tags."""
    pretend_to_seal(monkeypatch)
    monkeypatch.setattr(mixing, "SLICE_BYTES", 1)
    monkeypatch.setattr(mixing, "BUCKET_TAGS", 8)
    monkeypatch.setattr(wire, "CHUNK_TAGS", 8)


def sealed_world(users: int = 7) -> World:
    world = World(users=users, noise_mean=1e-9)
    world.announce()
    world.upload(*(world.marked_report(mark) for mark in range(users)))
    return world


@pytest.mark.usefixtures("sliced")
def test_a_batch_in_slices_is_released_whole() -> None:
    world = sealed_world()
    assert world.shuffler.advance()
    assert world.shuffler.status(world.task).chunks > 1
    assert sorted(world.tags(world.collect())) == list(range(21))
    assert world.store.kept(BatchId(world.task, 0, 0), "slice 0") is None


@pytest.mark.usefixtures("sliced")
def test_slices_of_a_dead_process_are_done_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after every number of stored parts in turn: some slices are there whole, one in part."""
    world = sealed_world()
    assert killed_often(world, range(1, 12), monkeypatch) > 1
    assert world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == list(range(21))


@pytest.mark.usefixtures("sliced")
def test_a_slice_done_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process does every slice between this one's look and its result."""
    world = sealed_world()
    spread = mixing.spread
    id = BatchId(world.task, 0, 0)

    def after_another(store: Store, id: BatchId, tags: mixing.Tags, buckets: list[int]) -> bytes:
        for number in range(7):
            if store.kept(id, f"slice {number}") is None:
                slice = [envelope for _, envelope in store.reports(id, number, 1)]
                sealed = slice[0][32:-16][wire.TOKEN_BYTES :]
                store.keep(id, f"slice {number}", spread(store, id, of_one_group(sealed), buckets))
        return spread(store, id, tags, buckets)

    monkeypatch.setattr(mixing, "spread", after_another)
    assert len(list(world.store.reports(id))) == 7
    assert world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == list(range(21))


@pytest.mark.usefixtures("sliced")
def test_a_batch_that_lost_a_report_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sealed_world()
    reports = world.store.reports
    lost = list(reports(BatchId(world.task, 0, 0)))[2]
    monkeypatch.setattr(world.store, "reports", lambda *which: (one for one in reports(*which) if one != lost))
    assert not world.shuffler.advance()
    assert "never released short" in (world.shuffler.trouble or "")
    assert world.shuffler.status(world.task).state == State.sealed


@pytest.mark.usefixtures("sliced")
def test_a_batch_that_lost_a_part_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sealed_world()
    kept = world.store.kept
    monkeypatch.setattr(world.store, "kept", lambda id, name: kept(id, name) if name.startswith("slice") else None)
    assert not world.shuffler.advance()
    assert "partial result of batch 0 is missing" in (world.shuffler.trouble or "")
    assert world.shuffler.status(world.task).state == State.sealed


def test_another_process_that_was_faster_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sealed_world()
    other = Shuffler(
        world.store, world.identity, world.coordinator.public, world.enrolment.public, world.limits, lambda: world.now
    )
    mixed: Callable[..., object] = mixing.mixed

    def slow(*arguments: object) -> object:
        monkeypatch.setattr(mixing, "mixed", mixed)
        assert other.advance()
        raise StorageError("its reports are gone")

    monkeypatch.setattr(mixing, "mixed", slow)
    assert world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == list(range(21))
