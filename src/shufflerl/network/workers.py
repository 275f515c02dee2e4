"""Processes that work for a role and end with it, however it ends: they hold keys, tokens and episodes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def pool(workers: int, niceness: int = 0) -> ProcessPoolExecutor:
    """A pool of new processes, so much nicer than this one; nothing is forked, so none inherits another's state."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(niceness,))


def _begin(niceness: int) -> None:
    """A pool's workers wait for work for ever if their parent is killed; these look after it.

    Ctrl-C reaches every process of a terminal, and is their parent's to answer.
    """
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
