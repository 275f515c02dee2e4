"""Names to constructors: one registry per kind of thing, with suggestions for what was misspelt.

A name is one of ours, one that an installed package announces as an entry point, or "module:attribute", which is
imported from wherever Python looks and from the current folder. What is constructed so is a user's own.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

from shufflerl import checks
from shufflerl.errors import InvalidInputError, ShuffleRLError, UnknownNameError


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


class UserEntry(Entry):
    """A user's own constructor, which may not be there."""

    def __init__(self, location: str) -> None:
        super().__init__(location, "")

    def load(self) -> Callable[..., Any]:
        """Import the constructor; what goes wrong is the user's to mend."""
        here = str(Path.cwd())
        if here not in sys.path:  # installed commands do not look there by themselves, and neither do workers
            sys.path.append(here)
        try:
            constructor = super().load()
        except ShuffleRLError:
            raise
        except (ImportError, AttributeError, ValueError) as reason:
            raise UnknownNameError(
                f"Cannot import {self.location!r} ({reason}); expected module:attribute of a module that Python finds, "
                "such as one in the current folder."
            ) from None
        if not callable(constructor):
            raise InvalidInputError(f"{self.location} is {constructor!r}; expected a class or function to call.")
        return constructor

    @property
    def module(self) -> ModuleType:
        """The module it is in."""
        return sys.modules[self.load().__module__]


class Registry:
    """A table of constructors by name. Parameters after the first `given` ones are the user's, by keyword.

    What they construct is one of `makes`. Packages announce their own in the entry points of `group`.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, Entry],
        given: int,
        *,
        makes: tuple[type, ...] = (object,),
        group: str = "",
    ) -> None:
        self.kind = kind
        self._ours = dict(entries)
        self._given = given
        self._makes = makes
        self._group = group

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        installed = entry_points(group=self._group) if self._group else ()
        return {found.name: UserEntry(found.value) for found in installed} | self._ours

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    def entry(self, name: str) -> Entry:
        """Look a name up."""
        if isinstance(name, str) and ":" in name and name not in self._entries:
            return UserEntry(name)
        if not isinstance(name, str) or name not in self._entries:
            raise UnknownNameError(f"There is no {self.kind} {name!r}.{nearest(str(name), self._entries)}")
        return self._entries[name]

    def name(self, given: str | Callable[..., Any]) -> str:
        """The name of what is given, which may be a class or function itself: where every process finds it."""
        if isinstance(given, str) or not callable(given):
            return given
        location = f"{given.__module__}:{given.__qualname__}"
        try:
            found = UserEntry(location).load()
        except UnknownNameError:
            found = None
        if found is not given:
            raise InvalidInputError(
                f"The {self.kind} {given.__qualname__} cannot be found as {location}; define it at the top of a "
                "module, where other processes find it too."
            )
        return location

    def summary(self, name: str) -> str:
        """One sentence about it: the first of its docstring, if it is a user's own."""
        entry = self.entry(name)
        text = entry.summary or (inspect.getdoc(entry.load()) or "").partition("\n\n")[0]
        return " ".join(text.split())

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """The keyword parameters a user may set, with their defaults."""
        constructor = self.entry(name).load()
        try:
            signature = inspect.signature(constructor, eval_str=True)
        except NameError:  # an annotation that only the type checker can resolve
            signature = inspect.signature(constructor)
        rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = {key: value for key, value in signature.parameters.items() if value.kind not in rest}
        given = [key for key, value in known.items() if value.kind is not inspect.Parameter.KEYWORD_ONLY][: self._given]
        return {key: value for key, value in known.items() if key not in given}

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
        made = self.entry(name).load()(*given, **chosen)
        if not isinstance(made, self._makes):
            wanted = _wanted(self._makes)
            raise InvalidInputError(f"{self.kind} {name!r} made {made!r}; expected it to make a {wanted}.")
        return made

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
        alternatives = _kinds(self.parameter(name, key).annotation)
        if type(value) in alternatives:
            return value
        if int in alternatives and isinstance(value, float) and value.is_integer():
            return int(value)
        if float in alternatives and type(value) is int:
            return float(value)
        wanted = _wanted(kind for kind in alternatives if kind is not NoneType)
        raise InvalidInputError(f"parameter {key!r} of {self.kind} {name!r} is {value!r}; expected {wanted}.")

    def parameter(self, name: str, key: str) -> inspect.Parameter:
        """Look a parameter up."""
        known = self.parameters(name)
        if key not in known:
            raise UnknownNameError(f"{self.kind} {name!r} has no parameter {key!r}.{nearest(key, known)}")
        return known[key]


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation allows; whatever can be written on a command line where it does not say."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return (bool, int, float, str, NoneType)
    return getattr(annotation, "__args__", (annotation,))


def _parse(what: str, text: str, annotation: Any) -> Any:
    alternatives = _kinds(annotation)
    if NoneType in alternatives and text.lower() == "none":
        return None
    for kind in (kind for kind in (bool, int, float) if kind in alternatives):
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            continue
        with contextlib.suppress(ValueError):
            return checks.read_whole(text) if kind is int else float(text)
    if str in alternatives:
        return text
    raise InvalidInputError(f"{what} is {text!r}; expected {_wanted(alternatives)}.")


def _wanted(kinds: Iterable[Any]) -> str:
    return " or ".join("none" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds)
