"""The benchmark suite: which learner is best where, at which budget. `docs/suite.md` says what it is and is not.

python -m shufflerl.experiments.suite --out out/suite
"""

from __future__ import annotations

from shufflerl.experiments.suite.analysis import Contest, Line, Report, analyse
from shufflerl.experiments.suite.definition import BUDGETS, CONTENDERS, ENVIRONMENTS, EPISODES, cells

__all__ = ["BUDGETS", "CONTENDERS", "ENVIRONMENTS", "EPISODES", "Contest", "Line", "Report", "analyse", "cells"]
