"""Front ends of one shuffler over a NATS cluster, in one process, for tests."""

from __future__ import annotations

import secrets

from shufflerl.network.protocol.wire import State
from shufflerl.network.stores.nats_store import NatsStore
from shufflerl.network.stores.store import BatchId, Store
from tests.contracts.store import ID
from tests.support.nats_cluster import Cluster


class Front:
    """Makes front ends of one shuffler."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.name = cluster, f"test-{secrets.token_hex(4)}"
        self.stores: list[NatsStore] = []

    def __call__(self) -> NatsStore:
        self.stores.append(NatsStore(self.cluster.url, name=self.name))
        return self.stores[-1]

    def streams(self) -> set[str]:
        """Streams of batches and releases that are there."""
        store = self.stores[-1]
        return set(store.broker.run(store.broker.streams(f"{self.name}-batch-")))


def state_of(store: Store, id: BatchId = ID) -> State:
    batch = store.get(id)
    assert batch is not None
    return batch.state
