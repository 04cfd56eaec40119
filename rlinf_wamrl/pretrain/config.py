"""Typed settings of ``rlinf demos`` and ``rlinf pretrain``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

__all__ = ["DemosConfig", "PretrainConfig", "TrainConfig"]


@dataclass
class DemosConfig:
    """What the scripted expert records."""

    task_ids: list[int] = MISSING
    """Tasks of the demo suite."""
    episodes_per_task: int = 240
    """Episodes to attempt per task; those the expert fails are dropped."""
    init_state_range: list[int] = field(default_factory=lambda: [0, 80])
    """[first, past the last] stored initial state used, in turn."""
    image_size: int = 64
    """Height and width of each camera's picture."""
    render_quality: str = "light"
    """See ``env.train.render_quality``."""
    noise_levels: list[float] = field(default_factory=lambda: [0.0, 0.1, 0.2, 0.3])
    """Standard deviation of the noise on executed actions, one drawn per episode; labels stay
    clean, so the data shows how to recover."""
    max_pushes: int = 2
    """Each episode has 0 to this many bursts of a constant wrong offset (4 to 8 steps)."""
    steps_after_success: int = 8
    """Steps recorded after the task is solved."""
    seed: int = 0
    """Root of all randomness; an episode depends on this, its task and its number only."""
    num_processes: int | None = None
    """Recording processes; null takes the CPU count."""


@dataclass
class TrainConfig:
    """Optimisation of the World-Action Model."""

    steps: int = MISSING
    """Optimiser steps. The shipped checkpoint fixes this number, not the wall time."""
    batch_size: int = 32
    """Windows per step."""
    task_weights: dict[str, float] | None = None
    """Instruction -> share of the windows drawn, relative to the others; null draws all windows
    alike."""
    lr: float = 1e-3
    """Peak learning rate of AdamW (0.9, 0.95)."""
    warmup_steps: int = 200
    """Linear warm-up, then cosine to ``final_lr_rate``."""
    final_lr_rate: float = 0.02
    """Last learning rate, as a share of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Gradient norm bound."""
    ema_decay: float = 0.999
    """Decay of the averaged weights, which are what is saved."""
    seed: int = 0
    """Initial weights, order of windows, noise."""
    num_threads: int | None = None
    """CPU threads; null leaves torch's default."""


@dataclass
class EvaluationConfig:
    """How the trained model is measured: the deterministic policy on held-out states."""

    num_action_chunks: int = 8
    """Actions executed before replanning."""
    denoising_steps: int = 5
    """K."""
    init_state_range: list[int] = field(default_factory=lambda: [80, 200])
    """[first, past the last] stored initial state; held out from recording."""


@dataclass
class PretrainConfig:
    """Recording and training of one small model."""

    demos_dir: str = "runs/demos"
    """Folder of the recorded episodes, a LeRobot dataset."""
    output_dir: str = "runs/pretrained"
    """Folder of the checkpoint."""
    start_from: str | None = None
    """Checkpoint to train further, the name of a shipped one or a folder: its weights,
    autoencoder and normalisation are kept, so sizes must be its own. null starts anew."""
    demos: DemosConfig = field(default_factory=DemosConfig)
    """What is recorded."""
    latent_channels: int = 48
    """Channels of the patch autoencoder."""
    latent_scale: str = "channel"
    """channel: every latent channel has variance 1; global: one divisor."""
    text_length: int = 32
    """Words of an instruction at most."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`rlinf_wamrl.wam.config.WAMConfig`."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimisation."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Measuring."""
