"""Guards at the door: each returns the value in its canonical form or says what was wrong with it."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shufflerl.errors import InvalidInputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: How far a row of probabilities may be from summing to one before it is refused (rounding, not modelling).
SUM_TOLERANCE = 1e-8


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """A whole number in [least, most]."""
    expected = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidInputError(f"{name} is {value!r}; expected {expected}.") from None
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        raise InvalidInputError(f"{name} is {value!r}; expected {expected}.")
    return number


def real(name: str, value: Any, *, above: float = -math.inf, below: float = math.inf, closed: bool = False) -> float:
    """A finite number strictly between the bounds, or on them when `closed`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if (
        isinstance(value, bool)
        or not math.isfinite(number)
        or not (above <= number <= below if closed else above < number < below)
    ):
        brackets = "[]" if closed else "()"
        raise InvalidInputError(
            f"{name} is {value!r}; expected a finite number in {brackets[0]}{above:g}, {below:g}{brackets[1]}."
        )
    return number


def fraction(name: str, value: Any) -> float:
    """A number above 0 and at most 1."""
    if value == 1:
        return 1.0
    return real(name, value, above=0.0, below=1.0)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in allowed:
        raise InvalidInputError(f"{name} is {value!r}; expected one of: {', '.join(allowed)}.")
    return str(value)


def array(name: str, value: Any, shape: tuple[int, ...]) -> FloatArray:
    """A finite float array of the given shape; -1 stands for any positive length."""
    try:
        given = np.ascontiguousarray(value, dtype=np.float64)
    except (TypeError, ValueError) as reason:
        raise InvalidInputError(f"{name} is not an array of numbers: {reason}.") from None
    fits = given.ndim == len(shape) and all(want in (-1, have) for want, have in zip(shape, given.shape, strict=True))
    if not fits:
        wanted = tuple("any" if want == -1 else want for want in shape)
        raise InvalidInputError(f"{name} has shape {given.shape}; expected {wanted}.")
    if not np.isfinite(given).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(given))[0])
        raise InvalidInputError(f"{name}{list(where)} is {given[where]}; expected finite numbers.")
    return given


def probabilities(name: str, value: Any, shape: tuple[int, ...]) -> FloatArray:
    """An array whose last axis holds probability distributions."""
    given = array(name, value, shape)
    if (given < 0).any():
        where = tuple(int(i) for i in np.argwhere(given < 0)[0])
        raise InvalidInputError(f"{name}{list(where)} is {given[where]:g}; expected a probability, at least 0.")
    sums = given.sum(axis=-1)
    off = np.abs(sums - 1) > SUM_TOLERANCE
    if off.any():
        where = tuple(int(i) for i in np.argwhere(off)[0])
        raise InvalidInputError(
            f"{name}{list(where) if where else ''} sums to {float(sums[where]):.9g}; expected 1. "
            "Divide by the sum if the row holds weights."
        )
    return given


def frozen(values: NDArray[Any]) -> NDArray[Any]:
    """A read-only private copy, so that a value that has been checked stays checked."""
    copy = np.array(values, order="C", copy=True)
    copy.setflags(write=False)
    return copy
