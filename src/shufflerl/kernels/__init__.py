"""Compiled inner loops. Each takes and returns plain arrays; callers have checked the shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Compile with numba, cached on disk: only the first run on a machine waits for the compiler."""
    return cast(Kernel, numba.njit(cache=True, error_model="numpy")(function))


def inlined(function: Kernel) -> Kernel:
    """Compile into every caller: for the body of a hot loop, where a call would cost as much as the work."""
    return cast(Kernel, numba.njit(inline="always", error_model="numpy")(function))
