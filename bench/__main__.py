"""`python -m bench [names...]`: run benchmarks, print their figures, save them to out/bench.json.

Exits with 0 even when a target is missed: benchmarks report, tests assert.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import (
    batch,
    dashboard,
    nats,
    network,
    one_step,
    optimistic,
    poisoning,
    policy_search,
    privacy,
    projection,
    sdp_pe,
    startup,
    transports,
    ucbvi,
    values,
)
from bench.measure import Figure, SkippedError

#: Every benchmark: a function that returns figures, or raises SkippedError.
BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    "ucbvi": ucbvi.run,
    "batch": batch.run,
    "values": values.run,
    "startup": startup.run,
    "privacy": privacy.run,
    "sdp-pe": sdp_pe.run,
    "optimistic": optimistic.run,
    "network": network.run,
    "dashboard": dashboard.run,
    "transports": transports.run,
    "nats": nats.run,
    "poisoning": poisoning.run,
    "policy-search": policy_search.run,
    "one-step": one_step.run,
    "projection": projection.run,
}

RESULTS = Path("out/bench.json")


def main() -> None:
    """Run the benchmarks named on the command line, all by default."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Figures against peers and limits.")
    parser.add_argument("names", nargs="*", help="benchmarks to run; all by default")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    console = Console()
    if not console.is_terminal:
        console.width = 140
    if arguments.list:
        for name, benchmark in BENCHMARKS.items():
            console.print(f"{name:10} {inspect.getdoc(benchmark)}")
        return
    report(console, {name: BENCHMARKS[name] for name in arguments.names or BENCHMARKS})


def report(console: Console, benchmarks: dict[str, Callable[[], list[Figure]]]) -> None:
    """Run, print and save."""
    machine = facts()
    figures: dict[str, list[Figure]] = {}
    skipped: dict[str, str] = {}
    for name, benchmark in benchmarks.items():
        console.print(f"{name} ...")
        try:
            figures[name] = benchmark()
        except SkippedError as reason:
            skipped[name] = str(reason)

    table = Table("benchmark", "what", "ours", "peer or limit", "ratio", "target", "")
    for name, rows in figures.items():
        for row in rows:
            verdict = "[green]reached[/]" if row.reached else "[bold red]missed[/]"
            peer = f"{number(row.peer)} ({row.peer_name})"
            ours = f"{number(row.ours)} {row.unit}"
            table.add_row(name, row.what, ours, peer, number(row.ratio), row.target, verdict)
    console.print(table)
    for name, why in skipped.items():
        console.print(f"[bold yellow]skipped[/] {name}: {why}")
    every = [row for rows in figures.values() for row in rows]
    missed = sum(not row.reached for row in every)
    console.print(f"{len(every) - missed} of {len(every)} targets reached, {missed} missed, {len(skipped)} skipped.")
    saved = {name: [asdict(row) | {"ratio": row.ratio} for row in rows] for name, rows in figures.items()}
    save({"machine": machine, "figures": saved, "skipped": skipped})
    console.print(f"Saved to {RESULTS}.")


def facts() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    packages = {name: version(name) for name in ("shufflerl", "numpy", "numba")}
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **packages,
    }


def save(results: dict[str, Any]) -> None:
    """Write the results whole or not at all."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    unfinished = RESULTS.with_suffix(".tmp")
    unfinished.write_text(json.dumps(results, indent=2) + "\n")
    unfinished.replace(RESULTS)


def number(value: float) -> str:
    """Three significant digits, or whole thousands."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
