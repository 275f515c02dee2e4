"""Names to constructors: one registry per kind of thing, with suggestions for what was misspelt."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from shufflerl.errors import InvalidInputError, UnknownNameError


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: what was probably meant, and what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names) or 'none'}."


@dataclass(frozen=True)
class Entry:
    """Where a constructor lives ("module:attribute", imported on first use) and one line about it."""

    location: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """Import the constructor."""
        module, _, attribute = self.location.partition(":")
        constructor: Callable[..., Any] = attrgetter(attribute)(import_module(module))
        return constructor


class Registry:
    """A table of constructors by name. Parameters after the first `given` ones are the user's, by keyword."""

    def __init__(self, kind: str, entries: Mapping[str, Entry], given: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._entries = dict(entries)
        self._given = given

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    def entry(self, name: str) -> Entry:
        """Look a name up."""
        if not isinstance(name, str) or name not in self._entries:
            raise UnknownNameError(f"There is no {self.kind} {name!r}.{nearest(str(name), self._entries)}")
        return self._entries[name]

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """The keyword parameters a user may set, with their defaults."""
        signature = inspect.signature(self.entry(name).load(), eval_str=True)
        return {key: value for key, value in signature.parameters.items() if key not in self._given}

    def describe(self, name: str) -> dict[str, Any]:
        """Its parameters as JSON values: the required ones by name, the others with their defaults."""
        known = self.parameters(name)
        required = [key for key, parameter in known.items() if parameter.default is parameter.empty]
        return {
            "required": required,
            "parameters": {key: parameter.default for key, parameter in known.items() if key not in required},
        }

    def make(self, name: str, /, *given: Any, **chosen: Any) -> Any:
        """Construct `name` from what the caller gives and what the user chose."""
        for key in chosen:
            self.parameter(name, key)
        for key in self.describe(name)["required"]:
            if key not in chosen:
                raise InvalidInputError(f"{self.kind} {name!r} needs the parameter {key!r}; give {key}=...")
        return self.entry(name).load()(*given, **chosen)

    def parse(self, name: str, assignments: Iterable[str]) -> dict[str, Any]:
        """Turn the command line's "key=value" strings into parameters of the types the constructor declares."""
        parsed: dict[str, Any] = {}
        for assignment in assignments:
            key, separator, text = assignment.partition("=")
            if not separator:
                raise InvalidInputError(f"{assignment!r} is not a parameter; write it as key=value.")
            if key in parsed:
                raise InvalidInputError(f"The parameter {key!r} of {self.kind} {name!r} is given twice; give it once.")
            kind = self.parameter(name, key).annotation
            parsed[key] = _parse(f"parameter {key!r} of {self.kind} {name!r}", text, kind)
        return parsed

    def check(self, name: str, key: str, value: Any) -> Any:
        """A parameter's value in the type the constructor declares; a number without fraction is a whole one."""
        annotation = self.parameter(name, key).annotation
        alternatives = getattr(annotation, "__args__", (annotation,))
        if type(value) in alternatives:
            return value
        if int in alternatives and isinstance(value, float) and value.is_integer():
            return int(value)
        if float in alternatives and type(value) is int:
            return float(value)
        wanted = _wanted(kind for kind in alternatives if kind is not type(None))
        raise InvalidInputError(f"parameter {key!r} of {self.kind} {name!r} is {value!r}; expected {wanted}.")

    def parameter(self, name: str, key: str) -> inspect.Parameter:
        """Look a parameter up."""
        known = self.parameters(name)
        if key not in known:
            raise UnknownNameError(f"{self.kind} {name!r} has no parameter {key!r}.{nearest(key, known)}")
        return known[key]


def _parse(what: str, text: str, annotation: Any) -> Any:
    alternatives = getattr(annotation, "__args__", (annotation,))
    if type(None) in alternatives and text.lower() == "none":
        return None
    for kind in (kind for kind in (bool, int, float) if kind in alternatives):
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            continue
        with contextlib.suppress(ValueError):
            return kind(text)
        with contextlib.suppress(ValueError):
            number = float(text)  # 1e6 is a whole number too
            if number.is_integer():
                return int(number)
    if str in alternatives:
        return text
    raise InvalidInputError(f"{what} is {text!r}; expected {_wanted(alternatives)}.")


def _wanted(kinds: Iterable[Any]) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
