"""The environment benchmarks run, and what they compare is equal."""

import bench_env
import bench_env_scaling

from rlinf_wamrl.envs.suites import load_suite


def test_comparison_with_rlinf():
    suite = load_suite("wamrl_demo")
    rows = bench_env.compare(suite, 16, 1, 9, 1, 1, [("stock", None), ("light", None)])
    assert [row.name for row in rows][0] == bench_env.BASELINE
    assert len(list(bench_env.table(rows))) == 5
    assert all(row.rss >= row.pss > 0 for row in rows)


def test_scaling_by_environments_and_processes():
    rows = bench_env_scaling.scale_environments((1, 3), chunks=1, size=16)
    rows += bench_env_scaling.scale_processes(2, (1, 2), chunks=1, size=16)
    assert [row[:2] for row in rows] == [(1, 1), (3, 2), (2, 1), (2, 2)]
    assert all(0.0 < row[2].busy <= row[2].wanted for row in rows)


def test_scaling_by_length_and_iterations():
    assert [row[0] for row in bench_env_scaling.scale_length(2, (3, 9), size=16)] == [3, 9]
    assert len(bench_env_scaling.scale_iterations(2, 2, 3, size=16)) == 2
