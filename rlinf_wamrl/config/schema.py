"""The typed schema of a run: every key a user may set, with its meaning beside it.

The sections are RLinf's own (``runner``, ``algorithm``, ``env``, ``rollout``, ``actor``, …) plus
``RL``, which holds the method's hyper-parameters in one place. Keys not listed here are errors.
Values marked ``???`` have no default and must come from a configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING

from rlinf_wamrl.config.schema_env import EnvConfig
from rlinf_wamrl.config.schema_rl import RLConfig

__all__ = ["RunConfig"]


@dataclass
class ClusterConfig:
    """Where components run (RLinf's scheduler)."""

    num_nodes: int = 1
    """Ray nodes that take part."""
    component_placement: dict[str, Any] = field(default_factory=dict)
    """Component -> ranks in RLinf's syntax: of accelerators, or of nodes where there are none;
    empty puts everything on rank 0."""
    num_cpus: int | None = None
    """CPUs of the private Ray; null takes all of this machine."""
    object_store_gib: float = 1.0
    """Shared memory of the private Ray, in GiB."""


@dataclass
class LoggerConfig:
    """Where a run writes."""

    log_path: str = "runs"
    """Folder of all runs; this run writes to ``log_path/experiment_name``."""
    project_name: str = "rlinf_wamrl"
    """Project name for loggers that want one."""
    experiment_name: str = MISSING
    """Name of the run and of its folder."""
    logger_backends: list[str] = field(default_factory=lambda: ["tensorboard"])
    """RLinf's metric loggers: tensorboard, wandb, swanlab."""


@dataclass
class RunnerConfig:
    """The training loop."""

    task_type: str = "embodied"
    """RLinf's task family; only embodied is supported."""
    max_steps: int = 10
    """Training iterations (rollout + update)."""
    max_epochs: int = 1_000_000
    """RLinf's outer bound on iterations; ``max_steps`` is the one to set."""
    val_check_interval: int = -1
    """Evaluate every this many iterations; -1 never. The last iteration is always evaluated."""
    eval_before_training: bool = False
    """Evaluate the starting weights first, for a before/after comparison."""
    save_interval: int = -1
    """Save a checkpoint every this many iterations; -1 never."""
    resume_dir: str | None = None
    """A ``global_step_N`` folder to continue from."""
    ckpt_path: str | None = None
    """Weights (a state dict of the policy) to load after the model is built."""
    only_eval: bool = False
    """Evaluate the starting weights and stop."""
    weight_sync_interval: int = 1
    """Send weights to the rollout workers every this many iterations; ``val_check_interval`` and
    ``save_interval`` are multiples of it."""
    use_training_pipeline: bool = False
    """Train on each rollout epoch while the next one is collected. The reconstruction reward's
    running normalisation then moves after each epoch, otherwise once per iteration."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where the run writes."""


@dataclass
class AlgorithmConfig:
    """RLinf's algorithm section; most values come from ``RL``."""

    adv_type: str = "wamrl_group"
    """Registered advantage."""
    loss_type: str = "wamrl_flow_ppo"
    """Registered policy loss."""
    reward_type: str = "chunk_level"
    """One advantage per macro-step."""
    logprob_type: str = "chunk_level"
    """One log-prob per macro-step."""
    entropy_type: str = "chunk_level"
    """Unused: a flow policy has no closed-form entropy."""
    entropy_bonus: float = 0.0
    """Must stay 0, for the same reason."""
    kl_beta: float = 0.0
    """Unused by wamrl_flow_ppo."""
    normalize_advantages: bool = False
    """Must stay false: group advantages are normalised per group already."""
    group_size: int = II("RL.group_size")
    """Episodes per group."""
    update_epoch: int = II("RL.update_epochs")
    """PPO passes over each batch."""
    clip_ratio_low: float = II("RL.clip_low")
    """PPO clip below 1."""
    clip_ratio_high: float = II("RL.clip_high")
    """PPO clip above 1."""
    clip_ratio_c: float = II("RL.dual_clip")
    """PPO dual clip."""
    staleness_threshold: int = 0
    """Updates by which the weights that act may be behind those that learn: 0 collects and learns
    in turn, 1 collects the next iteration's rollouts while learning from this one's."""
    gamma: float = 1.0
    """Must stay 1: the return of an episode is undiscounted."""
    gae_lambda: float = 1.0
    """Unused by group advantages."""


@dataclass
class RolloutModelConfig:
    """The rollout worker's copy of the model."""

    model_path: str = II("actor.model.model_path")
    """As the actor's."""
    precision: str = II("actor.model.precision")
    """fp32 or bf16."""


@dataclass
class RolloutConfig:
    """The rollout worker."""

    group_name: str = "RolloutGroup"
    """RLinf worker group name."""
    backend: str = "huggingface"
    """RLinf's embodied rollout backend."""
    pipeline_stage_num: int = 1
    """Batches of environments that take turns, so that policy and simulator overlap."""
    enable_offload: bool = False
    """RLinf: move the model off the device between rollouts."""
    model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    """The worker's copy of the model."""
    num_threads: int | None = None
    """CPU threads of the policy; null leaves torch's default."""
    enable_torch_compile: bool = False
    """Sample through torch.compile; log-probs then differ from the learner's by rounding."""
    torch_compile_mode: str = "default"
    """Its mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs."""
    enable_cuda_graph: bool = False
    """Replay the action expert's denoising step as a CUDA graph; CUDA devices only."""


@dataclass
class SamplingConfig:
    """What the policy needs of ``RL``."""

    denoising_steps: int = II("RL.denoising_steps")
    """K while training."""
    eval_denoising_steps: int = II("RL.eval_denoising_steps")
    """K in evaluation."""
    imagination_steps: int = II("RL.imagination_steps")
    """K_video."""
    noise_level: float = II("RL.noise_level")
    """a."""
    stochastic_steps: str = II("RL.stochastic_steps")
    """one_random, window or all."""
    window: list[int] = II("RL.window")
    """Steps of the window."""
    ignore_last: bool | None = II("RL.ignore_last")
    """Keep the last step deterministic."""
    variant: str = II("RL.sde")
    """sde or cps."""
    initial_noise: str = II("RL.initial_noise")
    """episode or group."""
    noise_modes: int | None = II("RL.noise_modes")
    """Cosine modes that get noise."""
    noise_dims: list[int] = II("RL.noise_dims")
    """Action dimensions that get noise."""
    shift: float | None = II("RL.sigma_shift")
    """Sigma shift; null takes the checkpoint's."""
    wam_cache: str = II("RL.wam_cache")
    """With store, the rollout records the video's keys and values."""
    seed: int = II("actor.seed")
    """Root of the random streams."""


@dataclass
class ModelConfig:
    """The World-Action Model."""

    model_type: str = "wamrl"
    """RLinf model type, registered by this package."""
    model_path: str = MISSING
    """The name of a checkpoint that ships with the package (small), a checkpoint folder, an
    official FastWAM .pt file, or a folder with the weights of the base model Wan2.2-TI2V-5B."""
    dataset_stats_path: str | None = None
    """Statistics of the data a FastWAM file was trained on; null looks for
    <file>_dataset_stats.json beside it, then for dataset_stats.json there and up to three folders
    above. A checkpoint folder has its own."""
    vae_path: str | None = None
    """With a FastWAM file or Wan2.2: Wan2.2_VAE.pth, or the diffusers folder of that VAE."""
    text_encoder_path: str | None = None
    """With a FastWAM file or Wan2.2: the transformers folder of the UMT5-XXL encoder."""
    tokenizer_path: str | None = None
    """Its tokenizer; null takes the folder tokenizer beside it."""
    text_embedding_cache_dir: str | None = None
    """With a FastWAM file or Wan2.2: folder in which encoded instructions are kept, so that the
    text encoder is loaded for new ones only."""
    instructions: list[str] = field(default_factory=list)
    """Encoded before the first rollout; filled in from the chosen tasks."""
    variant: str | None = None
    """What actions see of the video: uncond, joint, idm or optional_idm. Null takes the
    checkpoint's own; must be set for a FastWAM file that is no known release."""
    action_infer_mode: str | None = None
    """first_frame (actions see the current image) or idm (they see a video imagined first; slower).
    Null takes the checkpoint's own; optional_idm offers both."""
    action_horizon: int | None = None
    """H: actions of a predicted chunk; null takes the checkpoint's own (FastWAM: 32)."""
    num_video_frames: int | None = None
    """Frames of an imagined video with the current one; null takes the checkpoint's own (FastWAM:
    9)."""
    video_size: list[int] | None = None
    """Height and width of the model's picture, both cameras side by side; null takes the
    checkpoint's own (FastWAM: [224, 448])."""
    binarize_gripper: bool | None = None
    """Execute the sign of the gripper's command; null takes the checkpoint's own (FastWAM: yes)."""
    video_dit_config: dict[str, Any] = field(default_factory=dict)
    """Sizes and switches of a FastWAM file's video expert that differ from Wan2.2-TI2V-5B, by
    FastWAM's names; for example use_gradient_checkpointing: true."""
    action_dit_config: dict[str, Any] = field(default_factory=dict)
    """Likewise of the action expert."""
    precision: str = "fp32"
    """fp32 or bf16."""
    is_lora: bool = False
    """Must stay false: RLinf's own LoRA does not know this model."""
    num_action_chunks: int = MISSING
    """C: actions executed before replanning."""
    action_dim: int = 7
    """A: width of an action."""
    train_actions: bool = II("RL.train_actions")
    """Train the action expert and the proprio encoder."""
    train_video: bool = II("RL.video_sft.enabled")
    """Put adapters on the video expert and train them."""
    lora_rank: int = II("RL.video_sft.lora_rank")
    """Rank of the adapters."""
    lora_alpha: float = II("RL.video_sft.lora_alpha")
    """Their output is scaled by alpha / rank."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How chunks are sampled."""


@dataclass
class OptimConfig:
    """AdamW of the action expert."""

    lr: float = II("RL.action_lr")
    """Learning rate."""
    value_lr: float = 0.0
    """Unused: there is no value head."""
    adam_beta1: float = 0.9
    """First moment decay."""
    adam_beta2: float = 0.95
    """Second moment decay."""
    adam_eps: float = 1e-8
    """Denominator floor."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Gradient norm bound."""
    lr_scheduler: str = "constant"
    """constant or cosine."""
    lr_warmup_steps: int = 0
    """Iterations of linear warm-up."""
    total_training_steps: int = II("runner.max_steps")
    """Iterations the schedule is laid out for."""


@dataclass
class FSDPConfig:
    """RLinf's sharding section."""

    strategy: str = "fsdp2"
    """fsdp2, fsdp, or plain: one process and no wrapper."""
    sharding_strategy: str = "no_shard"
    """FSDP1 only: no_shard, shard_grad_op, full_shard."""
    use_orig_params: bool = True
    """FSDP1 only: needed as only parts are trained."""
    gradient_checkpointing: bool = False
    """Must stay false: the experts have their own, ``use_gradient_checkpointing`` of
    ``actor.model.video_dit_config``."""
    enable_gradient_accumulation: bool = False
    """Synchronise gradients only at the last micro-batch."""
    wrap_policy: dict[str, Any] = field(default_factory=lambda: {"no_split_names": ["__none__"]})
    """Root only: the experts reach into each other's blocks."""
    mixed_precision: dict[str, Any] = field(
        default_factory=lambda: {"param_dtype": None, "reduce_dtype": None, "buffer_dtype": None}
    )
    """FSDP mixed precision; null everywhere trains in the model's precision."""
    cpu_offload: bool = False
    """Keep parameters on the CPU."""
    reshard_after_forward: bool = True
    """FSDP2 only."""


@dataclass
class ActorConfig:
    """The learner."""

    group_name: str = "ActorGroup"
    """RLinf worker group name."""
    training_backend: str = "fsdp"
    """RLinf training backend."""
    micro_batch_size: Any = MISSING
    """Macro-steps per forward and backward pass of a rank; auto takes the largest that fits into
    ``memory_gib``."""
    memory_gib: float | None = None
    """What ``micro_batch_size: auto`` may plan with, per rank; null takes all of a GPU, or without
    one half of this machine's memory, shared by the ranks."""
    global_batch_size: int = MISSING
    """Macro-steps per optimiser step over all ranks; a multiple of micro batch x ranks."""
    seed: int = 1234
    """Order of the macro-steps, weights of new modules, random streams of the sampler."""
    enable_offload: bool = False
    """RLinf: move weights and optimiser off the device between updates."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser of the action expert."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    num_threads: int | None = None
    """CPU threads of the learner; null leaves torch's default."""


@dataclass
class BucketConfig:
    """RLinf's bucket weight syncer."""

    bucket_size: int = 134217728
    """Bytes per message."""
    bucket_dtype: str | None = None
    """Cast for transport; null keeps the dtype."""
    is_agent: bool = False
    """RLinf: language-model agents only."""
    load_instant: bool = False
    """Load each bucket on arrival; needs an accelerator."""


@dataclass
class WeightSyncerConfig:
    """How weights travel from learner to rollout workers."""

    type: str = "bucket"
    """RLinf weight syncer."""
    bucket: BucketConfig = field(default_factory=BucketConfig)
    """Its options."""


@dataclass
class RewardConfig:
    """RLinf's reward component."""

    group_name: str = "RewardGroup"
    """RLinf worker group name."""
    use_reward_model: bool = False
    """RLinf's own reward models; must stay false (see ``RL.reconstruction.placement``)."""
    env_reward_weight: float = II("RL.task_reward_weight")
    """Weight of the task reward in RLinf's combined reward; the learner takes its parts."""
    reward_weight: float = II("RL.lambda_rec")
    """Weight of the raw reconstruction reward in it."""


@dataclass
class CriticConfig:
    """RLinf's critic component."""

    use_critic_model: bool = False
    """Must stay false: advantages are group-relative."""


@dataclass
class RunConfig:
    """A whole run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where components run."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    """The training loop."""
    RL: RLConfig = field(default_factory=RLConfig)
    """The method."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """RLinf's algorithm section."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Environments."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The rollout worker."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The learner."""
    weight_syncer: WeightSyncerConfig = field(default_factory=WeightSyncerConfig)
    """How weights travel."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Reward component."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Critic component."""
