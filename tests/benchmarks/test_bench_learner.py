"""The benchmark runs, and its ways give the same gradients and losses."""

import bench_learner
import pytest


@pytest.mark.parametrize("model", bench_learner.MODELS)
def test_all_ways_give_the_same_gradients_and_losses(model):
    timing = bench_learner.measure(model, rows=4, windows=2, repeats=1)
    assert timing.step_ratio > 0
    assert len(timing.update) == 2 + len(bench_learner.CACHES)
