"""The audit: what is played, which tests are made of it, and how the level is shared among them."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from shufflerl import checks
from shufflerl.arrays import IntArray
from shufflerl.counts import CountQuery
from shufflerl.mdp import Problem
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit import observers
from shufflerl.privacy.audit.bench import USERS, Bench, Session, System
from shufflerl.privacy.audit.observers import Observer
from shufflerl.privacy.audit.report import AuditReport, Finding, judged
from shufflerl.privacy.audit.statistics import bonferroni, spread_fit, tails_fit, two_sided
from shufflerl.privacy.audit.users import InMemory

#: Fewer transcripts than this of either batch, and the laws of the test statistics would be too far from their limits.
MIN_SAMPLES = 100
#: Users of the large batches that are played, as the noise on a counter must not depend on their number.
CROWD = 1000
# Queries for some steps alone: of transitions, of rewards, of both, and for one family alone.
_THREE_STEPS = Problem(horizon=3, n_states=2, n_actions=1, episodes=1)
PARTIAL_QUERIES = [
    CountQuery(_THREE_STEPS, transitions, rewards)
    for transitions, rewards in [((1,), (0, 1, 2)), ((0, 1), (0, 2)), ((0,), (2,)), ((0, 1), ()), ((), (0, 1, 2))]
]

# Random tests beside those of the observers: order, crowd, partial queries, and one of the kind of system.
_OTHER_TESTS = 4
# Of partial queries and crowds the noise is awaited to have this variance together: where half of so many Poisson tags
# is missing, that is ten deviations. At a level of 1e-6 for all tests that is missed with probability below 1e-9.
_NOISE = 400
# Draws of noise that are awaited of each partial query: where their deviation is halved, Laplace noise shows it.
_DRAWS = 100


def audit(
    budget: Budget,
    *,
    samples: int | None = None,
    users: int = USERS,
    level: float = 1e-3,
    system: System | None = None,
) -> AuditReport:
    """Test the claim that a release calibrated to the budget is private, on `samples` transcripts of either batch.

    `level` is the false-alarm rate of all tests together. Time grows with the samples and, like the number of noise
    messages, as 1/epsilon^2. To audit another implementation than ours, give it as `system`.
    """
    started = time.perf_counter()
    system = InMemory() if system is None else system
    samples = checks.whole("samples", system.samples if samples is None else samples, least=MIN_SAMPLES)
    users = checks.whole("users", users, least=USERS)
    level = checks.real("level", level, above=0, below=1)

    bench = Bench(CountQuery.everything(system.problem))
    bound, refutable, shortfall = 0.0, math.inf, math.inf
    with system.begin(budget, users, bench.query) as session:
        tests = [bench.sensitivity(), *bench.calibration(session, budget)]
        tests += [] if session.lie is None else [session.lie()]
        played = bench.play(session, samples)
    if isinstance(played, str):
        tests.append(Finding("schema", False, None, f"{played} Nothing else was tested."))
    else:
        equally = " All reports are equally long." if played.on_a_wire else ""
        tests.append(Finding("schema", True, None, f"{session.rules}, releases lose and add none.{equally}"))
        share = level / (observers.RANDOM_TESTS * len(session.laws) + _OTHER_TESTS)
        everybody = [Observer(played, name) for name in session.laws]
        for observer in everybody:
            lowest, findings = observer.tests(budget, share)
            bound, tests = max(bound, lowest), tests + findings
        refutable = max(observer.refutable_epsilon(budget, share) for observer in everybody)
        shortfall = session.shortfall(samples, share)
        tests += [
            session.tests(played, share),
            played.permutation(share),
            _crowd(system, bench, budget, share),
            _partial_queries(system, budget, users, share),
        ]
    return AuditReport(
        path=system.path,
        attacked=system.attacked,
        users=users,
        claimed_epsilon=budget.epsilon,
        claimed_delta=budget.delta,
        epsilon_lower_bound=bound,
        refutable_epsilon=refutable,
        visible_shortfall=shortfall,
        false_alarm_rate=level,
        samples=samples,
        seconds=time.perf_counter() - started,
        tests=tuple(tests),
    )


def _crowd(system: System, bench: Bench, budget: Budget, level: float) -> Finding:
    """Large batches have as much noise as small ones."""
    with system.begin(budget, CROWD, bench.query) as session:
        batches = [bench.batch(n, n % 2, CROWD) for n in range(transcripts(session, 1))]
        p_value = _whole_noise(bench, session, batches)
    if isinstance(p_value, str):
        return Finding("crowd", False, None, p_value)
    return judged("crowd", p_value, level, f"With {CROWD:,} users there is as much noise, in {len(batches)} batches")


def _partial_queries(system: System, budget: Budget, users: int, level: float) -> Finding:
    """The noise where some steps alone are asked for: calibrated to these, and on every counter as much as declared."""
    p_values = []
    for query in PARTIAL_QUERIES:
        bench = Bench(query)
        with system.begin(budget, users, query) as session:
            for fixed in (bench.sensitivity(), *bench.calibration(session, budget)):
                if not fixed.passed:
                    return replace(fixed, name="partial queries")
            batches = [bench.batch(n, n % 2, users) for n in range(transcripts(session, _DRAWS))]
            p_value = _whole_noise(bench, session, batches)
        if isinstance(p_value, str):
            return Finding("partial queries", False, None, p_value)
        p_values.append(p_value)
    statement = f"All noise is there in {len(PARTIAL_QUERIES)} queries for some steps"
    return judged("partial queries", bonferroni(*p_values), level, statement)


def transcripts(session: Session, draws: int) -> int:
    """How many have at least so many draws of noise on all counters, and of every law enough noise."""
    least = max(_NOISE / law.variance for law in session.laws.values())
    return math.ceil(max(draws, least) / session.query.size)


def _whole_noise(bench: Bench, session: Session, batches: list[IntArray]) -> float | str:
    """The p-value that no noise is missing in these batches: in all, on any counter, in its spread."""
    residues = []
    for kinds in batches:
        batch = bench.one(session, kinds)
        if isinstance(batch, str):
            return batch
        true = bench.counts[kinds].sum(axis=0)
        residues.append([(law, counts - true) for law, counts in session.counted(batch)])
    p_values = []
    for column in zip(*residues, strict=True):
        law, noise = column[0][0], np.array([each for _, each in column])
        total = two_sided(noise.sum() / (math.sqrt(noise.size) * law.sd))
        p_values += [total, tails_fit(noise.sum(axis=0), law.repeated(len(noise))), spread_fit(noise, law)[0]]
    return bonferroni(*p_values)
