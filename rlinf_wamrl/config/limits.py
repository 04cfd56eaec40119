"""What single keys may be: tables that :mod:`rlinf_wamrl.config.checks` goes through."""

from __future__ import annotations

__all__ = [
    "CHOICES",
    "DECAYS",
    "FIXED",
    "MAX_SEED",
    "NOT_NEGATIVE",
    "POSITIVE",
    "SEEDS",
    "SIMILARITIES",
]

POSITIVE = [
    "RL.denoising_steps",
    "RL.eval_denoising_steps",
    "RL.imagination_steps",
    "RL.noise_level",
    "RL.clip_low",
    "RL.clip_high",
    "RL.update_epochs",
    "RL.action_lr",
    "RL.max_logprob_drift",
    "RL.min_group_std",
    "RL.max_resample",
    "RL.reconstruction.max_batch",
    "RL.video_sft.every",
    "RL.video_sft.steps",
    "RL.video_sft.batch_size",
    "RL.video_sft.lr",
    "RL.video_sft.lora_rank",
    "RL.video_sft.lora_alpha",
    "RL.video_sft.buffer_mib",
    "actor.micro_batch_size",
    "actor.global_batch_size",
    "actor.optim.clip_grad",
    "actor.model.num_action_chunks",
    "rollout.pipeline_stage_num",
    "runner.max_epochs",
    "runner.weight_sync_interval",
    "cluster.num_nodes",
    "cluster.object_store_gib",
    "env.train.total_num_envs",
    "env.train.rollout_epoch",
    "env.train.image_size",
    "env.train.video_cfg.fps",
    "env.train.action_video_freq_ratio",
    "env.eval.total_num_envs",
    "env.eval.rollout_epoch",
    "env.eval.image_size",
    "env.eval.video_cfg.fps",
    "env.eval.action_video_freq_ratio",
]

CHOICES = {
    "algorithm.staleness_threshold": (0, 1),
    "RL.stochastic_steps": ("one_random", "window", "all"),
    "RL.sde": ("sde", "cps"),
    "RL.initial_noise": ("episode", "group"),
    "RL.logprob_reduction": ("sum", "mean"),
    "RL.wam_cache": ("store", "recompute", "none"),
    "RL.weigh_by": ("step", "episode"),
    "RL.degenerate": ("drop", "rec_only", "keep"),
    "RL.reconstruction.source": ("frozen", "live", "rollout"),
    "RL.reconstruction.placement": ("learner", "worker"),
    "RL.reconstruction.compare": ("pixels", "vae_roundtrip"),
    "RL.reconstruction.weight": ("uniform", "motion"),
    "RL.task_choice.mode": ("uniform", "learnable", "hard"),
    "actor.model.precision": ("fp32", "bf16"),
    "actor.fsdp_config.strategy": ("fsdp2", "fsdp", "plain"),
    "rollout.torch_compile_mode": (
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ),
    "actor.optim.lr_scheduler": ("constant", "cosine"),
    "env.train.render_quality": ("stock", "fast", "light"),
    "env.eval.render_quality": ("stock", "fast", "light"),
}

SIMILARITIES = ("pixel_mse", "optical_flow", "dino", "vjepa")  # those with a name

NOT_NEGATIVE = [
    "RL.lambda_rec",
    "RL.lambda_step",
    "RL.task_reward_weight",
    "RL.video_sft.lambda_kl",
    "RL.video_sft.lambda_action",
    "RL.video_sft.warmup",
    "RL.video_sft.buffer_memory_mib",
    "RL.task_choice.epsilon",
    "RL.task_choice.beta",
]

SEEDS = ["actor.seed", "env.train.seed", "env.eval.seed"]
MAX_SEED = 2**31 - 1  # some generators take no larger ones, and ranks and iterations are added

DECAYS = [  # shares of an old value that is kept
    "RL.video_sft.kl_decay",
    "RL.task_choice.decay",
    "actor.optim.adam_beta1",
    "actor.optim.adam_beta2",
]

FIXED = {
    "runner.task_type": "embodied",
    "actor.model.model_type": "wamrl",
    "actor.model.is_lora": False,
    "algorithm.adv_type": "wamrl_group",
    "algorithm.loss_type": "wamrl_flow_ppo",
    "algorithm.reward_type": "chunk_level",
    "algorithm.logprob_type": "chunk_level",
    "algorithm.entropy_bonus": 0.0,
    "algorithm.gamma": 1.0,  # an episode's outcome is the advantage of all its macro-steps
    "algorithm.normalize_advantages": False,
    "env.train.env_type": "wamrl_libero",
    "env.eval.env_type": "wamrl_libero",
    "env.train.is_eval": False,
    "env.eval.is_eval": True,
    "env.train.auto_reset": False,
    "env.eval.auto_reset": False,
    "env.train.ignore_terminations": False,
    "env.eval.ignore_terminations": False,
    "actor.fsdp_config.gradient_checkpointing": False,
    "critic.use_critic_model": False,
    "reward.use_reward_model": False,
}
