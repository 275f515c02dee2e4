"""What a benchmark returns, and how it measures: medians of repeats taken in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from shufflerl import MDP, CountPopulation, privatizers
from shufflerl.errors import PrivacyWarning
from shufflerl.learners.base import Learner
from shufflerl.mdp import Problem
from shufflerl.privatizers.base import Privatizer

#: Of every private run of these figures.
DELTA = 1e-5

AnyLearner = TypeVar("AnyLearner", bound=Learner)


@dataclass(frozen=True)
class Figure:
    """One row: our figure beside a peer's or a limit's, and whether the target was reached."""

    what: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    target: str
    reached: bool

    @property
    def ratio(self) -> float:
        """Ours divided by the peer's."""
        return self.ours / self.peer

    @classmethod
    def at_least(cls, times: float, what: str, unit: str, ours: float, peer: float, peer_name: str) -> Figure:
        """Ours must be this many times the peer's or more."""
        return cls(what, unit, ours, peer, peer_name, f"ratio at least {times:g}", ours / peer >= times)

    @classmethod
    def at_most(cls, times: float, what: str, unit: str, ours: float, peer: float, peer_name: str) -> Figure:
        """Ours must be this many times the peer's or less."""
        return cls(what, unit, ours, peer, peer_name, f"ratio at most {times:g}", ours / peer <= times)

    @classmethod
    def under(
        cls, limit: float, what: str, unit: str, ours: float, peer: float | None = None, peer_name: str = "limit"
    ) -> Figure:
        """Ours must stay under a limit, which also stands in the peer's place unless a peer was measured."""
        shown = limit if peer is None else peer
        return cls(what, unit, ours, shown, peer_name, f"under {limit:g} {unit}", ours < limit)


class SkippedError(Exception):
    """A benchmark that cannot run here; the message says why and what to do."""


def medians(repeats: int, *measures: Callable[[int], float]) -> list[float]:
    """The median of each measure over the repeats, taken in turn (ours, peer, ours, peer, ...).

    Whatever else the machine is doing then slows all of them alike. A measure is told the number of the repeat.
    """
    rows = [[measure(repeat) for measure in measures] for repeat in range(repeats)]
    return [median(column) for column in zip(*rows, strict=True)]


def seconds(action: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - began) / calls


def cpu_seconds(action: Callable[[], object]) -> float:
    """Seconds that this process computed: of one that does nothing else, what a machine without other work takes."""
    began = time.process_time()
    action()
    return time.process_time() - began


def core_time(process: int) -> float:
    """Seconds that a process has computed; unlike its speed, they do not depend on what else the machine is doing."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise SkippedError("The kernel does not tell processor times here; run it on Linux.") from None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_process(module: str, name: str) -> tuple[float, float]:
    """Seconds of a measure of a module's, and the most megabytes its process held; see `print_measure`."""
    command = [sys.executable, "-m", module, name]
    figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return figures["seconds"], figures["megabytes"]


def print_measure(measure: Callable[[], float]) -> None:
    """The other end of `in_process`."""
    print(json.dumps({"seconds": measure(), "megabytes": peak_megabytes()}))


def peak_megabytes() -> float:
    """The most this process held. getrusage would count in what its parent held when it was started."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def parties(
    make: Callable[[Problem, np.random.SeedSequence], AnyLearner],
    mdp: MDP,
    seed: int,
    episodes: int,
    epsilon: float | None,
) -> tuple[AnyLearner, CountPopulation, Privatizer]:
    """Who takes part in a run."""
    for_users, for_noise, for_learner = np.random.SeedSequence(seed).spawn(3)
    learner = make(mdp.problem(episodes), for_learner)
    privatizer = privatizers.make("none")
    if epsilon is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # one delta for all K
            privatizer = privatizers.make("shuffle", learner, epsilon=epsilon, delta=DELTA, seed=for_noise)
    return learner, CountPopulation(mdp, for_users), privatizer


def slowest_batch(learner: Learner, population: CountPopulation, privatizer: Privatizer) -> float:
    """The most processor seconds of a run in which the learner plans a batch and learns from it, without the users."""
    slowest = 0.0
    while learner.episodes_left:
        began = time.process_time()
        batch = learner.next_batch()
        planned = time.process_time() - began
        assert batch is not None
        release = privatizer.release(population.play(batch))
        began = time.process_time()
        learner.observe(release)
        slowest = max(slowest, planned + time.process_time() - began)
    return slowest
