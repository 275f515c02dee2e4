"""Every constant that was chosen, in one value."""

from __future__ import annotations

from typing import NamedTuple


class Constants(NamedTuple):
    """What was chosen by tuning runs, or for no better reason than that it works.

    In brackets, where it was looked for: the range within which mean regret changes by less than 5%.
    """

    # The model.
    #: p(1-p) of an outcome where p is not known (0.1 to 0.22).
    typical: float = 0.15
    #: p(1-p) is never taken for less (0.0005 to 0.002).
    min_chance: float = 0.001
    #: No cell of a row is told better than by this variance when steps are compared (1e-8 to 1e-4).
    min_variance: float = 1e-6
    #: Concentrations of rows at a step around their mean over the steps that are weighed against each other, from rows
    #: that have nothing to do with it to the same at every step.
    concentrations: tuple[float, ...] = (0.02, 0.1, 0.5, 2.0, 8.0, 32.0, 128.0, 512.0, 4096.0, 1e6)
    #: The first so many of them are those of means over the steps around the uniform row (5 to 7).
    row_concentrations: int = 5
    #: Steps of EM (10 to 30).
    em_steps: int = 10
    #: Passes over all noisy releases after each new one (2 to 4).
    passes: int = 2
    #: Steps are alike by 1 less so many times the variance between them: not at all if they differ by a fifth of what
    #: they could.
    dissimilarity: float = 5.0

    # The schedule.
    #: Batches unless told otherwise, with noise and without.
    batches: int = 40
    exact_batches: int = 80
    #: Users of the first batch if nobody says before how strong the noise is, unless more are asked for.
    first: int = 4
    #: With few batches the first has as many tries as this times the logarithm of all tries there could be, by batch
    #: (2.5 to 4 for 3 to 12 batches; with 40 it makes no difference).
    opening: float = 3.0
    #: The logarithm of a batch's size grows with this power of its place; of N batches with 2.5 - N / 10 if that is
    #: more.
    growth: float = 1.25
    #: Users of the smallest try, in deviations of a counter's noise (5 to 7); without noise so few (1 to 2).
    deviations: float = 6.0
    fewest: float = 2.0

    # Optimistic plans.
    #: Bonuses are this much of a standard error times z. Less than one, as values add up over a path of rows that
    #: are all taken at their best, which no run of luck would do (0.5 to 0.75).
    optimism: float = 0.55
    #: The bonus of a row that nobody has seen, in parts of what there is to earn (0.05 to 0.15).
    novelty: float = 0.15
    #: Policies of a batch at most (9 to 14), and probes among them (2 to 7); more if batches are few.
    policies: int = 9
    probes: int = 4
    #: Users of any of them, in parts of the smallest try: probes have no fewer (0.25 to 1), plans leave no fewer over.
    smallest_share: float = 0.5

    # Probes.
    #: How many users a probe has is searched for in steps of this factor.
    probe_step: float = 1.5
    #: Standard errors in probes are taken so many times: the bolder, the more they find of what was dismissed by bad
    #: luck, and the more they cost, a trade of mean regret for its tail. Without noise probes are small and go
    #: on while they seem worth it: with errors so bold they end a tenth later than optimal stopping would (1.75 to 2).
    boldness: float = 0.9
    exact_boldness: float = 1.9
    #: The variance of what few visits tell is doubled, from this many on less: one unlucky try is no law (8 to 30).
    few: float = 8.0
    #: Without noise that is done where it matters: p(1-p) of a reward is reckoned with so many visits beside those that
    #: were counted, half of them paid, as who was not paid a few times is not sure never to be (1 to 4).
    beside: float = 2.0
    #: Users of all probes of a batch at most: some always, and more where the plan does as the greedy policy
    #: anyhow (0.01 to 0.1; 0.15 to 0.5). Without noise this part (0.2 to 0.4), and each probe has its share of them, so
    #: that steps where it costs little to try take turns with dear ones.
    always: float = 0.04
    idle: float = 0.32
    exact_share: float = 0.3
    #: A try without noise has at most this part of the visits that are known of the action, or the fewest.
    part: float = 0.5

    # The query.
    #: So much of what is open of next states' values sets them apart; the rest is the same for all.
    apart: float = 0.5


CONSTANTS = Constants()
