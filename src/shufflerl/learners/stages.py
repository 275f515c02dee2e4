"""The stages of SDP-PE: how many users each gets, and what happened in it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shufflerl.errors import InvalidInputError


@dataclass(frozen=True)
class StageRecord:
    """One finished stage, in figures."""

    stage: int
    users: int
    log2_policies: float  # in the set when the stage began
    coverage_ratio: float | None  # worst-case coverage over the number of reachable (h, x, a); None: no design
    radius: float | None  # half of what a policy must lose by to be eliminated; None: every action has its own
    best_value: float  # of the set's best policy, as estimated
    eliminated: float  # log2 of how many times fewer policies are left

    def as_dict(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)

    def in_words(self) -> str:
        """The stage told to a reader."""
        coverage = (
            "every user was given the best policy so far"
            if self.coverage_ratio is None
            else f"the worst-covered policy was covered within a factor {self.coverage_ratio:.2f} of the best design"
        )
        verdict = (
            "No policy was bad enough to go."
            if self.eliminated == 0
            else f"Of 2^{self.log2_policies:.1f} policies, 2^{self.log2_policies - self.eliminated:.1f} stayed."
        )
        margin = (
            "each action had to be worse than the incumbent by several standard errors of their difference"
            if self.radius is None
            else f"a policy had to be {2 * self.radius:.4g} worse than the best"
        )
        if self.coverage_ratio is None:
            return f"Stage {self.stage} asked {self.users:,} users; {coverage}. It judged nothing."
        return (
            f"Stage {self.stage} asked {self.users:,} users; {coverage}. The best policy's value was estimated at "
            f"{self.best_value:.4f} (the largest of many estimates, so rather too high). To be eliminated, {margin}. "
            f"{verdict}"
        )


def stage_users(episodes: int, first: int, base: float, commit: bool) -> list[int]:
    """Users of each stage: 3 L_b with L_b = first * base^(b-1), the last stage taking all that is left.

    The paper's line 3 sums one stage too many and goes negative; here every one of the K episodes is played. A last
    stage that commits learns nothing, so it begins once it is worth at least 2.5 stages.
    """
    if episodes < 3:
        raise InvalidInputError(f"episodes is {episodes}; one stage of SDP-PE needs at least 3.")
    stages: list[int] = []
    left = episodes
    while left:
        length = first * base ** len(stages) if len(stages) * math.log2(base) < 1000 else math.inf
        users = 3 * max(1, round(length)) if length < left else left
        if users >= (0.4 * left if commit else left) or left - users < 3:
            users = left
        stages.append(users)
        left -= users
    return stages


def split_evenly(users: int, parts: int) -> list[int]:
    """As even as whole numbers allow, larger parts first."""
    return [users // parts + (part < users % parts) for part in range(parts)]
