"""Results of sweeps as one Arrow table, which every data tool takes from there.

results.load("out/sweep").to_pandas()
polars.from_arrow(results.load("out/sweep"))
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from shufflerl.experiments import store

KINDS = ("env", "learner", "privatizer")


def load(folder: str | Path) -> pa.Table:
    """A finished sweep, a row per run; each parameter has a column of its own, such as `learner.batches`."""
    table = store.load(folder)
    for kind in KINDS:
        rows = [json.loads(text) for text in table[f"{kind}_parameters"].to_pylist()]
        for name in dict.fromkeys(name for row in rows for name in row):
            table = table.append_column(f"{kind}.{name}", pa.array([row.get(name) for row in rows]))
    return table
