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
