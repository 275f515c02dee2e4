"""Optimism on all that the releases tell, and probes of what bad luck may have dismissed.

**Posterior.** A release is first made consistent: users are conserved from step to step (`estimation/flow.py`). How
many of them visited each row (h, x, a) is told by the counters and by the model so far, weighed as in Kalman's filter;
rows are pooled over releases with weights that fall with noise (`pooling`). A pooled row has error A p(1-p) + B in a
cell of probability p: A is its inverse effective sample size, B what privacy adds; without noise B = 0 and A = 1/n. The
row of (x, a) at a step is drawn around its mean over the steps, and that around the uniform row, by Dirichlet laws
whose concentrations the data tell (empirical Bayes, `posterior`). Data of a row that varies by t = 1 / (1 + c) have
weight

    k = 1 / (1 + A c + B (1 + c) / b),    b the mean p(1-p),

which is the conjugate n / (n + c) for exact counts and the normal law's weight for noise; k times their error stays
open, and the error of the mean as far as the row leans on it. Rewards are rows of two outcomes. Without noise their
p(1-p) is reckoned with two visits more, one of them paid, as in the interval of Agresti & Coull (1998): who was not
paid a few times may yet be.

**Optimism.** A rival that seems worse by z of its standard errors s costs n s z if n users try it. With R users still
to come it gains R s psi(z) on average, psi(z) = phi(z) - z Phi(-z) the unit normal loss. So it is worth a try up to
the z where psi(z) / z = n / R: far when few try and much is left, not at all in the last batch, which commits by
itself. The optimistic plan is best if every row is better by half of that (`planner.optimistic_policy`).

**Probes.** Of an action with gap d to the greedy one, m visits will move the estimate by a normal of variance
t'^2 = s^2 - t^2, s and t its errors before and after. They gain R t' psi(d / t') and cost m d: the knowledge gradient
of a normal law, net of its price. The gap errs by what lies behind the action too, and that part falls as fast as the
rows behind become known: errors of variance v at precision K count as one at precision sum v / sum (v / K). A probe
plays the greedy policy but at one step, where every state takes the action of largest net value; how many users it
takes is part of the choice (`planner.plan_probe`). The next batches can go on with it, so it is worth its part of what
the best number of such tries gains (KG*). An action that was unlucky once is tried again that way, at its own price and
not at that of a whole batch; without probes some runs never recover.

**Batches.** A batch is a mixture of a few probes and plans, each made as if those before it had been played
(`planner.plan_batch`). It asks for no more counters than are worth their noise (`query`): noise grows with the
number of counters that a user touches. Batches grow from the users that stand out of the noise, or some times as many
if batches are few (`learner.schedule`). With noise each of these is planned as the many it stands for: more probes, and
smaller, as the next batch can go on with them.

`learner` is the learner, `model` what it knows; inner loops of the others are compiled.
Every constant is in `constants`. `examples/optimistic_reference.py` is all of it in plain NumPy.
"""

from __future__ import annotations

from shufflerl.learners.optimistic.learner import Optimistic, schedule

__all__ = ["Optimistic", "schedule"]
