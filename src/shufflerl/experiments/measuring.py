"""Time and memory of single runs, one at a time, each in a process of its own that was forked after compilation.

`python -m shufflerl.experiments.measuring` reads points from its input, a line each, and prints what it
measured of each. `measure` starts it and keeps every measurement in a file: what was measured is not measured again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from threadpoolctl import threadpool_limits

from shufflerl.errors import LostWorkersError, PrivacyWarning
from shufflerl.experiments.engine import Progress
from shufflerl.experiments.figures.scaling import Point, grown
from shufflerl.experiments.setting import run
from shufflerl.experiments.store import make_folder, write_whole

#: Runs of a point; the shortest counts, as others only ever disturb.
REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """A point's processor time, and the memory its run took on top of what was there; None where none can tell."""

    point: Point
    seconds: float
    bytes: int | None


def measure(points: Sequence[Point], folder: Path, tell: Callable[[Progress], None]) -> tuple[Timing, ...]:
    """Measure what `folder` does not hold yet, point by point."""
    make_folder(folder)
    found = {point: timing for point in points if (timing := _read(point, folder)) is not None}
    resumed = len(found)
    tell(Progress(len(points), resumed, resumed, {}))
    missing = [point for point in points if point not in found]
    if missing:
        command = [sys.executable, "-m", __name__]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("".join(json.dumps(asdict(point)) + "\n" for point in missing))
            child.stdin.close()
            for point, line in zip(missing, child.stdout, strict=False):
                write_whole(_path(point, folder), line.encode())
                found[point] = Timing(point, **json.loads(line))
                tell(Progress(len(points), resumed, len(found), {}))
        if child.returncode or len(found) < len(points):
            raise LostWorkersError(
                "The process that measures time and memory ended early, perhaps for lack of memory; run the same "
                "command again, which measures what is missing."
            )
    return tuple(found[point] for point in points)


def _path(point: Point, folder: Path) -> Path:
    return folder / f"{point.name}.json"


def _read(point: Point, folder: Path) -> Timing | None:
    """What was measured of a point; one that is damaged is measured again."""
    try:
        found = json.loads(_path(point, folder).read_text())
        return Timing(point, float(found["seconds"]), None if found["bytes"] is None else int(found["bytes"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _main() -> None:
    warnings.simplefilter("ignore", PrivacyWarning)
    points = [Point(**json.loads(line)) for line in sys.stdin]
    fork = multiprocessing.get_context("fork")
    with threadpool_limits(1):
        for line in dict.fromkeys(point.line for point in points):
            run(grown(line, "X", 4).setting, 0)  # compiles
        for point in points:
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=_measured, args=(point, there))
            process.start()
            there.close()
            print(json.dumps(here.recv()), flush=True)  # fails once nobody listens, which ends this
            process.join()


def _measured(point: Point, out: Connection) -> None:
    before = _resident("VmRSS")
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        run(point.setting, 0)
        seconds.append(time.process_time() - began)
    after = _resident("VmHWM")
    out.send({"seconds": min(seconds), "bytes": None if before is None or after is None else after - before})


def _resident(field: str) -> int | None:
    """Memory of this process in bytes: now (VmRSS) or at most so far (VmHWM); only Linux tells."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB", status, flags=re.MULTILINE)
    return None if found is None else 1024 * int(found.group(1))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _main()
