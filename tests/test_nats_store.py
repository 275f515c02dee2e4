"""The shuffler's store on NATS: the contract of stores on a real cluster of three servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from shufflerl.network.nats_store import NatsStore
from shufflerl.network.store import Store
from tests.contracts.store import StoreContract
from tests.nats_cluster import MISSING, Cluster, server_binary

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("nats"))
    yield cluster
    cluster.stop()


class TestNats(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, cluster: Cluster) -> Iterator[None]:
        self.url, self.name = cluster.url, f"test-{secrets.token_hex(4)}"
        self.stores: list[Store] = []
        yield
        for store in self.stores:
            store.close()

    def make(self) -> Store:
        self.stores.append(NatsStore(self.url, name=self.name))
        return self.stores[-1]

    def reopen(self, store: Store) -> Store:
        """The old one is left as it is, as if its machine had been cut off."""
        return self.make()
