"""Whether a claim holds: functions of the runs' numbers alone, which say so with intervals and never more than that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from shufflerl.arrays import FloatArray
from shufflerl.experiments.compare import Estimate, interval

#: The length of a claim in few words: with its verdict it fits a line of 80 columns.
SHORT = 61

#: The place of a claim that is not the paper's.
OURS = "Ours"


class Verdict(StrEnum):
    """What the runs say of a claim."""

    HOLDS = "holds"
    NOT_HERE = "does not hold at this K"
    OPEN = "not settled by these seeds"
    FROM = "holds from K"


@dataclass(frozen=True)
class Outcome:
    """A verdict with the numbers it rests on; `since` is the K that a claim holds from, where it does so."""

    verdict: Verdict
    numbers: str
    since: float | None = None

    def __str__(self) -> str:
        return self.verdict if self.since is None else f"{self.verdict} = {power(self.since)}"

    @property
    def short(self) -> str:
        """The verdict in a few words."""
        if self.since is not None:
            return f"from K = {power(self.since)}"
        return {Verdict.HOLDS: "holds", Verdict.OPEN: "not settled"}.get(self.verdict, "not at this K")


@dataclass(frozen=True)
class Claim:
    """A claim, where it stands in the paper (or `OURS`), and what became of it; `why` explains one that fails.

    `short` is the claim in at most `SHORT` characters, for lists.
    """

    place: str
    short: str
    statement: str
    outcome: Outcome
    why: str = ""

    @property
    def explanation(self) -> str:
        """Why it fails, where it does."""
        return "" if self.outcome.verdict in (Verdict.HOLDS, Verdict.OPEN) else self.why

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "place": self.place,
            "short": self.short,
            "statement": self.statement,
            "verdict": str(self.outcome),
            **asdict(self.outcome),
            "why": self.explanation,
        }


def lower(smaller: FloatArray, larger: FloatArray) -> Outcome:
    """Claim: the mean of the first is below that of the second; values are paired by seed.

    It holds if the whole 95% interval of the mean difference is below zero.
    """
    difference = interval(smaller - larger)
    numbers = f"{spread(smaller)} against {spread(larger)}; difference {shown(difference)}"
    return Outcome(negative(difference, strictly=True), numbers)


def negative(estimate: Estimate, *, strictly: bool = False) -> Verdict:
    """Claim: it is at most zero, or below. An interval on both sides leaves that open, and so does a single seed."""
    if estimate.low is None or estimate.high is None:
        return Verdict.OPEN
    if estimate.high < 0 or (estimate.high == 0 and not strictly):
        return Verdict.HOLDS
    return Verdict.NOT_HERE if estimate.low > 0 or (estimate.low == 0 and strictly) else Verdict.OPEN


def within(value: FloatArray, factor: float, reference: FloatArray) -> Outcome:
    """Claim: the mean of the first is at most `factor` times that of the second; values are paired by seed.

    It holds if the whole 95% interval of the mean of value - factor * reference is at most zero.
    """
    excess = interval(value - factor * reference)
    ratio = value.mean() / reference.mean()
    numbers = (
        f"{spread(value)} against {spread(reference)}: {ratio:.3g} times as much; exceeds the bound by {shown(excess)}"
    )
    return Outcome(negative(excess), numbers)


def together(outcomes: Sequence[tuple[str, Outcome]]) -> Outcome:
    """Claim: all of these, each named by what it is of."""
    failed, unsettled = (
        [name for name, outcome in outcomes if outcome.verdict is verdict]
        for verdict in (Verdict.NOT_HERE, Verdict.OPEN)
    )
    numbers = "; ".join(f"{name}: {outcome.numbers}" for name, outcome in outcomes)
    some = [
        f"{word} for {'; '.join(names)}. "
        for word, names in (("Not", failed), ("Not settled", unsettled))
        if 0 < len(names) < len(outcomes)
    ]
    verdict = Verdict.NOT_HERE if failed else Verdict.OPEN if unsettled else Verdict.HOLDS
    return Outcome(verdict, "".join([*some, "All: " if some else "", numbers]))


def from_some_k(episodes: Sequence[int], held: Sequence[bool], numbers: str) -> Outcome:
    """Claim: it held at every K, or at all from some K on; `episodes` ascend."""
    if all(held):
        return Outcome(Verdict.HOLDS, numbers)
    last_failure = max(index for index, good in enumerate(held) if not good)
    if last_failure == len(held) - 1:
        return Outcome(Verdict.NOT_HERE, numbers)
    return Outcome(Verdict.FROM, numbers, float(episodes[last_failure + 1]))


def spread(values: FloatArray) -> str:
    """A mean with its interval."""
    return shown(interval(values))


def shown(estimate: Estimate) -> str:
    """An estimate in figures."""
    mean = number(estimate.mean)
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return mean
    return f"{mean} [{number(estimate.low)}, {number(estimate.high)}]"


def number(value: float) -> str:
    """Three or four figures, as people write them.

    >>> number(0.01234), number(1234.4), number(2.5e9), number(0.0)
    ('0.0123', '1,234', '2.5e9', '0')
    """
    if value and abs(value) >= 1e6:
        return power(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def power(value: float) -> str:
    """Powers of ten, and small numbers in full.

    >>> power(20_000), power(3.2e11), power(1e12)
    ('20,000', '3.2e11', '1e12')
    """
    if abs(value) < 1e5:
        return f"{value:,.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"
