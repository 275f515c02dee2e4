"""A sweep file: TOML in, cells out. Whatever is wrong in it is refused with the file, the key and what was meant.

The cells are all combinations of environments, learners, privatizers, budgets, episodes and seeds. `docs/sweeps.md`
describes every key and `examples/sweep.toml` shows them.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shufflerl import checks
from shufflerl.envs import ENVIRONMENTS
from shufflerl.errors import InvalidInputError
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.setting import Setting, prepare
from shufflerl.learners import LEARNERS
from shufflerl.mdp import MAX_EPISODES
from shufflerl.privacy.accounting import Budget
from shufflerl.privatizers import PRIVATIZERS
from shufflerl.registry import Registry, nearest

DELTA = 1e-5

#: A slip, not a sweep: refused before a list of so many is made.
MAX_CELLS = 1_000_000

_KEYS = ("episodes", "seeds", "first_seed", "budgets", "environments", "learners", "privatizers")


@dataclass(frozen=True)
class _Choice:
    """A name with one choice of its parameters; `privatizers` are the names it goes with, None for all."""

    where: str
    name: str
    parameters: dict[str, Any]
    privatizers: tuple[str, ...] | None = None

    def goes_with(self, privatizer: str) -> bool:
        return self.privatizers is None or privatizer in self.privatizers


class _File:
    """A file's contents with their key paths, for errors that say where."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.content = tomllib.load(file)
        except OSError as reason:
            raise InvalidInputError(f"Cannot read the sweep file {path}: {reason.strerror}.") from None
        except UnicodeDecodeError as reason:
            raise InvalidInputError(f"{path} is not a text in UTF-8 ({reason}); save it as one.") from None
        except tomllib.TOMLDecodeError as reason:
            raise InvalidInputError(f"{path} is not valid TOML: {reason}.") from None

    def wrong(self, where: str, what: str) -> InvalidInputError:
        return InvalidInputError(f"{self.path}: {where}: {what}")

    def checked(self, where: str, check: Callable[..., Any], *values: Any, **bounds: Any) -> Any:
        """What `check` returns; what it refuses is refused with file and key."""
        try:
            return check(*values, **bounds)
        except InvalidInputError as error:
            raise self.wrong(where, str(error)) from None

    def table(self, where: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(where, f"is {value!r}; expected a table.")
        for key in value:
            if key not in keys:
                place = f"{where}.{key}" if where else key
                raise self.wrong(place, f"There is no key {key!r} here.{nearest(key, keys)}")
        return value

    def several(self, where: str, value: Any) -> list[tuple[str, Any]]:
        """A value or a list of them, each with its place."""
        if not isinstance(value, list):
            return [(where, value)]
        if not value:
            raise self.wrong(where, "is empty; give at least one.")
        return [(f"{where}[{index}]", item) for index, item in enumerate(value)]


def read(path: str | Path) -> list[Cell]:
    """The cells of a sweep file: environments, then learners, privatizers, budgets, episodes, and seeds fastest."""
    file = _File(Path(path))
    content = file.table("", file.content, _KEYS)
    for key in ("episodes", "environments", "learners", "privatizers"):
        if key not in content:
            raise file.wrong(key, "is missing; every sweep needs it.")
    episodes = [
        file.checked(where, checks.whole, "it", _integral(value), least=1, most=MAX_EPISODES)
        for where, value in file.several("episodes", content["episodes"])
    ]
    environments = list(_choices(file, "environments", ENVIRONMENTS))
    learners = list(_choices(file, "learners", LEARNERS))
    privatizers = list(_choices(file, "privatizers", PRIVATIZERS))
    seeds = _seeds(file, content)
    budgets = _budgets(file, content, private=any(choice.name != "none" for choice in privatizers))
    _check_pairs(file, learners, privatizers)
    combinations = [
        (environment, learner, privatizer, budget, count)
        for environment, learner, privatizer in itertools.product(environments, learners, privatizers)
        if learner.goes_with(privatizer.name)
        for budget in ([None] if privatizer.name == "none" else budgets)
        for count in episodes
    ]
    if len(combinations) * len(seeds) > MAX_CELLS:
        raise file.wrong(
            "seeds", f"they make {len(combinations) * len(seeds):,} cells; expected at most {MAX_CELLS:,}."
        )
    settings = [
        Setting(
            env=environment.name,
            learner=learner.name,
            privatizer=privatizer.name,
            episodes=count,
            epsilon=None if budget is None else budget.epsilon,
            delta=None if budget is None else budget.delta,
            env_parameters=environment.parameters,
            learner_parameters=learner.parameters,
            privatizer_parameters=privatizer.parameters,
        )
        for environment, learner, privatizer, budget, count in combinations
    ]
    for (*choices, _, _), setting in zip(combinations, settings, strict=True):
        where = ", ".join(choice.where for choice in choices)
        file.checked(where, prepare, setting, seeds[0])
    cells = [Cell(setting, seed) for setting in settings for seed in seeds]
    seen: set[str] = set()
    for cell in cells:
        if cell.key in seen:
            raise InvalidInputError(f"{file.path}: the cell '{cell}' occurs twice; remove what is listed twice.")
        seen.add(cell.key)
    return cells


def _integral(value: Any) -> Any:
    """TOML writes 1e6 as a fraction; it is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_pairs(file: _File, learners: list[_Choice], privatizers: list[_Choice]) -> None:
    """Whatever is listed must be used by some setting."""
    known = {choice.name for choice in privatizers}
    for learner in learners:
        for name in learner.privatizers or ():
            if name not in known:
                raise file.wrong(
                    f"{learner.where}.privatizers", f"{name!r} is not in privatizers.{nearest(name, known)}"
                )
    for privatizer in privatizers:
        if not any(learner.goes_with(privatizer.name) for learner in learners):
            raise file.wrong(privatizer.where, f"no learner goes with {privatizer.name!r}; drop it, or let one do so.")


def _seeds(file: _File, content: dict[str, Any]) -> list[int]:
    """`seeds` is how many, from `first_seed` on, or a list of them."""
    value = content.get("seeds", 1)
    if isinstance(value, list):
        if "first_seed" in content:
            raise file.wrong("first_seed", "goes with a number of seeds, and seeds is a list; drop one of them.")
        return [file.checked(where, checks.whole, "it", seed, least=0) for where, seed in file.several("seeds", value)]
    count = file.checked("seeds", checks.whole, "it", _integral(value), least=1, most=MAX_CELLS)
    first = file.checked("first_seed", checks.whole, "it", content.get("first_seed", 0), least=0)
    return list(range(first, first + count))


def _budgets(file: _File, content: dict[str, Any], *, private: bool) -> list[Budget]:
    if "budgets" not in content:
        if private:
            raise file.wrong("budgets", "is missing; privacy needs one, such as: budgets = { epsilon = [1.0] }")
        return []
    if not private:
        raise file.wrong("budgets", "no privatizer here takes a budget; drop it, or add a private one.")
    table = file.table("budgets", content["budgets"], ("epsilon", "delta"))
    if "epsilon" not in table:
        raise file.wrong("budgets.epsilon", "is missing; give a number or a list, such as [0.1, 1.0].")
    delta = file.checked("budgets.delta", _number, table.get("delta", DELTA), above=0.0, below=1.0)
    file.checked("budgets.delta", Budget, 1.0, delta)
    return [
        file.checked(where, Budget, file.checked(where, _number, value, above=0.0), delta)
        for where, value in file.several("budgets.epsilon", table["epsilon"])
    ]


def _number(value: Any, above: float, below: float = math.inf) -> float:
    """A number, and not a text that reads like one."""
    if isinstance(value, str):
        raise InvalidInputError(f"it is {value!r}; expected a number.")
    return checks.real("it", value, above=above, below=below)


def _choices(file: _File, kind: str, registry: Registry) -> Iterator[_Choice]:
    """Every choice of parameters of every entry; a parameter with a list stands for each of its items."""
    keys = ("name", "parameters", "privatizers") if kind == "learners" else ("name", "parameters")
    entries = file.content[kind]
    if not isinstance(entries, list):
        raise file.wrong(kind, f"is {entries!r}; expected a list of names, or of tables written as [[{kind}]].")
    for where, value in file.several(kind, entries):
        entry = {"name": value} if isinstance(value, str) else file.table(where, value, keys)
        if "name" not in entry:
            raise file.wrong(f"{where}.name", f"is missing; say which {registry.kind}.")
        file.checked(f"{where}.name", registry.entry, entry["name"])
        yield from _grid(file, where, registry, entry)


def _grid(file: _File, where: str, registry: Registry, entry: dict[str, Any]) -> Iterator[_Choice]:
    name, allowed = entry["name"], None
    if "privatizers" in entry:
        names = file.several(f"{where}.privatizers", entry["privatizers"])
        for place, privatizer in names:
            file.checked(place, PRIVATIZERS.entry, privatizer)
        allowed = tuple(privatizer for _, privatizer in names)
    given = entry.get("parameters", {})
    if not isinstance(given, dict):
        raise file.wrong(f"{where}.parameters", f"is {given!r}; expected a table.")
    for key in given:
        file.checked(f"{where}.parameters.{key}", registry.parameter, name, key)
    columns = [
        [
            file.checked(place, registry.check, name, key, value)
            for place, value in file.several(f"{where}.parameters.{key}", values)
        ]
        for key, values in given.items()
    ]
    for key in registry.describe(name)["required"]:
        if key not in given:
            raise file.wrong(f"{where}.parameters.{key}", f"is missing; {registry.kind} {name!r} needs it.")
    for choice in itertools.product(*columns):
        yield _Choice(where, name, dict(zip(given, choice, strict=True)), allowed)
