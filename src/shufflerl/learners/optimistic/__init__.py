"""The learner `optimistic`: the learner itself, what it knows (`posterior`) and the compiled code of both.

`pooling`, `shrinkage`, `dirichlet` and `concentration` make the posterior of all releases; `optimism`, `looks` and
`detours` plan on it, `asking` chooses the counters. docs/optimistic.md derives the method.
"""

from __future__ import annotations

from shufflerl.learners.optimistic.learner import Optimistic, schedule

__all__ = ["Optimistic", "schedule"]
