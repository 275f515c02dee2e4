"""What the store on NATS deletes, when, and what it must keep; what is deleted is on no disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shufflerl.errors import StorageError
from shufflerl.network.stores.nats_store import NatsStore
from tests.contracts.store import ID, KEY, REPORTS, ROW
from tests.support.nats_cluster import MISSING, Cluster, server_binary
from tests.support.nats_fronts import Front
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)

TASK_NAME = f"{ID.task.hex()}.0.0"


def test_a_stream_in_the_making_is_kept_whatever_the_clocks_say(front: Front) -> None:
    """A front end that starts with a clock far ahead, while another one is releasing."""
    slow = front()
    slow.create(ROW, KEY)
    slow.add(ID, REPORTS)

    def chunks() -> Iterator[bytes]:
        yield b"first"
        front().erase()
        yield b"second"

    slow.release(ID, chunks())
    assert [slow.chunk(ID, 0), slow.chunk(ID, 1)] == [b"first", b"second"]


def test_whoever_finishes_a_batch_deletes_it(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has done so when it returns: nobody else needs to hear of it."""
    store = front()
    monkeypatch.setattr(store.rows, "finished", lambda *_: None)
    store.create(ROW, KEY)
    (reports,) = front.streams()
    store.add(ID, REPORTS)
    store.release(ID, [b"tags"])
    (release,) = front.streams()
    assert release != reports
    store.scrub(ID)
    assert not front.streams()
    store.create(replace(ROW, id=replace(ID, number=1)), KEY)
    store.abort(replace(ID, number=1))
    assert not front.streams()


def test_ids_of_a_batch_that_is_still_open_are_not_stored_as_spent(front: Front) -> None:
    """A part of them in the place of all would let the others take part again."""
    store = front()
    store.create(ROW, KEY)
    store.add(ID, REPORTS[:1])
    with pytest.raises(StorageError, match="not decided yet"):
        store.broker.run(store.spend(ID, store.logs[ID]))
    assert store.broker.run(store.broker.get(f"{front.name}-spent", subject=f"{front.name}-spent.{TASK_NAME}")) is None


def test_what_is_deleted_is_in_no_file_of_any_server(front: Front) -> None:
    store = front()
    reports = [(os.urandom(16), os.urandom(size)) for size in [30, 300, 3_000] * 10]
    key, tags, part = os.urandom(32), os.urandom(5_000), os.urandom(5_000)
    store.create(replace(ROW, users=len(reports)), key)
    for start in range(0, len(reports), 7):
        store.add(ID, reports[start : start + 7])
    store.keep(ID, "part", part)
    secret = [key, part, *(envelope for _, envelope in reports)]
    assert set(secret) == _found(secret, front.cluster.folder).keys()  # the search could find them
    store.release(ID, [tags])
    _gone(secret, front.cluster.folder)
    assert _found([tags], front.cluster.folder)
    store.scrub(ID)
    _gone([tags], front.cluster.folder)
    spent = store.broker.run(store.broker.get(f"{front.name}-spent", subject=f"{front.name}-spent.{TASK_NAME}"))
    assert spent is not None
    assert spent.value == b"".join(sorted(report for report, _ in reports))


def test_files_can_be_encrypted(tmp_path: Path) -> None:
    """As in examples/nats/server.conf: not even what is stored can be read from the disk."""
    cluster = Cluster(tmp_path, storage=', cipher: aes, key: "of the servers"')
    try:
        store = NatsStore(cluster.url)
        store.create(ROW, KEY)
        store.add(ID, REPORTS)
        assert sorted(store.reports(ID)) == sorted(REPORTS)
        assert not _found([KEY, *(envelope for _, envelope in REPORTS)], tmp_path)
        store.close()
    finally:
        cluster.stop()


def _found(secrets: list[bytes], folder: Path) -> dict[bytes, Path]:
    """Which of them are in any file below a folder, and where."""
    found: dict[bytes, Path] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # servers are just deleting some
                text = Path(place, name).read_bytes()
                found |= {secret: Path(place, name) for secret in secrets if secret in text}
    return found


def _gone(secrets: list[bytes], folder: Path) -> None:
    """Each server deletes by itself: one that is behind, as it got no processor time, does when it has caught up."""
    until(lambda: not _found(secrets, folder))
