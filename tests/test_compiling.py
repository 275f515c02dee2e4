"""How kernels are compiled and cached."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

from shufflerl import compiling
from shufflerl.population_kernels import draw_one

CONSTANT = """
from typing import NamedTuple

VALUE = {value}

class {kind}(NamedTuple):
    part: int

KIND = {kind}
"""
CALLEE = """
from shufflerl.compiling import compiled, inlined
from shufflerl.constant import VALUE

@compiled
def called():
    return {value} * VALUE

@inlined
def pasted():
    return {value} * VALUE
"""
CALLER = """
from shufflerl.compiling import compiled
from shufflerl.callee import called, pasted

@compiled
def total(kind):
    return called() + pasted() + kind.part
"""
PROGRAM = """
from shufflerl.caller import total
from shufflerl.constant import KIND
print(total(KIND(0)), sum(total.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_changed_callee_is_never_served_from_the_cache(tmp_path: Path) -> None:
    """A package of the same name with our decorators and three files, two of which are edited between runs."""
    package = tmp_path / "shufflerl"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(str(compiling.__file__), package)
    (package / "caller.py").write_text(CALLER)

    (package / "clock.py").write_text(
        "from shufflerl.compiling import compiler_clock\nfrom shufflerl.page import TITLE\n"
    )

    def run(value: int, constant: int, title: str = "", kind: str = "Kind") -> list[int]:
        (package / "page.py").write_text(f"TITLE = {title!r}")
        (package / "callee.py").write_text(CALLEE.format(value=value))
        (package / "constant.py").write_text(CONSTANT.format(value=constant, kind=kind))
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    assert run(1, 1) == [2, 0]
    assert run(1, 1) == [2, 1], "an unchanged kernel comes from the cache"
    assert run(1, 1, "other") == [2, 1], "nor does a file that no kernel sees matter"
    assert run(10, 1) == [20, 0]
    assert run(10, 2) == [40, 0], "a constant of another file is compiled in too"
    assert run(10, 2, kind="Other") == [40, 0], "nor does a cache that knows a type by its former name"


@pytest.mark.parametrize("trouble", [AttributeError("no _cache"), RuntimeError("no place to write")])
def test_without_a_cache_that_can_be_trusted_there_is_none(trouble: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def strange(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise trouble
        return njit(**options)

    monkeypatch.setattr(compiling, "numba", SimpleNamespace(njit=strange))
    kernel: Any = compiling.compiled(lambda x: x + 1)
    assert kernel(1) == 2
    assert not kernel.stats.cache_path


def test_time_in_the_compiler_is_told_and_announced() -> None:
    notices: list[str] = []
    with compiling.compiler_clock() as seconds, compiling.when_compiling(lambda: notices.append("compiling")):
        fresh = numba.njit(lambda x: x + 1)
        assert (seconds(), notices) == (0.0, [])
        fresh(1)
        once = seconds()
        assert once > 0
        assert notices == ["compiling"]
        fresh(2)
        assert (seconds(), notices) == (once, ["compiling"])


def test_a_draw_never_falls_on_what_cannot_happen() -> None:
    """Rounding may leave the sum of the probabilities below the drawn number: exaggerated here."""
    rng = np.random.default_rng(0)
    for law, only in (([0.3, 0.0], 0), ([0.0, 0.3, 0.0, 0.0], 1), ([0.0, 0.0, 0.3], 2)):
        assert {draw_one(rng, np.array(law)) for _ in range(100)} == {only}
