"""The benchmark runs, and its ways give the same chunks."""

import bench_sampling
import pytest


@pytest.mark.parametrize("model", bench_sampling.MODELS)
def test_all_ways_give_the_same_chains(model):
    timing = bench_sampling.measure(model, batch=2, steps=2, repeats=1)
    assert set(timing.chunk) == {
        bench_sampling.BASELINE,
        bench_sampling.ALONE,
        bench_sampling.OURS,
    }
    assert timing.ratio > 0 and timing.stochastic_overhead > -1
