"""Guards at the door: each returns the value in its canonical form or says what was wrong with it."""

from __future__ import annotations

import math
import operator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray
from shufflerl.errors import InvalidInputError

#: Tables of transitions above this size are refused before anything is allocated: a slip, not a problem to learn.
MAX_BYTES = 4 * 2**30

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
        # Python refuses to print whole numbers of thousands of digits.
        shown = repr(value) if abs(number) < 10**30 else f"about {'-' * (number < 0)}2^{number.bit_length()}"
        raise InvalidInputError(f"{name} is {shown}; expected {expected}.")
    return number


def read_whole(text: str | int) -> int:
    """A whole number as people write it, ValueError if it is none.

    >>> read_whole("20_000"), read_whole("1e4")
    (20000, 10000)
    """
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def real(name: str, value: Any, *, above: float = -math.inf, below: float = math.inf, closed: bool = False) -> float:
    """A finite number strictly between the bounds, or on them when `closed`."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
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
    try:
        number = real(name, value, above=0.0, below=1.0, closed=True)
    except InvalidInputError:
        number = 0.0
    if number == 0.0:
        raise InvalidInputError(f"{name} is {value!r}; expected a finite number in (0, 1].")
    return number


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in allowed:
        raise InvalidInputError(f"{name} is {value!r}; expected one of: {', '.join(allowed)}.")
    return str(value)


def web_address(name: str, value: Any) -> str:
    """An address such as https://shuffler.example, without a slash at its end."""
    try:
        parts = urlsplit(value)
        good = isinstance(value, str) and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and not (parts.username or parts.password or parts.query or parts.fragment)
    except (AttributeError, TypeError, ValueError):  # of other types, and of ports that are no numbers
        good = False
    if not good or any(character.isspace() for character in value):
        raise InvalidInputError(f"{name} is {value!r}; expected an address such as http://127.0.0.1:8742.")
    return str(value).rstrip("/")


def plain(name: str, value: Any, kind: type[np.generic] | None = None) -> NDArray[Any]:
    """An array of real numbers or truth values, of the given kind if there is one."""
    try:
        given = np.asarray(value, order="C")
        if np.iscomplexobj(given):
            raise TypeError("it holds complex numbers")
        return given if kind is None else given.astype(kind, copy=False)
    except (TypeError, ValueError, OverflowError) as reason:
        raise InvalidInputError(f"{name} is not an array of numbers: {reason}.") from None


def array(name: str, value: Any, shape: tuple[int, ...]) -> FloatArray:
    """A finite float array of the given shape; -1 stands for any positive length."""
    given: FloatArray = plain(name, value, np.float64)
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
        raise InvalidInputError(f"{name}{list(where)} is {given[where]:.9g}; expected a probability, at least 0.")
    sums = given.sum(axis=-1)
    off = np.abs(sums - 1) > SUM_TOLERANCE
    if off.any():
        where = tuple(int(i) for i in np.argwhere(off)[0])
        raise InvalidInputError(
            f"{name}{list(where) if where else ''} sums to {float(sums[where]):.9g}; expected 1. "
            "Divide by the sum if the row holds weights."
        )
    return given


def table_size(horizon: int, states: int, actions: int, branching: int | None = None) -> None:
    """Refuse transitions that no memory would hold, with `branching` next states per (h, x, a), or all states."""
    needed = 8 * max(1, horizon - 1) * states * actions * (branching or states)
    if needed > MAX_BYTES:
        raise InvalidInputError(
            f"{states:,} states, {actions:,} actions and {horizon:,} steps make a table of transitions of "
            f"{needed / 2**30:,.0f} GiB; expected at most {MAX_BYTES / 2**30:.0f} GiB. Use fewer of them."
        )


def frozen(values: NDArray[Any]) -> NDArray[Any]:
    """A read-only private copy, so that a value that has been checked stays checked."""
    copy = np.array(values, order="C", copy=True)
    copy.setflags(write=False)
    return copy
