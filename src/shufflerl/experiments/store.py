"""A sweep's folder: `manifest.json` says what it is, `cells/KEY.parquet` holds one result each. It may grow.

Every file is written under another name, forced to disk and renamed: a reader sees it whole or not at all, and a sweep
that is killed loses only the cells that were being run. A lock that dies with its process keeps two sweeps apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

from shufflerl import __version__
from shufflerl.errors import MissingExtraError, ShuffleRLError, StateMismatchError, StorageError
from shufflerl.experiments.cells import FORMAT, Cell, Result, canonical, curve_episodes
from shufflerl.experiments.setting import Setting, prepare
from shufflerl.mdp import Units
from shufflerl.registry import UserEntry

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
#: Parameters and certificates are JSON texts; curves are lists. What begins with `own_` is in the environment's units.
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
        ("batches", _WHOLE),
        ("distinct", _WHOLE),
        ("policies", _WHOLE),
        ("horizon", _WHOLE),
        ("states", _WHOLE),
        ("actions", _WHOLE),
        ("optimal_value", _REAL),
        ("reward", _REAL),
        ("reward_low", _REAL),
        ("reward_high", _REAL),
        ("steps", _WHOLE),
        ("own_regret", _REAL),
        ("own_optimal_value", _REAL),
        ("own_reward", _REAL),
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


def versions_of(cells: Iterable[Cell]) -> dict[str, str]:
    """And the modules that users' own learners, privatizers and environments are in."""
    settings = {canonical(asdict(cell.setting)): cell.setting for cell in cells}
    own = {entry.location: entry for setting in settings.values() for entry in setting.own}
    return versions() | {location: _digest_of(entry) for location, entry in sorted(own.items())}


def _digest_of(own: UserEntry) -> str:
    """Of its module's source, or of its own where there is no file, as in a notebook."""
    try:
        source = inspect.getsource(own.module if hasattr(own.module, "__file__") else own.load())
    except (OSError, TypeError):
        source = "unknown"
    return hashlib.sha256(source.encode()).hexdigest()[:16]


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
    cell, setting, units = result.cell, asdict(result.cell.setting), result.units
    for name in ("env_parameters", "learner_parameters", "privatizer_parameters", "liars"):
        setting[name] = canonical(setting[name])
    return {
        "key": cell.key,
        **setting,
        "seed": cell.seed,
        "regret": result.regret,
        "switches": result.switches,
        "batches": result.batches,
        "distinct": result.distinct,
        "policies": result.policies,
        "horizon": result.horizon,
        "states": result.states,
        "actions": result.actions,
        "optimal_value": result.optimal_value,
        "reward": result.reward,
        "reward_low": units.low,
        "reward_high": units.high,
        "steps": units.steps,
        "own_regret": result.own_regret,
        "own_optimal_value": result.own_optimal_value,
        "own_reward": result.own_reward,
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
        table = parquet.ParquetFile(pa.BufferReader(content)).read(use_threads=False)  # a fifth of read_table's time
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
        batches=row["batches"],
        distinct=row["distinct"],
        policies=row["policies"],
        horizon=row["horizon"],
        states=row["states"],
        actions=row["actions"],
        units=Units(row["reward_low"], row["reward_high"], row["steps"]),
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
        certificates = []
        for cell in _settings(cells).values():
            try:
                certificate = prepare(cell.setting, cell.seed).certificate
            except ShuffleRLError as error:
                raise type(error)(f"{cell}: {error}") from None
            certificates.append(None if certificate is None else certificate.as_dict())
        return cls(versions_of(cells), tuple(cells), tuple(certificates))

    def grown(self, cells: Sequence[Cell], done: Callable[[Cell], bool]) -> Self:
        """With more cells. What was asked for earlier and is neither done nor asked for now is dropped."""
        asked = {cell.key for cell in cells}
        kept = [cell for cell in self.cells if cell.key in asked or done(cell)]
        there = {cell.key for cell in kept}
        certificates = dict(zip(_settings(self.cells), self.certificates, strict=True))
        new = [cell for cell in cells if cell.key not in there]
        more = type(self).of([cell for cell in new if canonical(asdict(cell.setting)) not in certificates])
        certificates |= dict(zip(_settings(more.cells), more.certificates, strict=True))
        together = (*kept, *new)
        return type(self)(
            self.versions | versions_of(cells), together, tuple(certificates[text] for text in _settings(together))
        )

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


def _settings(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Every setting with its first cell."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(canonical(asdict(cell.setting)), cell)
    return first


class Store:
    """An open folder of results; use it as a context manager. Of all its users one at a time may write."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.folder = folder
        self.cells = tuple(cells)
        self.others = 0  # cells in the folder that are not among these
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
            there = Manifest.read(self.folder)
            self._match(there)
            manifest = there.grown(self.cells, lambda cell: _path(self.folder, cell).exists())
            changed = manifest.cells != there.cells
        else:
            manifest, changed = Manifest.of(self.cells), True
        if changed:
            write_whole(self.folder / MANIFEST, manifest.encode())
        self.others = len(manifest.cells) - len(self.cells)
        with _storage(self.folder):
            for leftover in (self.folder / CELLS).glob(f".*{_PARTIAL}"):  # of a sweep that was killed
                leftover.unlink()

    def _match(self, there: Manifest) -> None:
        changed = [
            f"{name} {there.versions.get(name, 'unknown')} there, {version} here"
            for name, version in versions_of(self.cells).items()
            if there.versions.get(name, version if ":" in name else None) != version  # of users' own there may be more
        ]
        if changed:
            raise StateMismatchError(
                f"The results in {self.folder} are of another version ({'; '.join(changed)}), and the two may not "
                "give the same numbers. Finish them with the version that began them, or choose another folder."
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


def results(folder: str | Path, cells: Sequence[Cell] | None = None) -> list[Result]:
    """Every result of a finished sweep in the order of its cells, or those of these cells alone."""
    folder = Path(folder)
    cells = Manifest.read(folder).cells if cells is None else cells
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
    return pa.Table.from_pylist([_row(result) for result in results(folder)], schema=SCHEMA)
