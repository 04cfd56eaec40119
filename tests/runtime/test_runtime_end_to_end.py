"""The main job as a user runs it: real RLinf on Ray, real LIBERO, the shipped model.

One short run is shared by the tests of this file; variants with more ranks are slow.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "libero_wamrl.yaml"
SHIPPED = ROOT / "rlinf_wamrl" / "pretrained" / "small"

SHORT = [
    "runner.max_steps=2",
    "runner.eval_before_training=false",
    "runner.val_check_interval=2",
    "runner.save_interval=1",
    "RL.group_size=4",
    "env.train.total_num_envs=8",
    "env.train.rollout_epoch=1",
    "env.eval.total_num_envs=4",
    "env.eval.rollout_epoch=1",
    "env.eval.init_state_range=[80,84]",
    "actor.global_batch_size=32",
    "actor.micro_batch_size=16",
    "RL.action_lr=5.0e-5",  # so few episodes allow no large step
    "RL.recompute_logprobs=true",
    "actor.optim.lr_warmup_steps=0",  # it would leave the first iteration without one
    "RL.video_sft.warmup=0",
    "RL.video_sft.steps=2",
    "actor.num_threads=1",
    "rollout.num_threads=1",
]

# Processors exist whose matrix products round a row otherwise in a batch of another size. Weights
# older by one update of this run change log-probs by 0.06 (root of twice its KL).
ROUNDING = 1e-4


def command(folder, *overrides):
    return [
        *(sys.executable, "-m", "rlinf_wamrl", "run", str(EXAMPLE)),
        *SHORT,
        f"runner.logger.log_path={folder}",
        "runner.logger.experiment_name=run",
        *overrides,
    ]


def run(folder, *overrides, timeout=420):
    done = subprocess.run(
        command(folder, *overrides), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def iterations(folder):
    return [json.loads(line) for line in (folder / "run/iterations.jsonl").read_text().splitlines()]


def weights(folder, step):
    path = folder / f"run/checkpoints/global_step_{step}/actor/learner.pt"
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    return folder, run(folder)


def test_the_first_ratio_is_exactly_one_and_nothing_drifts(short_run):
    folder, output = short_run
    first, second = iterations(folder)
    assert first["train/actor/first_ratio"] == second["train/actor/first_ratio"] == 1.0
    assert first["train/actor/logprob_drift_max"] < ROUNDING
    assert "first ratio 1.000000" in output


def test_ppo_changes_the_weights_and_the_rollout_worker_follows(short_run):
    """No drift in iteration 2: its actions came from the weights the learner had by then."""
    folder, _ = short_run
    one, two = weights(folder, 1), weights(folder, 2)
    assert one.keys() == two.keys()
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert iterations(folder)[1]["train/actor/logprob_drift_max"] < ROUNDING


PARTS = (".lora_", "mixtures.action.", "proprio_encoder.")


def test_what_trains_is_saved_and_each_part_of_it_changes(short_run):
    folder, output = short_run
    one, two = weights(folder, 1), weights(folder, 2)
    for part in PARTS:
        mine = [name for name in one if part in name]
        assert mine and any(not torch.equal(one[name], two[name]) for name in mine), part
    assert all(any(part in name for part in PARTS) for name in one)  # never the frozen base
    with safe_open(SHIPPED / "model.safetensors", framework="pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    video = sum(size for name, size in sizes.items() if ".video." in name)
    assert 0 < video < sum(sizes.values())
    assert re.search(rf"frozen +{video:,}", output)


def test_both_halves_report_what_they_did(short_run):
    folder, _ = short_run
    for row in iterations(folder):
        assert row["train/reward/reconstruction"] < 0
        assert row["train/video/buffer_episodes"] >= row["train/video/new_successes"]
    assert any("train/video/feature_kl" in row for row in iterations(folder))
    assert list((folder / "run/pictures").glob("iteration_0001.png"))


def test_episodes_are_counted_and_evaluated(short_run):
    folder, output = short_run
    assert [row["rollout/episodes"] for row in iterations(folder)] == [8.0, 8.0]
    evaluation = json.loads((folder / "run/evaluations.jsonl").read_text())
    assert evaluation["episodes"] == 4 and evaluation["iteration"] == 2
    assert re.search(r"evaluation after iteration 2: task 0 \d/4", output)


def test_the_run_folder_holds_what_the_last_line_promises(short_run):
    folder, output = short_run
    assert output.splitlines()[-1].endswith(str(folder / "run"))
    assert (folder / "run/config.yaml").is_file()
    described = json.loads((folder / "run/environment.json").read_text())
    assert described["train"]["mujoco"] and described["train"]["task_suite_name"] == "wamrl_demo"
    assert (folder / "run/videos/evaluation_0002.mp4").stat().st_size > 0
    assert list((folder / "run/tensorboard").rglob("events.*"))
    assert not list((folder / "run/checkpoints").glob(".*"))


SAME_AFTER_RESUME = (
    "iteration",
    "rollout/successes",
    "env/episode_len",
    "train/actor/policy_loss",
    "train/reward/normaliser_mean",
    "train/reward/normaliser_std",
    "train/video/buffer_episodes",
    "train/video/sft_loss",
    "train/video/feature_kl",
)


def test_a_resumed_run_continues_where_the_other_stopped(short_run, tmp_path):
    folder, _ = short_run
    checkpoint = folder / "run/checkpoints/global_step_1"
    run(tmp_path, f"runner.resume_dir={checkpoint}", "runner.val_check_interval=-1")
    (again,) = iterations(tmp_path)
    unbroken = iterations(folder)[1]
    for name in SAME_AFTER_RESUME:
        assert again[name] == unbroken[name], name
    resumed, whole = weights(tmp_path, 2), weights(folder, 2)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_rollouts_that_run_ahead_are_stale_by_one_and_never_rescored(tmp_path):
    output = run(
        tmp_path,
        "algorithm.staleness_threshold=1",
        "runner.max_steps=3",
        "runner.save_interval=-1",
        "runner.val_check_interval=-1",
    )
    rows = iterations(tmp_path)
    assert [row["train/actor/staleness_max"] for row in rows] == [0.0, 1.0, 1.0]
    assert rows[0]["train/actor/first_ratio"] == 1.0 != rows[1]["train/actor/first_ratio"]
    assert "train/actor/logprob_drift_max" not in rows[1]
    assert all(0.0 <= row[f"idle/{who}"] < 1.0 for row in rows for who in ("env", "rollout"))
    assert "stale 1" in output and "idle env" in output


@pytest.mark.slow
def test_where_nothing_may_run_ahead_the_updates_are_those_of_the_plain_mode(short_run, tmp_path):
    """A checkpoint after every iteration: the same rounds by the same weights."""
    run(tmp_path, "algorithm.staleness_threshold=1")
    plain, ahead = weights(short_run[0], 2), weights(tmp_path, 2)
    assert all(torch.equal(ahead[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_an_interrupted_asynchronous_run_resumes_as_if_it_had_not(tmp_path):
    """The checkpoint after iteration 2 of 4: the third round is by its weights in both runs."""
    options = (
        "algorithm.staleness_threshold=1",
        "runner.max_steps=4",
        "runner.save_interval=2",
        "runner.val_check_interval=-1",
    )
    run(tmp_path / "whole", *options)
    checkpoint = tmp_path / "whole/run/checkpoints/global_step_2"
    run(tmp_path / "resumed", *options, f"runner.resume_dir={checkpoint}")
    whole, resumed = weights(tmp_path / "whole", 4), weights(tmp_path / "resumed", 4)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert [row["train/actor/staleness_max"] for row in iterations(tmp_path / "whole")] == [
        0.0,
        1.0,
        0.0,
        1.0,
    ]


def orphans(folder):
    listed = subprocess.run(
        ["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False
    )
    return listed.stdout.split()


@pytest.mark.parametrize(
    ("moment", "sent", "status", "overrides"),
    [
        ("starting workers", signal.SIGTERM, 143, []),
        ("rollouts", signal.SIGINT, 130, []),
        (
            "learning",
            signal.SIGINT,
            130,
            ["algorithm.staleness_threshold=1", "runner.save_interval=-1"],
        ),
    ],
)
def test_interrupting_ends_everything_with_its_status(tmp_path, moment, sent, status, overrides):
    process = subprocess.Popen(
        command(tmp_path, *overrides, "runner.max_steps=9"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if moment in line:
            break
    time.sleep(1.0)
    process.send_signal(sent)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == status, rest
    assert "Traceback" not in rest
    assert not orphans(tmp_path)


def test_a_killed_worker_is_named_and_the_run_ends_with_status_1(tmp_path):
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        if "rollouts" in line:
            break
    children = subprocess.run(
        ["pgrep", "-f", "ray::WAMRolloutWorker"], capture_output=True, text=True, check=False
    )
    mine = [pid for pid in map(int, children.stdout.split()) if is_descendant(pid, process.pid)]
    assert mine
    os.kill(mine[0], signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait(timeout=120) == 1, rest
    assert "error: WAMRolloutWorker" in rest and "died without a Python error" in rest


def is_descendant(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        status = Path(f"/proc/{pid}/status")
        if not status.exists():
            return False
        pid = int(re.search(r"PPid:\s+(\d+)", status.read_text()).group(1))
    return False


RANKS = "{env:'0:0-1',rollout:'0:0-1',actor:'0:0-1'}"  # two processes each, on node 0


@pytest.mark.slow
def test_a_reward_component_gives_what_the_learner_would(tmp_path):
    rows = []
    for placement in ("learner", "worker"):
        folder = tmp_path / placement
        run(
            folder,
            f"RL.reconstruction.placement={placement}",
            "runner.max_steps=1",
            "runner.val_check_interval=-1",
        )
        rows.append(iterations(folder)[0])
    for name in ("train/reward/reconstruction", "train/reward/normaliser_std"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-4), name
    assert rows[1]["train/macro_steps"] == rows[0]["train/macro_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rollout", "pipeline"])
def test_two_env_ranks_two_stages_and_two_actors_finish(tmp_path, mode):
    run(
        tmp_path,
        f"cluster.component_placement={RANKS}",
        "rollout.pipeline_stage_num=2",
        "env.train.total_num_envs=16",
        "env.train.num_processes=1",
        "env.eval.num_processes=1",
        f"runner.use_training_pipeline={'true' if mode == 'pipeline' else 'false'}",
        "actor.micro_batch_size=11",
        "actor.global_batch_size=44",
        timeout=580,
    )
    assert all(row["train/actor/first_ratio"] == 1.0 for row in iterations(tmp_path))


@pytest.mark.slow
def test_every_sharding_strategy_makes_the_same_update(tmp_path):
    results = {}
    for strategy in ("plain", "fsdp2", "fsdp"):
        folder = tmp_path / strategy
        run(
            folder,
            f"actor.fsdp_config.strategy={strategy}",
            "runner.max_steps=1",
            "runner.val_check_interval=-1",
        )
        results[strategy] = weights(folder, 1)
    for strategy in ("fsdp2", "fsdp"):
        assert results[strategy].keys() == results["plain"].keys()
        for name, tensor in results["plain"].items():
            torch.testing.assert_close(results[strategy][name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_pipeline_mode_makes_the_same_update_as_rollout_mode(tmp_path):
    """One rollout epoch, nothing shuffled: the same rows, so the same weights."""
    both = []
    for mode in ("false", "true"):
        folder = tmp_path / mode
        run(
            folder,
            f"runner.use_training_pipeline={mode}",
            "runner.max_steps=1",
            "runner.val_check_interval=-1",
            "actor.micro_batch_size=22",
            "actor.global_batch_size=44",
        )
        both.append(weights(folder, 1))
    for name, tensor in both[0].items():
        torch.testing.assert_close(both[1][name], tensor, rtol=0, atol=1e-6)
