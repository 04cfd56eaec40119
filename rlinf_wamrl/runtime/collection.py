"""What ``rlinf collect`` is asked for, and the run configuration that follows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

__all__ = ["Collection"]


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Episodes of a policy, written as a LeRobot dataset."""

    episodes: int | None = None
    """Episodes to play in all, rounded up to whole rounds; None plays one round."""
    folder: str | None = None
    """The dataset's folder; None takes ``dataset`` in the run's folder."""
    explore: bool = False
    """Sample as training does; else the policy is deterministic."""
    only_success: bool = False
    """Write the successful episodes only."""

    def configure(self, cfg: DictConfig) -> DictConfig:
        """Return the run's configuration for collecting: no learner, a picture of every step.

        Each environment plays an episode of its own (``group_size`` 1) from the training states.
        The collection's logs are kept in a folder inside the run's.

        Raises:
            ValueError: Less than one episode is asked for.
        """
        if self.episodes is not None and self.episodes < 1:
            raise ValueError(f"--episodes {self.episodes}: give at least 1")
        copy = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        copy.runner.logger.experiment_name += "/collected"
        copy.runner.only_eval = False
        copy.runner.eval_before_training = False
        copy.runner.val_check_interval = -1
        copy.runner.use_training_pipeline = False
        copy.RL.lambda_rec = 0.0
        copy.RL.video_sft.enabled = False
        copy.RL.task_choice.mode = "uniform"
        copy.algorithm.dagger = {
            "online_lerobot": {"enabled": True, "only_success": self.only_success}
        }
        copy.rollout.explore = self.explore
        train = copy.env.train
        train.group_size = 1
        train.rollout_epoch = 1
        train.action_video_freq_ratio = 1
        # the picture after a chunk's last action is the next observation
        train.num_future_frames = copy.actor.model.num_action_chunks - 1
        return copy

    def dataset_folder(self, run_folder: Path) -> Path:
        """The folder to write to."""
        return run_folder / "dataset" if self.folder is None else Path(self.folder)
