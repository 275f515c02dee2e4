"""A sweep's folder: `manifest.json` says what it is, `cells/KEY.parquet` holds one result each.

Every file is written under another name, forced to disk and renamed: a reader sees it whole or not at all, and a sweep
that is killed loses only the cells that were being run. A lock that dies with its process keeps two sweeps apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

from shufflerl import __version__
from shufflerl.errors import MissingExtraError, ShuffleRLError, StateMismatchError, StorageError
from shufflerl.experiment import Setting, prepare
from shufflerl.experiments.cells import FORMAT, Cell, Result, canonical, curve_episodes

try:
    import pyarrow as pa
    from pyarrow import parquet
except ImportError as missing:
    raise MissingExtraError(
        "Results are stored as Parquet; install it with: pip install 'shufflerl[experiments]'."
    ) from missing

MANIFEST = "manifest.json"
CELLS = "cells"
_LOCK = ".lock"
_PARTIAL = ".partial"
_DIGEST = b"shufflerl.digest"

_TEXT, _REAL, _WHOLE = pa.string(), pa.float64(), pa.int64()
#: Parameters and certificates are JSON texts; curves are lists.
SCHEMA = pa.schema(
    [
        ("key", _TEXT),
        ("env", _TEXT),
        ("env_parameters", _TEXT),
        ("learner", _TEXT),
        ("learner_parameters", _TEXT),
        ("privatizer", _TEXT),
        ("privatizer_parameters", _TEXT),
        ("liars", _TEXT),
        ("epsilon", _REAL),
        ("delta", _REAL),
        ("episodes", _WHOLE),
        ("seed", _WHOLE),
        ("regret", _REAL),
        ("switches", _WHOLE),
        ("optimal_value", _REAL),
        ("reward", _REAL),
        ("curve_episodes", pa.list_(_WHOLE)),
        ("curve_regret", pa.list_(_REAL)),
        ("certificate", _TEXT),
        ("seconds", _REAL),
    ]
)


@cache
def versions() -> dict[str, str]:
    """What the numbers may depend on: a folder holds results of one and the same."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: metadata.version(name) for name in ("numpy", "scipy", "numba", "dp-accounting")},
        "shufflerl": __version__,
        "sources": _sources_digest(),
    }


def _sources_digest() -> str:
    """Of every module of the package: between two releases the version alone does not tell them apart."""

    def files(folder: Traversable) -> Iterator[Traversable]:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from files(entry)
            elif entry.name.endswith(".py"):
                yield entry

    digest = hashlib.sha256()
    for file in files(resources.files("shufflerl")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    """Trouble with the disk, in one sentence."""
    try:
        yield
    except OSError as reason:
        raise StorageError(
            f"Cannot use {path}: {reason.strerror or reason}. Every result stored so far is whole: make room or allow "
            "access and run the same command again, or choose another folder."
        ) from None


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there."""
    with _storage(path):
        path.mkdir(parents=True, exist_ok=True)


def listed(folder: Path) -> list[str]:
    """The names in a folder; none if it is not there."""
    with _storage(folder):
        return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, even after a power cut, or not at all."""
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    with _storage(path):
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _row(result: Result) -> dict[str, Any]:
    cell, setting = result.cell, asdict(result.cell.setting)
    for name in ("env_parameters", "learner_parameters", "privatizer_parameters", "liars"):
        setting[name] = canonical(setting[name])
    return {
        "key": cell.key,
        **setting,
        "seed": cell.seed,
        "regret": result.regret,
        "switches": result.switches,
        "optimal_value": result.optimal_value,
        "reward": result.reward,
        "curve_episodes": None if result.curve is None else list(curve_episodes(cell.setting.episodes)),
        "curve_regret": None if result.curve is None else list(result.curve),
        "certificate": None if result.certificate is None else canonical(result.certificate),
        "seconds": result.seconds,
    }


def _digest(row: dict[str, Any]) -> bytes:
    return hashlib.sha256(canonical(row).encode()).hexdigest().encode()


def encode(result: Result) -> bytes:
    """A result as a Parquet file of one row, with a digest of its contents."""
    row = _row(result)
    table = pa.Table.from_pylist([row], schema=SCHEMA.with_metadata({_DIGEST: _digest(row)}))
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode(cell: Cell, content: bytes) -> Result:
    """The result of `cell` that these bytes hold; ValueError if they do not."""
    try:
        table = parquet.read_table(pa.BufferReader(content))
        (row,) = table.to_pylist()
        intact = table.schema.metadata[_DIGEST] == _digest(row)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as reason:
        raise ValueError(f"not a result: {reason}") from None
    if not intact or row["key"] != cell.key:
        raise ValueError("its contents do not match their digest" if not intact else "it is of another cell")
    return Result(
        cell=cell,
        regret=row["regret"],
        switches=row["switches"],
        optimal_value=row["optimal_value"],
        reward=row["reward"],
        curve=None if row["curve_regret"] is None else tuple(row["curve_regret"]),
        certificate=None if row["certificate"] is None else json.loads(row["certificate"]),
        seconds=row["seconds"],
    )


@dataclass(frozen=True)
class Manifest:
    """What a folder is of: its cells in order and the versions that made them."""

    versions: dict[str, str]
    cells: tuple[Cell, ...]
    certificates: tuple[dict[str, Any] | None, ...]  # of the settings, in order of their first cell

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Self:
        """Of cells to be run here and now. Every setting is made once: what cannot run is refused here."""
        first: dict[str, Cell] = {}
        for cell in cells:
            first.setdefault(canonical(asdict(cell.setting)), cell)
        certificates = []
        for cell in first.values():
            try:
                certificate = prepare(cell.setting, cell.seed).certificate
            except ShuffleRLError as error:
                raise type(error)(f"{cell}: {error}") from None
            certificates.append(None if certificate is None else certificate.as_dict())
        return cls(versions(), tuple(cells), tuple(certificates))

    def encode(self) -> bytes:
        """As JSON for people and programs."""
        seeds: dict[str, list[int]] = {}
        settings: dict[str, dict[str, Any]] = {}
        for cell in self.cells:
            text = canonical(asdict(cell.setting))
            settings[text] = asdict(cell.setting)
            seeds.setdefault(text, []).append(cell.seed)
        content = {
            "format": FORMAT,
            "versions": self.versions,
            "sweep": [
                {"setting": settings[text], "seeds": seeds[text], "certificate": certificate}
                for text, certificate in zip(settings, self.certificates, strict=True)
            ],
        }
        return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder."""
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise StateMismatchError(
                f"{folder} holds no results: there is no {MANIFEST} in it. Give the folder that a sweep wrote."
            ) from None
        except OSError as reason:
            raise StorageError(f"Cannot read {path}: {reason.strerror}.") from None
        try:
            content = json.loads(text)
            found = content["format"]
            if found == FORMAT:
                rows = [(Setting(**row["setting"]), row["seeds"], row["certificate"]) for row in content["sweep"]]
                cells = tuple(Cell(setting, seed) for setting, seeds, _ in rows for seed in seeds)
                return cls(dict(content["versions"]), cells, tuple(certificate for *_, certificate in rows))
        except (ValueError, KeyError, TypeError) as reason:
            raise StateMismatchError(
                f"{path} is damaged ({type(reason).__name__}: {reason}); restore it, or choose another folder."
            ) from None
        raise StateMismatchError(
            f"{path} has format {found!r}, and this version of shufflerl reads format {FORMAT}. Use the version that "
            "wrote it, or choose another folder."
        )


class Store:
    """An open folder of results; use it as a context manager. Of all its users one at a time may write."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.folder = folder
        self.cells = tuple(cells)
        self._lock: int | None = None

    def __enter__(self) -> Self:
        with _storage(self.folder):
            if self.folder.is_dir() and not (self.folder / MANIFEST).exists():
                strange = sorted(entry.name for entry in self.folder.iterdir() if not _ours(entry.name))
                if strange:
                    raise StateMismatchError(
                        f"{self.folder} holds other files ({strange[0]}, ...) and no {MANIFEST}; choose a new or empty "
                        "folder for the results."
                    )
            (self.folder / CELLS).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _take(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{self.folder} is being written by another sweep; wait for it to end, or choose another folder."
            ) from None
        if (self.folder / MANIFEST).exists():
            self._match(Manifest.read(self.folder))
        else:
            write_whole(self.folder / MANIFEST, Manifest.of(self.cells).encode())
        with _storage(self.folder):
            for leftover in (self.folder / CELLS).glob(f".*{_PARTIAL}"):  # of a sweep that was killed
                leftover.unlink()

    def _match(self, there: Manifest) -> None:
        changed = [
            f"{name} {there.versions.get(name, 'unknown')} there, {version} here"
            for name, version in versions().items()
            if there.versions.get(name) != version
        ]
        if changed:
            raise StateMismatchError(
                f"The results in {self.folder} are of another version ({'; '.join(changed)}), and the two may not "
                "give the same numbers. Finish them with the version that began them, or choose another folder."
            )
        mine, its = {cell.key for cell in self.cells}, {cell.key for cell in there.cells}
        if mine != its:
            raise StateMismatchError(
                f"{self.folder} holds the results of another sweep: {len(mine & its)} of its {len(its)} cells are "
                f"among the {len(mine)} of this one. Choose another folder, or run what was begun there."
            )

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def scan(self) -> tuple[set[str], dict[Path, str]]:
        """The keys of the cells that are done, and the damaged files with what is wrong with them."""
        done, damaged = set(), {}
        for cell in self.cells:
            try:
                if _read(self.folder, cell) is not None:
                    done.add(cell.key)
            except ValueError as reason:
                damaged[_path(self.folder, cell)] = str(reason)
        return done, damaged

    def write(self, result: Result) -> None:
        """Store a result, whole or not at all."""
        write_whole(_path(self.folder, result.cell), encode(result))


def _ours(name: str) -> bool:
    """What a sweep that was killed before its manifest was written may leave."""
    return name in (CELLS, _LOCK, f".{MANIFEST}{_PARTIAL}")


def _path(folder: Path, cell: Cell) -> Path:
    return folder / CELLS / f"{cell.key}.parquet"


def _read(folder: Path, cell: Cell) -> Result | None:
    path = _path(folder, cell)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as reason:
        raise StorageError(f"Cannot read {path}: {reason.strerror}.") from None
    return decode(cell, content)


def results(folder: Path) -> list[Result]:
    """Every result of a finished sweep, in the order of its cells."""
    cells = Manifest.read(folder).cells
    found = []
    for cell in cells:
        try:
            result = _read(folder, cell)
        except ValueError as reason:
            raise StateMismatchError(
                f"{_path(folder, cell)} is damaged ({reason}); run the sweep again, which recomputes it."
            ) from None
        if result is not None:
            found.append(result)
    if len(found) < len(cells):
        raise StateMismatchError(
            f"{folder} holds {len(found)} of the {len(cells)} cells of its sweep; run it again, which does the rest."
        )
    return found


def load(folder: str | Path) -> pa.Table:
    """A finished sweep as one table, a row per cell; `.to_pandas()` and other tools take it from there."""
    return pa.Table.from_pylist([_row(result) for result in results(Path(folder))], schema=SCHEMA)
