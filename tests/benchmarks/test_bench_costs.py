"""What is printed as the biggest cost is what the work is made of."""

import bench_costs
import torch


def test_the_operators_of_a_call_are_found():
    matrix = torch.randn(300, 300)
    spent = bench_costs.costs(lambda: [torch.mm(matrix, matrix) for _ in range(5)], 2)
    assert max(spent, key=spent.get) == "aten::mm"


def test_both_ways_of_a_step_and_of_sampling_are_profiled():
    measured = bench_costs.measure("small", rows=2, repeats=1)
    assert list(measured) == [
        bench_costs.STEP_BEFORE,
        bench_costs.STEP_AFTER,
        bench_costs.SAMPLING_BEFORE,
        bench_costs.SAMPLING_AFTER,
    ]
    assert all("aten::addmm" in spent for spent in measured.values())
