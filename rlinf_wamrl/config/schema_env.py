"""The ``env`` section: LIBERO environments to train in and to evaluate on."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

__all__ = ["EnvConfig"]


@dataclass
class VideoConfig:
    """RLinf's episode videos."""

    save_video: bool = False
    """Write an mp4 of the episodes."""
    video_base_dir: str = "${runner.logger.log_path}/${runner.logger.experiment_name}/video"
    """Where to."""
    info_on_video: bool = False
    """Print step information onto the frames."""
    fps: int = 20
    """Frames per second."""


@dataclass
class EnvSideConfig:
    """LIBERO environments of one side, training or evaluation."""

    env_type: str = "wamrl_libero"
    """RLinf's environment type."""
    task_suite_name: str = MISSING
    """wamrl_demo (in the package), libero_spatial, libero_object, libero_goal or libero_10."""
    task_ids: list[int] = field(default_factory=list)
    """Tasks of the suite to use; an empty list means all."""
    init_state_range: list[int] | None = None
    """[first, past the last] stored initial state of each task; null takes all, and in the demo
    suite the first 80 for training, the other 120 for evaluation."""
    total_num_envs: int = MISSING
    """Environments that run side by side, over all env workers."""
    group_size: int = MISSING
    """Neighbouring environments that share task and initial state."""
    rollout_epoch: int = 1
    """Rounds of total_num_envs episodes per iteration."""
    max_episode_steps: int | None = None
    """Step limit of an episode; null takes the suite's."""
    max_steps_per_rollout_epoch: int | None = None
    """Environment steps per round, a multiple of the executed actions per chunk; null takes the
    longest task's limit, rounded up."""
    image_size: int = MISSING
    """Height and width of each camera's picture, in pixels."""
    render_quality: str = "stock"
    """stock (as in released data), fast (no multisampling, no reflections), light (fast + a robot
    drawn with fewer faces)."""
    max_texture_size: int | None = None
    """Shrink textures to this many pixels to save memory; null keeps them."""
    num_settle_steps: int | None = None
    """Idle steps after a reset; null takes the suite's."""
    action_video_freq_ratio: int = 4
    """Actions per video frame."""
    num_future_frames: int = 2
    """Frames captured inside a chunk, at multiples of the ratio."""
    assets_dir: str | None = None
    """Folder with a real suite's assets; null looks at $LIBERO_ASSETS and the installed extra."""
    num_processes: int | None = None
    """Simulator processes per env worker, each of which runs several environments in turn; null
    takes the CPU count, more only cost memory."""
    max_built_tasks: int | None = None
    """Built environments that a simulator process keeps, for changing tasks cheaply; null: 8 of the
    demo suite (17 MB each), 2 of the real suites (205 MB each with max_texture_size 512, else
    740)."""
    restart_dead_processes: bool = True
    """Restart a simulator process that dies, and re-run its episodes from the same states."""
    watchdog_seconds: float = 300.0
    """Seconds after which a simulator process that does not answer counts as stuck."""
    is_eval: bool = False
    """Cover each (task, initial state) once instead of drawing; set by ``env.eval``."""
    seed: int = 0
    """Root of the choice of tasks and initial states."""
    auto_reset: bool = False
    """Must stay false: an episode ends a slot's round."""
    ignore_terminations: bool = False
    """Must stay false: an environment stops when its task is solved."""
    enable_offload: bool = False
    """RLinf: release the simulator's memory between rollouts."""
    video_cfg: VideoConfig = field(default_factory=VideoConfig)
    """Episode videos."""


@dataclass
class EnvConfig:
    """Environments."""

    group_name: str = "EnvGroup"
    """RLinf worker group name."""
    train: EnvSideConfig = field(default_factory=EnvSideConfig)
    """Environments that produce training data."""
    eval: EnvSideConfig = field(default_factory=EnvSideConfig)
    """Environments of the evaluation: each (task, initial state) once."""
