from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shufflerl.errors import StateMismatchError, StorageError
from shufflerl.experiments import engine, store
from shufflerl.experiments.cells import FORMAT, Cell, Result, run_cell
from shufflerl.experiments.setting import Setting
from tests.support.waiting import PATIENCE

CELLS = [
    Cell(Setting("riverswim", "ucbvi", privatizer, 60, epsilon, delta, learner_parameters={"batch": 20}), seed)
    for privatizer, epsilon, delta in (("none", None, None), ("shuffle", 1.0, 1e-5))
    for seed in (0, 1, 2)
]


@pytest.fixture(scope="module")
def outcome() -> list[Result]:
    return [run_cell(cell) for cell in CELLS]


@pytest.fixture
def folder(tmp_path: Path, outcome: list[Result]) -> Path:
    path = tmp_path / "out"
    with store.Store(path, CELLS) as opened:
        for result in outcome:
            opened.write(result)
    return path


def cell_file(folder: Path, index: int) -> Path:
    return folder / "cells" / f"{CELLS[index].key}.parquet"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_stored_comes_back(folder: Path, outcome: list[Result]) -> None:
    assert store.results(folder) == outcome
    table = store.load(folder)
    assert table.schema.equals(store.SCHEMA)
    rows = table.to_pylist()
    assert [(row["privatizer"], row["seed"]) for row in rows] == [(c.setting.privatizer, c.seed) for c in CELLS]
    assert [row["regret"] for row in rows] == [result.regret for result in outcome]
    assert rows[0]["curve_episodes"] == list(range(61))
    assert json.loads(rows[-1]["certificate"]) == outcome[-1].certificate


def test_a_result_without_truth_comes_back_too(outcome: list[Result]) -> None:
    bare = Result(CELLS[0], None, 3, None, None, None, None, 1.0)
    assert store.decode(CELLS[0], store.encode(bare)) == bare


def test_the_manifest_says_what_made_the_results(folder: Path, outcome: list[Result]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"python", "numpy", "numba", "shufflerl"} <= set(manifest["versions"])
    free, private = manifest["sweep"]
    assert free["certificate"] is None
    assert private["certificate"] == outcome[-1].certificate
    assert private["setting"]["epsilon"] == 1.0
    assert private["setting"]["learner_parameters"] == {"batch": 20}
    assert free["seeds"] == private["seeds"] == [0, 1, 2]


def damage_cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damage_empty(_: bytes) -> bytes:
    return b""


def damage_noise(content: bytes) -> bytes:
    return os.urandom(len(content))


@pytest.mark.parametrize("damage", [damage_cut, damage_empty, damage_noise])
def test_a_damaged_cell_is_reported_and_recomputed(
    folder: Path, outcome: list[Result], damage: Callable[[bytes], bytes]
) -> None:
    path = cell_file(folder, 4)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StateMismatchError, match=rf"{path.name} is damaged \(.*run the sweep again"):
        store.results(folder)
    seen: list[engine.Progress] = []
    engine.run_cells(CELLS, folder, workers=1, progress=seen.append)
    assert (seen[0].resumed, list(seen[0].damaged)) == (5, [path])
    assert [now.done for now in seen] == [5, 6]
    assert store.results(folder) == outcome


@pytest.mark.slow
def test_no_flipped_bit_changes_a_result_unnoticed(outcome: list[Result]) -> None:
    content = store.encode(outcome[4])
    noticed = 0
    for place in range(0, len(content), 23):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        try:
            assert store.decode(CELLS[4], bytes(flipped)) == outcome[4]
        except ValueError:
            noticed += 1
    assert noticed > len(content) / 23 / 4


def test_a_result_of_another_cell_is_damage(folder: Path) -> None:
    cell_file(folder, 0).write_bytes(cell_file(folder, 1).read_bytes())
    with pytest.raises(StateMismatchError, match="it is of another cell"):
        store.results(folder)


def test_a_folder_grows_by_exactly_what_is_new(
    folder: Path, outcome: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More seeds, then another setting: each cell is run once, and nothing that is there is written again."""
    ran: list[Cell] = []

    def counted(cell: Cell) -> Result:
        ran.append(cell)
        return run_cell(cell)

    monkeypatch.setattr(engine, "run_cell", counted)
    was = contents(folder)
    seeds = [Cell(cell.setting, cell.seed + 3) for cell in CELLS]
    end = engine.run_cells([*CELLS, *seeds], folder, workers=1)
    assert (end.resumed, end.done, end.others) == (6, 12, 0)
    assert ran == seeds
    other = [Cell(replace(CELLS[0].setting, episodes=30), 1)]
    end = engine.run_cells(other, folder, workers=1)
    assert (end.resumed, end.done, end.others) == (0, 1, 12)
    assert ran == [*seeds, *other]
    found = store.results(folder)
    assert {result.cell.key for result in found} == {cell.key for cell in (*CELLS, *seeds, *other)}
    assert all(result in found for result in outcome)
    now = contents(folder)
    assert [name for name, content in was.items() if now[name] != content] == ["manifest.json"]
    rows = json.loads(now["manifest.json"])["sweep"]
    assert [row["seeds"] for row in rows] == [[0, 1, 2, 3, 4, 5]] * 2 + [[1]]
    assert [row["certificate"] is None for row in rows] == [True, False, True]
    assert store.results(folder, CELLS) == outcome


def test_a_smaller_sweep_leaves_the_folder_alone(folder: Path) -> None:
    was = contents(folder)
    assert engine.run_cells(CELLS[:-1], folder).others == 1
    assert contents(folder) == was


def test_what_was_begun_and_is_not_asked_for_any_more_is_forgotten(folder: Path, outcome: list[Result]) -> None:
    cell_file(folder, 5).unlink()
    assert engine.run_cells(CELLS[:3], folder).others == 2
    assert store.results(folder) == outcome[:5]
    assert engine.run_cells(CELLS, folder, workers=1).resumed == 5
    assert store.results(folder) == outcome


@pytest.mark.parametrize("name", ["numpy", "shufflerl", "sources"])
def test_a_folder_of_another_version_is_refused(folder: Path, name: str) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"][name] = "0.0.1"
    path.write_text(json.dumps(manifest))
    with pytest.raises(StateMismatchError, match=f"another version \\({name} 0.0.1 there, "):
        engine.run_cells(CELLS, folder)
    assert len(store.results(folder)) == 6  # reading needs no such care


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: {**m, "format": 99}, f"has format 99, and this version of shufflerl reads format {FORMAT}"),
        (lambda m: {**m, "sweep": 3}, "is damaged"),
        (lambda m: {**m, "sweep": [{**m["sweep"][0], "setting": {"new": 1}}]}, "is damaged"),
        (lambda _: [], "is damaged"),
    ],
)
def test_a_strange_manifest_is_refused(folder: Path, change: Callable[[Any], Any], said: str) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for use in (lambda: engine.run_cells(CELLS, folder), lambda: store.load(folder)):
        with pytest.raises(StateMismatchError, match=said):
            use()


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StateMismatchError, match=r"holds other files \(thesis.tex, ...\)"):
        engine.run_cells(CELLS, tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}
    with pytest.raises(StateMismatchError, match=r"there is no manifest.json in it"):
        store.load(tmp_path)


def test_an_unfinished_sweep_is_not_loaded(folder: Path) -> None:
    cell_file(folder, 2).unlink()
    with pytest.raises(StateMismatchError, match="holds 5 of the 6 cells"):
        store.load(folder)


def test_two_sweeps_cannot_write_one_folder(folder: Path) -> None:
    with store.Store(folder, CELLS), pytest.raises(StorageError, match="being written by another sweep"):
        engine.run_cells(CELLS, folder)
    engine.run_cells(CELLS, folder)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_full_disk_stops_cleanly_and_the_sweep_goes_on_later(
    tmp_path: Path, outcome: list[Result], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """`after` whole files the disk is full: at the manifest, at the first cell, later."""
    calls = 0

    def full(descriptor: int) -> None:
        nonlocal calls
        if os.path.isfile(f"/proc/self/fd/{descriptor}"):
            calls += 1
            if calls > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"No space left on device.*run the same command again"):
            engine.run_cells(CELLS, out, workers=1)
    names = {path.name for path in out.rglob("*") if path.is_file()}
    whole = {cell_file(out, index).name for index in range(max(0, after - 1))}
    assert names == {".lock"} | whole | ({"manifest.json"} if after else set())
    assert engine.run_cells(CELLS, out, workers=1).resumed == max(0, after - 1)
    assert store.results(out) == outcome


@pytest.mark.slow
def test_a_full_disk_stops_many_workers_without_a_word_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path, __: bytes) -> None:
        raise StorageError("full")

    with store.Store(tmp_path, CELLS):
        pass
    monkeypatch.setattr(store, "write_whole", full)
    with pytest.raises(StorageError, match="full"):  # and no warning of tasks that were cancelled
        engine.run_cells(CELLS, tmp_path, workers=2)


# The operating system itself refuses to let a file grow: the limit is less than a cell and more than the manifest.
LIMITED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.experiments.test_store import CELLS
from shufflerl.errors import StorageError
from shufflerl.experiments import engine, store
with store.Store(Path(sys.argv[1]), CELLS):
    pass
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    engine.run_cells(CELLS, sys.argv[1], workers=1)
except StorageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_write_that_the_system_refuses_halfway_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(out), root], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert "File too large" in ended.stdout
    assert {path.name for path in out.rglob("*") if path.is_file()} == {".lock", "manifest.json"}


# Killed between the writing of a cell's file and its renaming, where only a half-born file is left.
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.experiments.test_store import CELLS
from shufflerl.experiments import engine
replace = Path.replace
def killed(self, target):
    if "cells" in self.parts:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = killed
engine.run_cells(CELLS, sys.argv[1], workers=1)
"""


@pytest.mark.slow
def test_killed_between_writing_and_renaming(tmp_path: Path, outcome: list[Result]) -> None:
    out = tmp_path / "out"
    root = str(Path(__file__).parents[2])
    ended = subprocess.run([sys.executable, "-c", KILLED, str(out), root], check=False, timeout=PATIENCE)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in (out / "cells").iterdir()] == [f".{CELLS[0].key}.parquet.partial"]
    assert engine.run_cells(CELLS, out, workers=1).resumed == 0
    assert store.results(out) == outcome
    assert len(list((out / "cells").iterdir())) == 6


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Not a directory.*choose another folder"):
        engine.run_cells(CELLS, tmp_path / "file" / "out")

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"Permission denied.*choose another folder"):
        engine.run_cells(CELLS, tmp_path / "out")
