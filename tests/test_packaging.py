"""Wheel and source distribution: what is in them, and that the wheel works where nothing else of ours is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shufflerl import __version__

ROOT = Path(__file__).parent.parent


@pytest.mark.slow(20)
def test_the_distributions(tmp_path: Path) -> None:
    """One test, as building and installing take long."""
    wheel, source = _built(tmp_path)
    _wheel_holds_the_package_alone(wheel)
    _source_holds_what_builds_and_tests_it(source)
    bare = _installed(wheel, tmp_path)
    _works(bare, tmp_path)
    _names_missing_extras(bare, tmp_path)


def _built(folder: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    (source,) = (folder / "dist").glob("*.tar.gz")
    return wheel, source


def _wheel_holds_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"shufflerl", f"shufflerl-{__version__}.dist-info"}
    tracked = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {name for name in names if name.startswith("shufflerl/")} == {
        path.relative_to(ROOT / "src").as_posix() for path in tracked
    }
    assert {"shufflerl/py.typed", "shufflerl/experiments/report.html"} <= set(names)
    assert "shufflerl/network/web/pages/coordinator.html" in names


def _source_holds_what_builds_and_tests_it(source: Path) -> None:
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile", "zensical.toml", "docs/index.md"}
    assert wanted | {"deploy/Dockerfile", "tests/test_packaging.py", "src/shufflerl/py.typed"} <= names
    assert not [name for name in names if name.startswith((".venv", "out", "site", "dist"))]


def _needed(name: str, extras: set[str], found: set[str]) -> set[str]:
    """Names of the distributions that one needs, itself among them."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return found
    found.add(key)
    for text in metadata.requires(name) or []:
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            _needed(need.name, set(need.extras), found)
    return found


def _installed(wheel: Path, folder: Path) -> Path:
    """The wheel in an environment of its own that has what it requires without extras, and nothing else.

    Requirements are links to this environment's copies, so that nothing is fetched; pip checks that they suffice.
    """
    place = folder / "bare"
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in _needed("shufflerl", set(), set()) - {"shufflerl"}:
        home = metadata.distribution(name)
        for top in {path.parts[0] for path in home.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(home.locate_file(top))).resolve())
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    for command in (["install", "--quiet", "--no-deps", "--no-index", str(wheel)], ["check"]):
        done = subprocess.run([*pip, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return place / "bin"


def test_the_network_extra_brings_what_its_nodes_play() -> None:
    """Without Gymnasium `shufflerl demo` would start all roles and then find that its nodes cannot play."""
    assert "gymnasium" in _needed("shufflerl", {"network"}, set())


def _run(bare: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the bare installation, from a folder without the repository."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [str(bare / arguments[0]), *arguments[1:]], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )


def _works(bare: Path, folder: Path) -> None:
    where = _run(bare, folder, "python", "-c", "import shufflerl; print(shufflerl.__file__)").stdout.strip()
    assert where.startswith(str(folder))
    assert _run(bare, folder, "shufflerl", "--version").stdout == f"{__version__}\n"
    figures = json.loads(_run(bare, folder, "shufflerl", "calibrate", "--epsilon", "1", "--json").stdout)
    assert 300 < figures["lambda"] < 310
    run = _run(bare, folder, "shufflerl", "run", "bandit", "--learner", "ucbvi", "--episodes", "50", "--json")
    assert json.loads(run.stdout)["episodes"] == 50


#: What needs an extra, and which.
NEEDY = {
    "network": [
        "demo",
        "shuffler",
        "coordinator",
        "node",
        "status",
        "policy",
        "keys x",
        "tokens x y",
        "transport --epsilon 1 --users 9",
    ],
    "experiments": ["sweep sweep.toml", "compare results", "reproduce --quick"],
    "plots": ["run riverswim --plot x.png"],
    "gymnasium": ["run gymnasium --env-param id=FrozenLake-v1 --env-param horizon=4"],
}


def _names_missing_extras(bare: Path, folder: Path) -> None:
    (folder / "sweep.toml").write_text((ROOT / "examples" / "sweep.toml").read_text())
    for extra, commands in NEEDY.items():
        for command in commands:
            done = _run(bare, folder, "shufflerl", *command.split())
            assert done.returncode == 1, command
            assert f"pip install 'shufflerl[{extra}" in done.stderr, f"{command}: {done.stderr}"
            assert "Traceback" not in done.stderr, command
    for module, extra in (
        ("shufflerl.network import Node", "network"),
        ("shufflerl.envs.gym import register", "gymnasium"),
    ):
        done = _run(bare, folder, "python", "-c", f"from {module}")
        assert done.stderr.splitlines()[-1].endswith(f"pip install 'shufflerl[{extra}]'")
