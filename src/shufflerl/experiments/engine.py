"""Cells over processes: whatever the number of workers, the same numbers, and each stored as soon as it is there."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from shufflerl import checks
from shufflerl.errors import InvalidInputError, LostWorkersError, MissingExtraError, StateMismatchError
from shufflerl.experiments.cells import Cell, Result, run_cell
from shufflerl.experiments.store import Store, versions_of

try:
    import joblib
except ImportError as missing:
    raise MissingExtraError("Sweeps need joblib; install it with: pip install 'shufflerl[experiments]'.") from missing

Results = Generator[Result, None, None]
Runner = Callable[[list[Cell], int | None], Results]

#: Where cells run: processes of this machine, or the Ray cluster that `ray.init()` finds or starts.
BACKENDS = ("loky", "ray")

#: A pool whose workers died is replaced, unless this many in a row died before they gave a single result.
MAX_LOST_POOLS = 3


@dataclass(frozen=True)
class Progress:
    """How far a sweep is: `resumed` cells were there before it began, `damaged` files are being computed anew.

    `others` are cells in the folder that this sweep does not ask for.
    """

    cells: int
    resumed: int
    done: int
    damaged: dict[Path, str]
    others: int = 0


def run_cells(
    cells: Sequence[Cell],
    folder: str | Path,
    *,
    workers: int | None = None,
    backend: str = "loky",
    progress: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Run the cells that `folder` does not hold yet; `progress` is called at the start and after each one.

    A folder may hold other cells, which stay: a sweep grows by more seeds, values or settings. At most `workers` run
    at a time, None for as many as there are processors.
    """
    checks.choice("backend", backend, BACKENDS)
    if workers is not None:
        checks.whole("workers", workers, least=1)
    results: Runner = partial(_on_ray, _ray()) if backend == "ray" else _on_processes
    if any(own.module.__name__ == "__main__" for cell in cells for own in cell.setting.own):
        results = _here
    if not cells:
        raise InvalidInputError("There are no cells to run; give at least one.")
    if len({cell.key for cell in cells}) < len(cells):
        raise InvalidInputError("A cell is given twice; give each setting and seed once.")
    with Store(Path(folder), cells) as store:
        finished, damaged = store.scan()
        now = Progress(len(cells), len(finished), len(finished), damaged, store.others)
        progress(now)
        missing = [cell for cell in cells if cell.key not in finished]
        with contextlib.closing(results(missing, workers)) as stream:
            for result in stream:
                store.write(result)
                now = replace(now, done=now.done + 1)
                progress(now)
    return now


def _here(cells: list[Cell], _: int | None) -> Results:
    """Results one by one: no other process would find what a script or notebook defines by itself."""
    return (run_cell(cell) for cell in cells)


def _on_processes(cells: list[Cell], workers: int | None) -> Results:
    """Results as they come. A pool that loses workers is replaced, and what it had not given is run by the next."""
    waiting = {cell.key: cell for cell in cells}
    fruitless = 0
    while waiting:
        fruitless += 1
        results = _pool(list(waiting.values()), workers)
        try:
            for result in results:
                fruitless = 0
                del waiting[result.cell.key]
                yield result
        except BrokenProcessPool as reason:
            if fruitless >= MAX_LOST_POOLS:
                raise LostWorkersError(
                    f"Workers died {fruitless} times in a row before they gave a result, perhaps for lack of memory; "
                    f"use fewer workers. The last one: {reason}"
                ) from None
        finally:
            with warnings.catch_warnings():  # a sweep that stops early need not be told that it does
                warnings.filterwarnings("ignore", message=".*tasks which were still being processed")
                results.close()


def _pool(cells: list[Cell], workers: int | None) -> Results:
    parallel = joblib.Parallel(
        n_jobs=workers or joblib.cpu_count(),
        backend="loky",
        batch_size=1,  # each result is handed over, and stored, as soon as it is there
        return_as="generator_unordered",
        initializer=_die_with,
        initargs=(os.getpid(), os.getcwd()),
    )
    results: Results = parallel(joblib.delayed(run_cell)(cell) for cell in cells)
    return results


def _die_with(parent: int, _: str) -> None:
    """End this worker when the sweep is gone: one that was killed could not tell its workers.

    Workers are used again for another sweep only if they began with the same: so not in another folder, where they
    would not find what is there.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as missing:
        raise MissingExtraError(
            "The backend 'ray' needs Ray; install it with: pip install 'shufflerl[ray]'."
        ) from missing


def _on_ray(ray: Any, cells: list[Cell], workers: int | None) -> Results:
    """Results as they come from a cluster; Ray runs again elsewhere what a lost machine had not given.

    Ray's backend for joblib hands over results only when all are there, so its tasks are used as they are.
    """
    mine = not ray.is_initialized()
    if mine:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    task = ray.remote(num_cpus=1, max_retries=-1)(run_here)
    most = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = cells[::-1]
    running: list[Any] = []
    try:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(task.remote(cell := waiting.pop(), versions_of([cell])))
            ready, running = ray.wait(running, num_returns=1)
            try:
                result: Result = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            yield result
    finally:
        if mine:
            ray.shutdown()


def run_here(cell: Cell, expected: dict[str, str]) -> Result:
    """Run a cell on a machine of a cluster, if it has what the sweep was started with."""
    here = versions_of([cell])
    differ = [f"{name} {there}, not {expected[name]}" for name, there in here.items() if there != expected[name]]
    if differ:
        raise StateMismatchError(
            f"A machine of the cluster has another version ({'; '.join(differ)}), which may not give the same numbers; "
            "install the same everywhere."
        )
    return run_cell(cell)
