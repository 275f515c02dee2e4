"""The shuffler's store on NATS, on a real cluster of three servers: the contract of stores, and large values."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from shufflerl.network.stores.store import Store
from tests.contracts.store import ID, KEY, ROW, StoreContract
from tests.support.nats_cluster import MISSING, server_binary
from tests.support.nats_fronts import Front

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


class TestNats(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, front: Front) -> None:
        self.front = front

    def make(self) -> Store:
        return self.front()

    def reopen(self, store: Store) -> Store:
        """The old one is left as it is, as if its machine had been cut off."""
        return self.front()


def test_values_larger_than_a_message(front: Front) -> None:
    size = 3 * 2**20
    store = front()
    store.create(replace(ROW, users=2, announcement=os.urandom(size)), KEY)
    reports = [(os.urandom(16), os.urandom(size)), (os.urandom(16), os.urandom(100))]
    assert store.add(ID, reports) == [None, None]
    other = front()
    assert other.get(ID) == store.get(ID)
    assert list(other.reports(ID)) == reports
    part, chunk = os.urandom(size), os.urandom(size)
    assert store.keep(ID, "part", part) == part
    assert other.keep(ID, "part", b"another") == other.kept(ID, "part") == part
    other.release(ID, [chunk])
    assert store.chunk(ID, 0) == other.chunk(ID, 0) == chunk
