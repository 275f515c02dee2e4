"""What the reference shows beside docstrings: every field of a class, and examples as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function, Module, Object

_EXAMPLE = re.compile(r"^>>> .+?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Shown(Extension):
    """Completes docstrings when all modules are read."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Complete those of a package and all that is in it."""
        _complete(pkg)


def _complete(here: Object) -> None:
    if here.docstring is not None:
        here.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", here.docstring.value)
    if isinstance(here, Class) and (fields := _fields(here)):
        said = "" if here.docstring is None else here.docstring.value
        listed = "\n".join(fields)
        here.docstring = Docstring(f"{said}\n\n```python\n{listed}\n```", parent=here)
    for member in here.members.values():
        if isinstance(member, Object):
            _complete(member)


def _fields(here: Class) -> list[str]:
    """Fields with types, or with values where they have no type, that neither a docstring nor the signature shows."""
    made = here.members.get("__init__")
    shown = {one.name for one in made.parameters} if isinstance(made, Function) else set()
    return [
        f"{name}: {field.annotation}" if field.annotation is not None else f"{name} = {field.value}"
        for name, field in here.members.items()
        if isinstance(field, Attribute) and not name.startswith("_") and name not in shown and field.docstring is None
    ]
