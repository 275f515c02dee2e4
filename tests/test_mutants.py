"""The mutation run: which changes it makes, and that it knows the files and tests there are."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import ROOT, TESTS, _Finder, mutants_of

SOURCE = b'''"""Text."""
LEAST = 3


def kept(values: list[int] | None, most: float = 0.5) -> bool:
    """Text."""
    if values is None or len(values) <= LEAST:
        raise ValueError(f"There are {len(values or []) + 1}.")
    values.append(-1)
    return not min(values) * 2 < most
'''

CHANGES = [
    "LEAST = 4",
    "def kept(values: list[int] | None, most: float = 1.0) -> bool:",
    "if values is not None or len(values) <= LEAST:",
    "if values is None and len(values) <= LEAST:",
    "if values is None or len(values) < LEAST:",
    "if values is None or len(values) > LEAST:",
    "pass",
    "pass",
    "values.append(1)",
    "values.append(-2)",
    "return min(values) * 2 < most",
    "return not max(values) * 2 < most",
    "return not min(values) / 2 < most",
    "return not min(values) * 3 < most",
    "return not min(values) * 2 <= most",
    "return not min(values) * 2 >= most",
]


def test_operators_numbers_conditions_and_statements_are_changed_one_at_a_time() -> None:
    found = _Finder("file.py", SOURCE).found
    assert sorted(mutant.text.split("→ ")[1].strip("`") for mutant in found) == sorted(CHANGES)
    for mutant in found:
        changed = mutant.of(SOURCE)
        assert changed != SOURCE
        compile(changed, "file.py", "exec")


def test_files_and_their_tests_exist() -> None:
    for file, groups in TESTS.items():
        assert next(iter(mutants_of(file)), None) is not None
        for name in (name for group in groups for name in group):
            assert Path(ROOT, "tests", f"{name}.py").exists()
    rooms = {
        f"{room}/{path.name}"
        for room in ("privacy", "privatizers")
        for path in (ROOT / f"src/shufflerl/{room}").glob("*.py")
    }
    assert rooms - set(TESTS) == {"privacy/__init__.py"}
