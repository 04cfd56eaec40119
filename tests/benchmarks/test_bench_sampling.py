"""What batching and the caches are worth, as ratios within one run."""

import bench_sampling
import pytest
import torch


def test_all_ways_give_the_same_chains():
    timing = bench_sampling.measure(batch=2, steps=2, repeats=1)
    assert set(timing.chain) == {
        bench_sampling.BASELINE,
        bench_sampling.VIDEO_CACHE,
        bench_sampling.OURS,
    }


@pytest.mark.slow
def test_ratios():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timing = bench_sampling.measure()
    finally:
        torch.set_num_threads(threads)
    assert timing.chain_ratio >= 3.0
    assert timing.velocity_ratio >= 1.7
