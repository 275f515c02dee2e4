"""Every constant that was chosen, in one value."""

from __future__ import annotations

from typing import NamedTuple


class Constants(NamedTuple):
    """What was chosen by tuning runs, or for no better reason than that it works."""

    # The model.
    #: p(1-p) of an outcome where p is not known.
    typical: float = 0.15
    #: p(1-p) is never taken for less in the error of data, and in a difference between steps.
    least_chance: float = 0.02
    least_difference: float = 0.005
    #: No cell of a row is told better than by this variance when steps are compared.
    least_variance: float = 1e-6
    #: Concentrations of rows at a step around their mean over the steps that are weighed against each other, from rows
    #: that have nothing to do with it to the same at every step.
    concentrations: tuple[float, ...] = (0.02, 0.1, 0.5, 2.0, 8.0, 32.0, 128.0, 512.0, 4096.0, 1e6)
    #: The first so many of them are those of means over the steps around the uniform row.
    row_concentrations: int = 5
    #: Steps of EM.
    em_steps: int = 10
    #: Passes over all noisy releases after each new one.
    passes: int = 2

    # The schedule.
    #: Users of the first batch unless more are asked for.
    first: int = 4
    #: Users of the smallest try, in deviations of a counter's noise; without noise so few.
    deviations: float = 9.0
    fewest: float = 2.0

    # Optimistic plans.
    #: Bonuses are this much of a standard error times z. Less than one, as values add up over a path of rows that
    #: are all taken at their best, which no run of luck would do.
    optimism: float = 0.55
    #: The bonus of a row that nobody has seen, in parts of what there is to earn.
    novelty: float = 0.15
    #: Policies of a batch at most, and probes among them.
    policies: int = 9
    probes: int = 4

    # Probes.
    #: The smallest probe, in parts of the smallest try.
    smallest_probe: float = 0.5
    #: Standard errors in probes are taken so many times: the bolder, the more they find of what was dismissed by bad
    #: luck, and the more they cost, a trade of mean regret for its tail. Without noise probes are small and go on from
    #: batch to batch while they seem worth it: with errors so bold they end where optimal stopping would.
    boldness: float = 0.9
    exact_boldness: float = 1.65
    #: With noise the variance of what few visits tell is doubled, from this many on less: one unlucky try is no law.
    few: float = 8.0
    #: Users of all probes of a batch at most: some always, and more where the plan does as the greedy policy anyhow.
    always: float = 0.04
    idle: float = 0.32
    exact_always: float = 0.12
    exact_idle: float = 0.3
    #: Without noise each probe has this part of them: steps where it costs little to try take turns with dear ones.
    exact_each: float = 0.25
    #: A try without noise has this part of the visits that are known of a row, or the fewest, at most.
    part: float = 0.5

    # The query.
    #: So much of what is open of next states' values sets them apart; the rest is the same for all.
    apart: float = 0.5


CONSTANTS = Constants()
