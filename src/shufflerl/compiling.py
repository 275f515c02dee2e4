"""How inner loops are compiled: kernels, which stand in a module beside the one that calls them (`planning_kernels`).

Each takes and returns plain arrays, or named tuples of them; callers have checked the shapes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import event

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


#: How a file with kernels begins; others may import the clock of the compiler.
_DECORATORS = re.compile(r"^from shufflerl\.compiling import (?:\([^)]*|.*)\b(?:compiled|inlined)\b", re.MULTILINE)


def _sources_digest() -> bytes:
    """A digest of every file with kernels and of those that these import."""
    here = Path(__file__).parent
    texts = {
        ".".join(file.relative_to(here.parent).with_suffix("").parts): file.read_text("utf-8")
        for file in here.rglob("*.py")
    }
    kernels = [text for text in texts.values() if _DECORATORS.search(text)]
    names = set(re.findall(r"from (shufflerl\.[\w.]+)", "".join(kernels)))
    imported = [text for name, text in texts.items() if name in names or name.rpartition(".")[0] in names]
    return hashlib.sha256("\0".join(sorted(kernels + imported)).encode()).digest()


_STAMP = _sources_digest()


def compiled(function: Kernel) -> Kernel:
    """Compile with numba, cached on disk: only the first run on a machine waits for the compiler.

    A kernel holds the code of the kernels it calls, but numba's cache only looks at the file the kernel is in: all of
    our files are made a part of the version that it looks at first, before it reads of types that may be gone. Where
    this cannot be done (another numba, no place to write), nothing is cached: slow, not stale.

    A kernel whose name begins with an underscore is for kernels alone: a door from Python, which has to unpack named
    tuples of arrays, would take as long to compile as a small kernel. None needs one from C.
    """
    doors: dict[str, Any] = {"no_cpython_wrapper": function.__name__.startswith("_"), "no_cfunc_wrapper": True}
    try:
        kernel: Any = numba.njit(cache=True, error_model="numpy", **doors)(function)
        index = kernel._cache._cache_file
        index._version = (index._version, _STAMP)
    except (AttributeError, RuntimeError):
        kernel = numba.njit(error_model="numpy", **doors)(function)
    return cast(Kernel, kernel)


def inlined(function: Kernel) -> Kernel:
    """Compile into every caller: for the body of a hot loop, where a call would cost as much as the work."""
    return cast(Kernel, numba.njit(inline="always", error_model="numpy")(function))


@contextmanager
def compiler_clock() -> Iterator[Callable[[], float]]:
    """A clock of the seconds spent in numba, compiling kernels or loading them from its cache."""
    with event.install_listener("numba:compiler_lock", event.TimingListener()) as timer:  # type: ignore[no-untyped-call]
        yield lambda: float(timer.duration) if timer.done else 0.0


@contextmanager
def when_compiling(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` whenever a kernel has to be compiled, before that is done."""

    class Listener(event.Listener):
        def on_start(self, event: event.Event) -> None:
            notice()

        def on_end(self, event: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
