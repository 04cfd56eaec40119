"""The benchmark runs; that memory grows no faster than the batch is asserted inside."""

import bench_model_scaling


def test_costs_of_two_batch_sizes():
    costs = bench_model_scaling.measure("small", batches=(1, 2), repeats=1)
    assert set(costs) == {bench_model_scaling.SAMPLING, bench_model_scaling.PPO}
    assert all(cost.peak_bytes > 0 for by_batch in costs.values() for cost in by_batch.values())
