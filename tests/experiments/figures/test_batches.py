from __future__ import annotations

import pytest

from shufflerl.experiments.figures import batches
from shufflerl.experiments.figures.base import FULL, QUICK
from shufflerl.experiments.figures.lines import OPTIMISTIC, SDP_PE
from shufflerl.learners.stages import stage_users


@pytest.mark.parametrize("episodes", batches.EPISODES["full"])
def test_stages_are_as_many_as_were_asked_for(episodes: int) -> None:
    """But for few, of which none may grow more than tenfold: then the first is larger."""
    for count in batches.BATCHES["full"]:
        chosen = batches.stages(episodes, count)
        found = len(stage_users(episodes, chosen["first"], chosen["base"], commit=True))
        assert found == count
        assert chosen["base"] <= batches.MAX_GROWTH
        assert chosen["first"] == batches.FIRST or chosen["base"] == batches.MAX_GROWTH


def test_what_is_claimed_of_is_run() -> None:
    for size in (QUICK, FULL):
        asked = {batches.setting(*one).learner_parameters.get("batches") for one in batches.settings(size)}
        assert {batches.MANY, *map(batches.few, batches.EPISODES[size.name])} <= asked
    assert batches.few(20_000) == batches.few(1_000_000) == 10
    free = batches.setting(SDP_PE, None, 100, 3)
    assert (free.privatizer, free.epsilon) == ("none", None)
    assert batches.setting(OPTIMISTIC, 1.0, 100, 3).learner_parameters == {"batches": 3}
