"""Processes that work for a role and end with it, however it ends: they hold keys, tokens and episodes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def pool(workers: int, niceness: int = 0) -> ProcessPoolExecutor:
    """A pool of new processes, so much nicer than this one; nothing is forked, so none inherits another's state."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(niceness,))


def _begin(niceness: int) -> None:
    """A pool's workers wait for work for ever if their parent is killed; these look after it.

    Ctrl-C, and whoever ends a whole group of processes, is their parent's to answer: they form groups of their own.
    """
    os.nice(niceness)
    os.setsid()

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
