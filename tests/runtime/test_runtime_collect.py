"""``rlinf collect`` as a user runs it: real RLinf on Ray, real LIBERO, the shipped model."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlinf_wamrl.data.lerobot_dataset import STATISTICS_FILE, LeRobotDataset
from rlinf_wamrl.envs.demo import SUITE_NAME
from rlinf_wamrl.envs.libero import EnvSettings, LiberoEnv
from rlinf_wamrl.envs.rendering import choose_renderer
from rlinf_wamrl.envs.suites import load_suite

EXAMPLE = Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml"


def collect(folder, *options):
    command = [
        *(sys.executable, "-m", "rlinf_wamrl", "collect", str(EXAMPLE)),
        "env.train.total_num_envs=4",
        "RL.group_size=2",
        "rollout.pipeline_stage_num=2",
        "rollout.num_threads=1",
        f"runner.logger.log_path={folder}",
        "runner.logger.experiment_name=run",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_two_stages_without_a_learner_write_what_happened_and_go_on_later(tmp_path):
    output = collect(tmp_path, "--episodes", "4")
    assert "round 1/1" in output
    folder = tmp_path / "run/collected/dataset"
    episodes = list(LeRobotDataset(folder).episodes())
    assert [episode.number for episode in episodes] == [0, 1, 2, 3]
    assert len({episode.init_state_id for episode in episodes}) > 1
    choose_renderer()
    task = load_suite(SUITE_NAME).tasks[0]
    env = LiberoEnv(task, EnvSettings(image_size=64, render_quality="light"))
    for episode in episodes[:2]:
        seen = [env.reset(episode.init_state_id, episode.seed)]
        for action in episode.executed_actions:
            solved, observation = env.step(action, observe=True)
            seen.append(observation)
        assert solved == episode.success
        assert np.array_equal(episode.main, np.stack([one.main for one in seen]))
    env.close()

    output = collect(tmp_path, "--episodes", "8", "--explore", "--only-success")
    assert "round 2/2" in output and "round 1" not in output
    dataset = LeRobotDataset(folder)
    later = [row for row in dataset.rows if row["number"] >= 4]
    assert all(row["success"] for row in later)
    assert (folder / STATISTICS_FILE).exists() == any(row["success"] for row in dataset.rows)
