"""How long tests wait for what should happen, and what they tell if it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Seconds. Only what never happens takes so long; on a loaded machine that has yet to compile, a minute is not enough.
PATIENCE = 300.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait for something to become true, and no longer than that."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {PATIENCE:.0f} seconds")


@contextmanager
def telling(*folders: Path) -> Iterator[None]:
    """Let a failure tell how the logs in these folders end."""
    try:
        yield
    except BaseException as failure:
        for log in sorted(log for folder in folders for log in folder.rglob("*.log")):
            failure.add_note(f"{log} ends:\n{log.read_text(errors='replace')[-2000:]}")
        raise
