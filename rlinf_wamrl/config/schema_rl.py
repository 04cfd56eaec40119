"""The ``RL`` section: the method's hyper-parameters, each with its meaning beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RLConfig"]


@dataclass
class ReconstructionConfig:
    """The reconstruction reward: what was imagined against what happened."""

    source: str = "frozen"
    """Whose imagination: frozen (the pretrained video expert), live (the trained one), or rollout
    (idm mode: the very video the actions were conditioned on)."""
    similarity: str = "pixel_mse"
    """pixel_mse, optical_flow, dino or vjepa; or module:function, a builder of your own (see
    ``rlinf_wamrl.rl.similarity``)."""
    encoder_path: str | None = None
    """Folder of the transformers model that dino and vjepa compare with."""
    compare: str = "pixels"
    """pixels, or vae_roundtrip: the executed frames go through the autoencoder, too."""
    weight: str = "uniform"
    """uniform, or motion: half of the weight goes to where something moves."""
    max_batch: int = 32
    """Macro-steps imagined at a time; bounds memory."""
    placement: str = "learner"
    """learner, or worker: a reward component of its own, placed by
    ``cluster.component_placement``; it imagines while the rollout goes on."""


@dataclass
class VideoSFTConfig:
    """Training of the video expert's adapters on successful episodes."""

    enabled: bool = True
    """Train the video half at all."""
    every: int = 1
    """Iterations between two phases of video training."""
    warmup: int = 2
    """Iterations before the first one, while the buffer fills."""
    steps: int = 8
    """Optimiser steps of a phase."""
    batch_size: int = 8
    """Windows per step and rank."""
    lr: float = 1e-5
    """Learning rate of the adapters."""
    lambda_action: float = 0.0
    """Weight of the action loss beside the video loss; 0 trains the video alone."""
    lambda_kl: float = 0.1
    """Weight of the feature KL to the pretrained video expert; 0 turns it off."""
    kl_decay: float = 0.99
    """Decay of the moving average of the live features' variance."""
    lora_rank: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Their output is scaled by alpha / rank."""
    buffer_mib: int = 2048
    """Successful episodes kept, in MiB; the oldest go first."""
    buffer_memory_mib: int = 512
    """Of these in memory; the rest is on disk in the run folder."""


@dataclass
class TaskChoiceConfig:
    """Which tasks the next iteration trains on."""

    mode: str = "uniform"
    """uniform, learnable (neither solved nor hopeless) or hard (failing)."""
    epsilon: float = 0.05
    """Keeps every task alive."""
    beta: float = 1.0
    """Sharpness of hard."""
    decay: float = 0.9
    """Decay of the success average per task."""


@dataclass
class RLConfig:
    """The method: Flow-SDE sampling, group advantages, PPO. Defaults follow the paper's setting."""

    denoising_steps: int = 10
    """K: denoising steps of the action expert while training."""
    eval_denoising_steps: int = 10
    """K of the deterministic policy in evaluation."""
    imagination_steps: int = 10
    """K_video: denoising steps of an imagined video."""
    sigma_shift: float | None = None
    """Sigma shift of the denoising grids, of actions and imagined videos alike (FastWAM's
    EVALUATION.sigma_shift); null takes the checkpoint's own."""
    noise_level: float = 0.5
    """a: noise level of the stochastic denoising steps."""
    stochastic_steps: str = "one_random"
    """Which steps are stochastic: one_random (each sample draws one), window (the steps listed in
    ``window``), all."""
    window: list[int] = field(default_factory=list)
    """Step indices of ``stochastic_steps: window``."""
    ignore_last: bool | None = None
    """Keep step K-1 deterministic, whose noise stays on the executed action. Null = when K > 1."""
    initial_noise: str = "episode"
    """episode: every chunk starts from noise of its own; group: the members of a group share it,
    and that of the video they imagine, so that outcomes differ by the scored steps alone."""
    noise_modes: int | None = None
    """Stochastic steps are noisy along this many slowest cosine modes of the executed actions and
    follow the ODE along the rest; null: white noise, in every action by itself."""
    noise_dims: list[int] = field(default_factory=list)
    """Action dimensions that get noise (0 to 2 move, 3 to 5 turn, 6 is the gripper); empty: all."""
    sde: str = "sde"
    """The stochastic step: sde (keeps the ODE's marginals) or cps (keeps the noise level)."""
    logprob_reduction: str = "sum"
    """sum: the density of the executed actions; mean: per dimension (tempered)."""
    recompute_logprobs: bool = True
    """Re-score each batch in the learner before its first update, so that ratios start at 1. Later
    rounds of pipeline mode, and rollouts that ran ahead of an update, keep the recorded log-probs:
    the weights that acted are gone."""
    max_logprob_drift: float = 0.05
    """Largest allowed |recorded - re-scored| log-prob of a macro-step, in nats, before it is an
    error. Raise it for bf16 rollouts."""
    wam_cache: str = "recompute"
    """Keys and values of the video, which the action expert reads and PPO leaves as they are.
    recompute: the learner makes them once per macro-step and keeps them over all passes of an
    update (small model 64 KiB per macro-step, 5B 36 MB, in idm mode 108 MB). store: the rollout
    sends them along; made again where the learner's weights are no longer those that acted. none:
    made anew in every pass, without memory, and following the proprio encoder as it trains."""
    group_size: int = 8
    """Episodes that share task and initial state; their mean return is the baseline."""
    degenerate: str = "drop"
    """Groups that all succeeded or all failed: drop, rec_only or keep."""
    min_group_std: float = 1e-3
    """Floor of the divisor of group advantages."""
    weigh_by: str = "step"
    """step: every macro-step counts alike in the loss, so that long episodes weigh more; episode:
    every episode does, and its macro-steps share its weight."""
    max_resample: int = 3
    """Rollouts in a row without any usable group before the run stops with an error."""
    clip_low: float = 0.2
    """PPO: the ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """PPO: the ratio is clipped above at 1 + clip_high."""
    dual_clip: float = 3.0
    """PPO: bound of the loss of bad actions, > 1."""
    update_epochs: int = 2
    """PPO passes over each batch of rollouts."""
    train_actions: bool = True
    """Train the action expert by PPO; false leaves the policy as it is (video-only ablation)."""
    action_lr: float = 5e-6
    """Learning rate of the action expert and the proprio encoder."""
    task_reward_weight: float = 1.0
    """Weight of the task reward in the return; 0 learns from reconstruction alone."""
    lambda_rec: float = 0.1
    """Weight of the mean reconstruction reward in the return; 0 imagines nothing."""
    lambda_step: float = 0.0
    """Weight of its per-step part in the advantage."""
    reconstruction: ReconstructionConfig = field(default_factory=ReconstructionConfig)
    """The reconstruction reward."""
    video_sft: VideoSFTConfig = field(default_factory=VideoSFTConfig)
    """Training of the video expert."""
    task_choice: TaskChoiceConfig = field(default_factory=TaskChoiceConfig)
    """Which tasks come next."""
