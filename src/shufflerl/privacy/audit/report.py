"""What an audit found: one finding per test, and the report they make."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What one test found; `p_value` is None where no chance is involved or a confidence bound decides."""

    name: str
    passed: bool
    p_value: float | None
    explanation: str


def judged(name: str, p_value: float, level: float, statement: str) -> Finding:
    """The finding of a test with a random outcome: whether what is stated holds at a level."""
    passed = p_value >= level
    return Finding(name, passed, p_value, f"{statement}: {'yes' if passed else 'NO'} (p = {p_value:.3g}).")


@dataclass(frozen=True)
class AuditReport:
    """The claim, the largest epsilon the transcripts refute, and what each test found.

    `false_alarm_rate` bounds the probability that a sound system does not pass. `refutable_epsilon` says how much the
    audit could see: nine of ten audits of so many samples refute the claim where the true epsilon is above it. It is
    infinite if they are too few to refute anything. `visible_shortfall` is the share of the noise that as many find
    missing if users leave it out of their reports; infinite where users add none.
    """

    path: str
    attacked: str
    users: int
    claimed_epsilon: float
    claimed_delta: float
    epsilon_lower_bound: float
    refutable_epsilon: float
    visible_shortfall: float
    false_alarm_rate: float
    samples: int
    seconds: float
    tests: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return all(finding.passed for finding in self.tests)

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the tests that failed."""
        return tuple(finding.name for finding in self.tests if not finding.passed)

    def as_dict(self) -> dict[str, Any]:
        """The report in a form that JSON can hold."""
        return {
            "path": self.path,
            "attacked": self.attacked,
            "users": self.users,
            "claimed_epsilon": self.claimed_epsilon,
            "delta": self.claimed_delta,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "refutable_epsilon": self.refutable_epsilon if math.isfinite(self.refutable_epsilon) else None,
            "visible_shortfall": self.visible_shortfall if math.isfinite(self.visible_shortfall) else None,
            "false_alarm_rate": self.false_alarm_rate,
            "passed": self.passed,
            "samples": self.samples,
            "seconds": self.seconds,
            "tests": [asdict(finding) for finding in self.tests],
        }

    def __str__(self) -> str:
        seen = [f"a true epsilon above about {self.refutable_epsilon:.3g}"] * math.isfinite(self.refutable_epsilon)
        seen += [f"noise that is {self.visible_shortfall:.1%} short"] * math.isfinite(self.visible_shortfall)
        power = (
            f"So many would have found {' and '.join(seen)}, nine times in ten."
            if seen
            else "They could not have found anything else."
        )
        width = max(len(finding.name) for finding in self.tests)
        return "\n".join(
            [
                f"Audit {'passed' if self.passed else 'FAILED: ' + ', '.join(self.failures)}",
                f"Attacked: path {self.path}, {self.attacked}.",
                f"Claimed: epsilon {self.claimed_epsilon:g} at delta {self.claimed_delta:g}. "
                f"Measured: epsilon at least {self.epsilon_lower_bound:.3g}.",
                *(
                    f"  {'pass' if finding.passed else 'FAIL'}  {finding.name:{width}}  {finding.explanation}"
                    for finding in self.tests
                ),
                f"{self.samples} transcripts of each of two neighbouring batches of {self.users} users in "
                f"{self.seconds:.1f} s; a sound system fails with probability at most {self.false_alarm_rate:g}.",
                power,
            ]
        )
