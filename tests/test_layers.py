"""Who may import whom, and where tests stand.

Named is every module or package of `shufflerl`, and of its network, with all that it may import.
The lines stand in order: each names only what stands above it, so there is no cycle. Imports inside functions and those
for the type checker count like any other. What is loaded by name (registries, a learner's compiled loop) is no import.
"""

from __future__ import annotations

import ast
from pathlib import Path

import shufflerl

SOURCE = Path(shufflerl.__file__).parent
ROOT = Path(__file__).parents[1]

#: What everything above it may use: arrays, checks of input, errors, names, seeds, saved state.
BASIC = "arrays checks compiling errors html options registry seeding state"

MAY_IMPORT = {
    # What there is to learn, and what is asked of users.
    "layout": "",
    "planning_kernels": "layout",
    "policies": "",
    "mdp": "layout planning_kernels policies",
    "returns": "mdp policies",
    "planning": "layout mdp planning_kernels policies",
    "noise": "",
    "steps": "mdp policies",
    "counts": "layout mdp noise returns",
    # Learning: from releases alone. Nothing here can reach privacy, users or a network.
    "estimation": "counts mdp noise",
    "policy_sets": "planning",
    "coverage_kernels": "",
    "coverage": "coverage_kernels mdp planning policy_sets",
    "learners": "counts coverage estimation mdp noise policies policy_sets returns steps",
    # Privacy: knows no learner.
    "privacy": "counts mdp noise returns",
    "privatizers": "counts mdp noise privacy returns",
    # Simulation, where the three meet.
    "envs": "mdp policies returns steps",
    "population_kernels": "layout planning_kernels",
    "population": "counts mdp policies population_kernels returns steps",
    "history": "counts mdp planning",
    "loop": "history learners mdp population privatizers steps",
    "episodes_kernels": "layout learners planning_kernels population_kernels",
    "episodes": "episodes_kernels layout learners mdp population privatizers",
    "attacks": "counts mdp noise planning population privacy privatizers",
    "plots": "",
    "experiments": "attacks counts envs estimation history learners loop mdp noise planning plots population privacy "
    "privatizers steps",
    "results": "experiments",
    "testing": "counts envs history learners loop mdp population privatizers",
    # The network: no simulation, and no role knows another.
    "network.faults": "",
    "network.logs": "",
    "network.workers": "",
    "network.protocol": "counts envs mdp noise policies privacy returns steps",
    "network.stores": "network.faults network.logs network.protocol",
    "network.web": "network.logs network.protocol",
    "network.node": "counts envs network.protocol network.stores network.web network.workers policies privacy returns",
    "network.shuffler": "network.faults network.logs network.protocol network.stores network.web network.workers "
    "privacy",
    "network.coordinator": "counts learners mdp network.faults network.logs network.protocol network.stores "
    "network.web network.workers noise policies privacy returns",
    "network.config": "envs learners mdp network.coordinator network.node network.protocol network.shuffler privacy "
    "returns steps",
    "network.audit": "counts learners mdp network.coordinator network.node network.protocol network.shuffler "
    "network.stores privacy",
    "network.roles": "network.config network.coordinator network.logs network.node network.protocol "
    "network.shuffler network.stores network.web",
    "network.demo": "envs learners mdp network.protocol network.roles planning policies",
    "network.commands": "network.config network.demo network.node network.protocol network.roles privacy",
    "cli": "envs experiments learners network.audit network.commands privacy privatizers",
    "__main__": "cli",
}


def _unit(module: str) -> str:
    """The module or package of ours that a name is in; "" for `shufflerl` and its `network`, which hand out names."""
    parts = module.split(".")[1:]
    if parts[:1] == ["network"]:
        return ".".join(parts[:2]) if parts[1:] else ""
    return parts[0] if parts else ""


def _imports() -> dict[str, set[str]]:
    files = {".".join(file.relative_to(SOURCE.parent).with_suffix("").parts): file for file in SOURCE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        own = found.setdefault(_unit(module), set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} has a relative import, which this test does not follow"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                own |= {_unit(name if name in modules else str(node.module)) for name in names if _ours(name)}
            elif isinstance(node, ast.Import):
                own |= {_unit(alias.name) for alias in node.names if _ours(alias.name)}
    return {unit: imported - {unit, ""} for unit, imported in found.items() if unit}


def _ours(name: str) -> bool:
    return name.partition(".")[0] == "shufflerl"


def test_every_package_imports_only_what_it_may() -> None:
    basic = set(BASIC.split())
    for unit, imported in _imports().items():
        allowed = {"arrays", "checks", "errors"} - {unit} if unit in basic else {*MAY_IMPORT[unit].split(), *basic}
        assert imported <= allowed, f"{unit} must not import {imported - allowed}"


def test_what_may_be_imported_has_no_cycle_and_is_used() -> None:
    above: set[str] = set()
    imports = _imports()
    for unit, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, f"{unit} may import {set(allowed.split()) - above}, which stand below it"
        assert set(allowed.split()) <= imports.get(unit, set()), f"{unit} does not import all that it may"
        above.add(unit)
    assert above | set(BASIC.split()) == imports.keys()


#: Tests of what is no module, by what they are of.
NO_MODULE = {
    "tests/test_deploy.py": "deploy",
    "tests/test_docs.py": "docs",
    "tests/test_layers.py": "src",
    "tests/test_mutants.py": "tests/mutants.py",
    "tests/test_packaging.py": "pyproject.toml",
    "tests/test_pages.py": "tests/pages.py",
    "tests/test_peers.py": "docs/peers.md",
    "tests/test_readme.py": "README.md",
}


def _subjects(test: Path) -> list[Path]:
    """What a test file may be of: `a/test_b_c.py` of a/b_c or a/b, where c says which side of b; or of all of a."""
    words = test.stem.removeprefix("test_").split("_")
    outside = test.parts[0] in ("bench", "examples")
    folder = (ROOT if outside else SOURCE) / test.parent
    names = ["_".join(words[:length]) for length in range(len(words), 0, -1)]
    return [folder / name for name in names] + [folder.parent / name for name in names if name == folder.name]


def test_tests_stand_where_their_subjects_do() -> None:
    """But for tests of a whole network, of several roles at once, which are in `tests/network/system`."""
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        name, place = str(test.relative_to(ROOT)), test.relative_to(ROOT / "tests")
        if place.is_relative_to("network/system"):
            continue
        found = [path for path in _subjects(place) if path.exists() or path.with_suffix(".py").exists()]
        assert bool(found) is not (name in NO_MODULE), f"{name} is of no module, package or example of that name"
    assert all((ROOT / subject).exists() for subject in NO_MODULE.values())
    assert all((ROOT / name).exists() for name in NO_MODULE)
