"""That the benchmarks of the running system still run; they assert equal results themselves."""

import os
import subprocess
import sys

import bench_pipeline
import bench_rank_scaling
import bench_startup
import process_tree
import pytest


def test_cpu_time_of_a_tree_counts_children():

    before = process_tree.cpu_seconds(os.getpid())
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert process_tree.cpu_seconds(os.getpid()) - before >= 0.3


def test_phases_are_read_from_what_a_run_prints():
    run = process_tree.TimedRun(
        [("  … rollouts", 10.0, 5.0), ("  … learning", 20.0, 25.0), ("done", 21.0, 26.0)]
    )
    assert run.first("learning") == (20.0, 25.0)

    assert run.busy_shares("rollouts") == [2.0 / os.cpu_count()]


def test_cpu_time_between_two_lines():
    run = process_tree.TimedRun(
        [
            ("… weights", 0.0, 1.0),
            ("… rollouts", 1.0, 2.0),
            ("… weights", 4.0, 5.5),
            ("end", 9.0, 9.0),
        ]
    )
    assert run.cpu_seconds_between("weights") == [4.5]


@pytest.mark.slow
def test_all_modes_collect_the_same_rollouts():
    measured = bench_pipeline.measure(1, "env.train.rollout_epoch=1")
    assert set(measured) == set(bench_pipeline.MODES)
    assert all(len(result.seconds) == 1 for result in measured.values())


@pytest.mark.slow
def test_workers_that_import_for_themselves_train_the_same():
    results = bench_startup.measure(1)
    assert all(len(startup.first_step) == 1 for startup in results.values())


def test_a_placement_names_as_many_processes_as_asked():
    assert (
        bench_rank_scaling.placement({"actor": 2}) == "{env:'0:0-0',rollout:'0:0-0',actor:'0:0-1'}"
    )


@pytest.mark.slow
def test_every_placement_plays_the_same_episodes():
    measured = bench_rank_scaling.measure(1, "env.train.rollout_epoch=1")
    assert set(measured) == set(bench_rank_scaling.PLACEMENTS)
