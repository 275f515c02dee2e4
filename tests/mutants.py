"""Mutants: one small change at a time to what privacy rests on, to see whether a test notices (`make mutants`).

A script of our own, because a run must fit an evening on two cores: it draws a sample of each file, runs only the
tests of the file that was changed, nearest first, and can be stopped and taken up again. mutmut and cosmic-ray run
everything for each mutant, keep their state in a cache of their own, and change messages as often as arithmetic.

Changed are operators, comparisons, conditions, numbers, `min`, `max`, `any`, `all`, roundings and whole statements;
never texts, types, or what is raised. Everything happens in a copy of the tree. Mutants that survive and were judged
are listed in `tests/mutants.md`; one that survives and is not there is reported, and the run fails.

    python -m tests.mutants --most 100 --files noise privatizers
    python -m tests.mutants --survivors     # try those again that survived last time
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
JUDGED = Path(__file__).with_name("mutants.md")
RESULTS = ROOT / "out" / "mutants.jsonl"

_FORK = multiprocessing.get_context("fork")
# What takes long to import and is not ours, once for all mutants.
_IMPORTED = [
    importlib.import_module(name)
    for name in (
        "cryptography.hazmat.primitives.hpke",
        "dp_accounting.pld.pld_pmf",
        "gymnasium",
        "httpx2",
        "hypothesis.strategies",
        "numba",
        "prometheus_client",
        "schemathesis",
        "scipy.optimize",
        "scipy.stats",
        "starlette.applications",
        "uvicorn",
    )
]

#: Each file and its tests, beside its own examples: the first must let a mutant live before the next are run.
TESTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "privacy/accounting.py": (
        ("privacy/test_accounting", "privacy/test_accounting_rounding"),
        ("privacy/test_ledger", "privacy/test_certificate"),
    ),
    "privacy/audit/auditing.py": (
        ("privacy/audit/test_users", "privacy/audit/test_servers"),
        ("network/test_audit", "network/test_audit_servers"),
    ),
    "privacy/audit/bench.py": (("privacy/audit/test_users", "privacy/audit/test_servers"), ("network/test_audit",)),
    "privacy/audit/observers.py": (("privacy/audit/test_users", "privacy/audit/test_servers"), ("network/test_audit",)),
    "privacy/audit/servers.py": (("privacy/audit/test_servers",), ("network/test_audit_servers",)),
    "privacy/audit/statistics.py": (("privacy/audit/test_statistics",), ("privacy/audit/test_users",)),
    "privacy/audit/users.py": (("privacy/audit/test_users",), ("network/test_audit",)),
    "privacy/loss.py": (
        ("privacy/test_accounting", "privacy/test_accounting_rounding"),
        ("privacy/test_ledger", "privacy/test_certificate"),
    ),
    "privacy/certificate.py": (("privacy/test_certificate",),),
    "privacy/ledger.py": (("privacy/test_ledger", "privacy/test_ledger_file"),),
    "noise/bits.py": (("test_noise",), ("privatizers/test_privatizers_noise",)),
    "noise/laplace.py": (("test_noise",), ("privatizers/test_privatizers_noise",)),
    "noise/law.py": (("test_noise",), ("privatizers/test_privatizers_noise",)),
    "noise/real_valued.py": (("test_noise",), ("privatizers/test_privatizers_noise",)),
    "privacy/mechanism.py": (
        ("privatizers/test_privatizers_noise",),
        ("privatizers/test_privatizers", "privacy/test_certificate", "network/protocol/test_agreement"),
        ("learners/optimistic/test_query",),
    ),
    "privacy/protocol.py": (("privacy/test_protocol",),),
    "privacy/randomness.py": (("privacy/test_randomness",),),
    "privacy/sizing.py": (("privacy/test_certificate",), ("test_cli",)),
    "privatizers/__init__.py": (("privatizers/test_privatizers",),),
    "privatizers/base.py": (("privatizers/test_privatizers_noise",), ("privatizers/test_privatizers",)),
    "privatizers/central.py": (("privatizers/test_privatizers_noise",), ("privatizers/test_privatizers",)),
    "privatizers/local.py": (("privatizers/test_privatizers_noise",), ("privatizers/test_privatizers",)),
    "privatizers/none.py": (("privatizers/test_privatizers",), ("test_loop",)),
    "privatizers/shuffle.py": (("privatizers/test_privatizers_noise",), ("privatizers/test_privatizers",)),
    "network/protocol/agreement.py": (
        ("network/protocol/test_agreement", "network/protocol/test_masking", "network/protocol/test_wire_lengths"),
        (
            "network/node/test_node",
            "network/node/test_fleet",
            "network/system/test_returns",
            "network/system/test_steps",
        ),
        ("network/coordinator/test_coordinator", "network/shuffler/test_summing"),
    ),
    "network/node/composing.py": (
        ("network/node/test_fleet",),
        (
            "network/node/test_node",
            "network/shuffler/test_summing",
            "network/protocol/test_wire_lengths",
            "network/test_audit",
        ),
    ),
    **dict.fromkeys(
        ("network/coordinator/coordinator.py", "network/coordinator/run.py", "network/coordinator/store.py"),
        (
            ("network/coordinator/test_coordinator", "network/coordinator/test_opening"),
            (
                "network/coordinator/test_dashboard",
                "network/shuffler/test_summing",
                "network/shuffler/test_summing_simulation",
                "network/web/test_http",
            ),
        ),
    ),
    "network/node/fleet.py": (("network/node/test_fleet",), ("network/system/test_processes",)),
    "network/protocol/masking.py": (
        ("network/protocol/test_masking", "network/protocol/test_wire_lengths"),
        ("network/coordinator/test_opening", "network/shuffler/test_summing"),
    ),
    "network/shuffler/dummies.py": (("network/system/test_servers_noise",), ("network/test_audit_servers",)),
    "network/shuffler/mixing.py": (("network/shuffler/test_mixing",), ("network/shuffler/test_shuffler",)),
    "network/node/node.py": (
        ("network/node/test_node",),
        ("network/system/test_device", "network/system/test_processes"),
    ),
    "network/coordinator/opening.py": (
        ("network/coordinator/test_coordinator", "network/coordinator/test_opening"),
        ("network/shuffler/test_summing",),
    ),
    "network/node/reporting.py": (
        (
            "network/protocol/test_agreement",
            "network/protocol/test_masking",
            "network/protocol/test_wire_lengths",
            "network/node/test_reporting",
        ),
        ("network/protocol/test_wire", "network/system/test_device"),
        ("network/coordinator/test_coordinator", "network/shuffler/test_summing", "network/test_audit"),
    ),
    "network/shuffler/shuffler.py": (
        ("network/shuffler/test_shuffler", "network/shuffler/test_mixing"),
        (
            "network/shuffler/test_summing",
            "network/protocol/test_wire_lengths",
            "network/shuffler/test_shuffler_simulation",
        ),
    ),
}

_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
_COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    """A file with some bytes replaced, and how that reads."""

    file: str
    line: int
    start: int
    end: int
    new: bytes
    text: str

    def of(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.new + source[self.end :]

    def key(self, source: bytes) -> str:
        """What tells it from others, as long as the file stays as it is."""
        return hashlib.sha256(source + repr((self.file, self.start, self.end, self.new)).encode()).hexdigest()[:16]


class _Finder(ast.NodeVisitor):
    """All mutants of a file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.names: list[str] = []
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        place: ast.expr = node  # type: ignore[assignment]
        assert place.end_lineno is not None
        assert place.end_col_offset is not None
        first, last = self.starts[place.lineno - 1], self.starts[place.end_lineno - 1]
        return first + place.col_offset, last + place.end_col_offset

    def _add(self, start: int, end: int, new: str) -> None:
        """Replace bytes; it reads as the lines in which they are, before and after."""
        first = self.source.rfind(b"\n", 0, start) + 1
        last = (self.source + b"\n").index(b"\n", end)
        old = self.source[first:last]
        shown = (
            " ".join(piece.decode().split())
            for piece in (old, self.source[first:start] + new.encode() + self.source[end:last])
        )
        text = f"`{self.file}` `{'.'.join(self.names) or 'module'}`: `{'` → `'.join(shown)}`"
        self.found.append(Mutant(self.file, self.source.count(b"\n", 0, start) + 1, start, end, new.encode(), text))

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace an operator between its operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        places = [m.start() for m in re.finditer(rf"(?<!\w){re.escape(old)}(?!\w)", self.source[start:end].decode())]
        if len(places) == 1:
            self._add(start + places[0], start + places[0] + len(old), new)

    def _named(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _named  # type: ignore[assignment]

    def _skipped(self, node: ast.AST) -> None:
        """Texts and assertions for the type checker."""

    visit_JoinedStr = visit_Assert = visit_Import = visit_ImportFrom = _skipped

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(*self._span(node), "pass")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(*self._span(node), "pass")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Yield):
            if isinstance(node.value, ast.Call):
                self._add(*self._span(node), "pass")
            self.generic_visit(node)

    def _tested(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node.test, ast.Name | ast.Call | ast.Attribute):
            start, end = self._span(node.test)
            self._add(start, end, f"not ({self.source[start:end].decode()})")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _tested

    def visit_BinOp(self, node: ast.BinOp) -> None:
        of_text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
        if type(node.op) in _ARITHMETIC and not of_text:
            self._between(node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands[:-1], operands[1:], strict=True):
            old, others = _COMPARISONS[type(operator)]
            for new in others:
                self._between(left, right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values[:-1], node.values[1:], strict=True):
            self._between(left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(self._span(node)[0], self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(*self._span(node), repr(not value))
        elif isinstance(value, int):
            self._add(*self._span(node), repr(value + 1))
        elif isinstance(value, float):
            self._add(*self._span(node), repr(2 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _NAMES:
            end = self._span(node.func)[1]
            self._add(end - len(name), end, _NAMES[name])
        if name == "isinstance":
            self.visit(node.args[0])
        elif name != "warn":
            self.generic_visit(node)


def mutants_of(file: str) -> Iterator[tuple[str, Mutant]]:
    """Every mutant of a file that is still Python, by its key."""
    source = (ROOT / "src/shufflerl" / file).read_bytes()
    for mutant in _Finder(file, source).found:
        try:
            compile(mutant.of(source), file, "exec")
        except SyntaxError:
            continue
        yield mutant.key(source), mutant


class _Quickest:
    """Runs those tests first that took least when nothing was changed: some of them mostly notices."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.took: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.took.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.took.setdefault(report.nodeid, report.duration)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.took))


class Copy:
    """A copy of the tree in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        unneeded = shutil.ignore_patterns(".*", "out", "site", "dist")
        self.folder = Path(shutil.copytree(ROOT, folder / "tree", ignore=unneeded))
        self.limits: dict[tuple[str, ...], float] = {}

    def fails(self, tests: tuple[str, ...], limit: float = math.inf) -> bool:
        """Whether some test notices, be it by never ending: by seconds of the processor, or five times as many."""
        process = _FORK.Process(target=self._test, args=(tests, limit))
        process.start()
        process.join(5 * limit if limit < math.inf else None)
        with contextlib.suppress(ProcessLookupError):  # and what it left behind
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return process.exitcode != 0

    def _test(self, tests: tuple[str, ...], limit: float) -> None:
        """In a process of its own that has all imported but what is tested: that is most of the time a test takes.

        Without a limit nothing is changed, and what was compiled is kept for those to come.
        """
        os.setsid()
        sys.dont_write_bytecode = limit < math.inf
        if limit < math.inf:
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
        os.chdir(self.folder)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.environ |= {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path[:0] = [str(self.folder / "src"), str(self.folder)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "shufflerl")]:
            del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")  # or every process that a test spawns imports all this again
        options = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-n", "0"]
        os._exit(pytest.main([*options, *tests], [_Quickest(self.folder / "took.json")]))

    def kills(self, mutant: Mutant) -> bool:
        """Whether some test of the file notices this change."""
        changed = self.folder / "src/shufflerl" / mutant.file
        source, unchanged = changed.read_bytes(), changed.stat()
        try:
            for names in TESTS[mutant.file]:
                tests = (f"src/shufflerl/{mutant.file}", *(f"tests/{name}.py" for name in names))
                limit = self._limit(tests)
                changed.write_bytes(mutant.of(source))
                if self.fails(tests, limit):
                    return True
                self._restore(changed, source, unchanged)
        finally:
            self._restore(changed, source, unchanged)
        return False

    def _restore(self, path: Path, source: bytes, stat: os.stat_result) -> None:
        """Its time too, by which Python knows what it has compiled."""
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _limit(self, tests: tuple[str, ...]) -> float:
        """Three times as long as it takes unchanged, which must pass."""
        if tests not in self.limits:
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            if self.fails(tests):
                sys.exit(f"The tests {', '.join(tests)} fail without any mutant; mend them first.")
            self.limits[tests] = 10 + 3 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        return self.limits[tests]


def main() -> None:
    """Try a sample of mutants, and tell of those that live."""
    parser = argparse.ArgumentParser(description="See which small faults no test notices.")
    parser.add_argument("--files", nargs="*", default=[""], help="beginnings of paths below src/shufflerl; all if none")
    parser.add_argument("--most", type=int, default=25, help="how many mutants to draw of each file")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--survivors", action="store_true", help="only those that survived before")
    asked = parser.parse_args()

    files = [file for file in TESTS if file.startswith(tuple(asked.files))]
    found = {file: dict(mutants_of(file)) for file in files}
    everything = {key: mutant for mutants in found.values() for key, mutant in mutants.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    killed: dict[str, bool] = {said["key"]: said["killed"] for said in map(json.loads, lines)}
    if asked.survivors:
        chosen = [key for key in everything if killed.get(key) is False]
    else:
        chosen = [key for mutants in found.values() for key in _drawn(mutants, asked.most, asked.seed)]
    print(f"{len(chosen)} of {len(everything):,} mutants of {len(files)} files", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, RESULTS.open("a") as results:
        copy = Copy(Path(folder))
        for number, key in enumerate(chosen, 1):
            mutant = everything[key]
            if key not in killed or asked.survivors:
                killed[key] = copy.kills(mutant)
                results.write(json.dumps({"key": key, "killed": killed[key], "text": mutant.text}) + "\n")
                results.flush()
                print(
                    f"{number:4} {'killed  ' if killed[key] else 'SURVIVED'} line {mutant.line} {mutant.text}",
                    flush=True,
                )
    _report([everything[key] for key in chosen], [everything[key] for key in chosen if not killed[key]])


def _drawn(mutants: dict[str, Mutant], most: int, seed: int) -> list[str]:
    """A sample in the order of the file; a larger one has the smaller in it."""
    keys = list(mutants)
    drawn = set(random.Random(seed).sample(keys, len(keys))[:most])
    return [key for key in keys if key in drawn]


def _report(tried: list[Mutant], survivors: list[Mutant]) -> None:
    judged = JUDGED.read_text()
    new = [mutant for mutant in survivors if mutant.text not in judged]
    lived = Counter(mutant.file for mutant in survivors)
    print(f"\n{len(survivors)} of {len(tried)} survived, {len(new)} of them not judged yet; by file: drawn, killed")
    for file, drawn in sorted(Counter(mutant.file for mutant in tried).items()):
        print(f"| `{file}` | {drawn} | {drawn - lived[file]} |")
    for mutant in new:
        print(f"- {mutant.text} (line {mutant.line})")
    sys.exit(1 if new else 0)


if __name__ == "__main__":
    main()
