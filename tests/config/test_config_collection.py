"""The configuration that ``rlinf collect`` derives from a run's."""

from pathlib import Path

import pytest

from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.data.plan import TrajectoryMode, TrajectoryPlan
from rlinf_wamrl.envs.config import EnvConfig
from rlinf_wamrl.runtime.collection import Collection

EXAMPLE = Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml"


@pytest.fixture(scope="module")
def run():
    return compose_run(EXAMPLE)


def test_collecting_takes_a_picture_of_every_step_and_trains_nothing(run):
    cfg = Collection(only_success=True).configure(run)
    assert TrajectoryPlan.mode_from_cfg(cfg) is TrajectoryMode.LEROBOT
    assert cfg.algorithm.dagger.online_lerobot.only_success
    chunk = cfg.actor.model.num_action_chunks
    section = {key: value for key, value in cfg.env.train.items()}
    assert EnvConfig.from_mapping(section).frame_offsets() == tuple(range(1, chunk))
    assert cfg.env.train.group_size == 1 and not cfg.rollout.explore
    assert not cfg.RL.video_sft.enabled and cfg.RL.lambda_rec == 0


def test_the_run_itself_stays_as_it_was(run):
    name = run.runner.logger.experiment_name
    cfg = Collection(explore=True).configure(run)
    assert cfg.rollout.explore
    assert run.runner.logger.experiment_name == name
    assert cfg.runner.logger.experiment_name == f"{name}/collected"
    assert TrajectoryPlan.mode_from_cfg(run) is TrajectoryMode.ROLLOUT


def test_the_dataset_lies_in_the_runs_folder_unless_told_otherwise():
    assert Collection().dataset_folder(Path("run")) == Path("run/dataset")
    assert Collection(folder="elsewhere").dataset_folder(Path("run")) == Path("elsewhere")


def test_no_episodes_are_an_error_in_words(run):
    with pytest.raises(ValueError, match="--episodes 0"):
        Collection(episodes=0).configure(run)
