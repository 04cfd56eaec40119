"""Impossible values, said in words before any process starts.

Each check looks at one relation between keys. They run on plain values: no torch, no RLinf.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_wamrl.config.checkpoints import resolve_checkpoint
from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.config.limits import CHOICES, DECAYS, FIXED, NOT_NEGATIVE, POSITIVE

__all__ = ["check_lengths", "check_values", "world_size"]


def check_values(run: DictConfig) -> None:
    """Raise :class:`ConfigError` for the first value that cannot work.

    What will work, but worse than it could, is a warning.
    """
    for key, value in _leaves(OmegaConf.to_container(run, resolve=True)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {value}")
    for key in POSITIVE:
        if _get(run, key) <= 0:
            raise ConfigError(f"{key} must be positive, got {_get(run, key)}")
    for key in NOT_NEGATIVE:
        if _get(run, key) < 0:
            raise ConfigError(f"{key} must not be negative, got {_get(run, key)}")
    for key in DECAYS:
        if not 0 <= _get(run, key) < 1:
            raise ConfigError(f"{key} must be within [0, 1), got {_get(run, key)}")
    for key, options in CHOICES.items():
        if _get(run, key) not in options:
            raise ConfigError(
                f"{key} must be one of {', '.join(map(str, options))}, got {_get(run, key)!r}"
            )
    for key, value in FIXED.items():
        if _get(run, key) != value:
            raise ConfigError(f"{key} must be {value!r} for this method, got {_get(run, key)!r}")
    _check_sampling(run)
    _check_env_side(run, "train")
    _check_env_side(run, "eval")
    _check_halves(run)
    _check_group(run)
    _check_batch(run)
    _check_model(run)
    _check_intervals(run)
    _check_files(run)
    _check_renderer()


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings and lists by dotted key."""
    if isinstance(node, (dict, list)):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def world_size(run: DictConfig, component: str) -> int:
    """Return how many ranks a component has under ``cluster.component_placement``."""
    placement = run.cluster.component_placement
    for names, ranks in placement.items():
        if component in [name.strip() for name in str(names).split(",")]:
            return _count_ranks(ranks, f"cluster.component_placement.{names}")
    raise ConfigError(
        f"cluster.component_placement places no {component!r}; add for example '{component}: 0'"
    )


def _count_ranks(ranks: Any, key: str) -> int:
    if isinstance(ranks, DictConfig):
        ranks = ranks.get("placement", 0)
    text = str(ranks)
    if text == "all":
        raise ConfigError(f"{key}: name the ranks instead of 'all', for example '0-7'")
    count = 0
    for part in text.split(","):
        # "resources:processes" places more than one process on a resource
        processes = part.split(":")[-1]
        first, _, last = processes.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ConfigError(f"{key}: cannot read the ranks {text!r}; write '0', '0-3' or '0:0-1'")
        count += int(last or first) - int(first) + 1
    return count


def _get(run: DictConfig, key: str) -> Any:
    node: Any = run
    for part in key.split("."):
        node = node[part]
    return node


def _check_sampling(run: DictConfig) -> None:
    rl = run.RL
    steps = rl.denoising_steps
    if rl.stochastic_steps == "window":
        window = list(rl.window)
        if not window or window != sorted(set(window)) or not 0 <= window[0] <= window[-1] < steps:
            raise ConfigError(
                f"RL.window must list ascending step indices within 0..{steps - 1} "
                f"(RL.denoising_steps = {steps}), got {window}"
            )
    elif rl.window:
        raise ConfigError(
            f"RL.window = {list(rl.window)} needs RL.stochastic_steps: window, got "
            f"{rl.stochastic_steps!r}"
        )
    if rl.ignore_last and steps == 1:
        raise ConfigError(
            "RL.ignore_last: true leaves no stochastic step with RL.denoising_steps 1"
        )
    if rl.ignore_last and steps - 1 in rl.window:
        raise ConfigError(
            f"RL.ignore_last: true contradicts the last step, {steps - 1}, in RL.window = "
            f"{list(rl.window)}; drop one of them"
        )
    last_is_noisy = rl.ignore_last is False or steps == 1
    if rl.stochastic_steps == "window":
        last_is_noisy = steps - 1 in rl.window
    if rl.sde == "cps" and last_is_noisy:
        raise ConfigError("RL.sde: cps has no noise at the last step; leave that step out")
    _check_noise_basis(run)
    if rl.dual_clip <= 1:
        raise ConfigError(f"RL.dual_clip must be above 1, got {rl.dual_clip}")
    if rl.clip_low >= 1:
        raise ConfigError(f"RL.clip_low must be below 1, got {rl.clip_low}")
    if rl.sigma_shift is not None and rl.sigma_shift <= 0:
        raise ConfigError(f"RL.sigma_shift must be positive or null, got {rl.sigma_shift}")


def _check_noise_basis(run: DictConfig) -> None:
    rl, chunk, width = run.RL, run.actor.model.num_action_chunks, run.actor.model.action_dim
    if rl.noise_modes is not None and not 1 <= rl.noise_modes <= chunk:
        raise ConfigError(
            f"RL.noise_modes must be within 1..{chunk} (actor.model.num_action_chunks), got "
            f"{rl.noise_modes}"
        )
    dims = list(rl.noise_dims)
    if len(set(dims)) < len(dims) or not set(dims) <= set(range(width)):
        raise ConfigError(f"RL.noise_dims must be distinct and within 0..{width - 1}, got {dims}")
    if rl.logprob_reduction == "mean" and (dims or rl.noise_modes is not None):
        raise ConfigError(
            "RL.logprob_reduction: mean counts every action; take sum with RL.noise_modes or "
            "RL.noise_dims"
        )


def _check_env_side(run: DictConfig, side: str) -> None:
    env = run.env[side]
    chunk = run.actor.model.num_action_chunks
    key = f"env.{side}"
    if env.num_future_frames * env.action_video_freq_ratio > chunk:
        raise ConfigError(
            f"{key}.num_future_frames = {env.num_future_frames} frames at every "
            f"{env.action_video_freq_ratio} actions do not fit into a chunk of {chunk} actions"
        )
    slots = env.total_num_envs
    ranks = world_size(run, "env")
    stages = run.rollout.pipeline_stage_num
    if slots % (ranks * stages):
        raise ConfigError(
            f"{key}.total_num_envs = {slots} must be a multiple of env ranks x pipeline stages = "
            f"{ranks} x {stages}"
        )
    per_source = slots // (ranks * stages)
    if env.group_size < 1 or per_source % env.group_size:
        raise ConfigError(
            f"{key}.group_size = {env.group_size} must divide the {per_source} environments of "
            f"each env rank and stage ({key}.total_num_envs = {slots})"
        )


def _check_renderer() -> None:
    from rlinf_wamrl.envs.rendering import choose_renderer

    try:
        choose_renderer()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _check_halves(run: DictConfig) -> None:
    """Check what the reconstruction reward and the video half need."""
    rl, env, chunk = run.RL, run.env.train, run.actor.model.num_action_chunks
    if not rl.train_actions and not rl.video_sft.enabled:
        raise ConfigError("RL.train_actions: false needs RL.video_sft.enabled: nothing would train")
    if rl.task_reward_weight == 0 and rl.lambda_rec == 0:
        raise ConfigError("RL.task_reward_weight = 0 needs RL.lambda_rec > 0: no reward is left")
    if rl.lambda_step > 0 and rl.lambda_rec == 0:
        raise ConfigError(
            f"RL.lambda_step = {rl.lambda_step} needs RL.lambda_rec > 0: with 0 nothing is imagined"
        )
    encoder = rl.reconstruction.encoder_path
    if encoder is not None and not Path(encoder).is_dir():
        raise ConfigError(f"RL.reconstruction.encoder_path = {encoder!r} is not a folder")
    if rl.lambda_rec > 0 and env.num_future_frames == 0:
        raise ConfigError("RL.lambda_rec > 0 needs env.train.num_future_frames of at least 1")
    if rl.reconstruction.similarity in ("dino", "vjepa") and not rl.reconstruction.encoder_path:
        raise ConfigError(
            f"RL.reconstruction.similarity = {rl.reconstruction.similarity} needs the folder of a "
            "transformers model: set RL.reconstruction.encoder_path"
        )
    if rl.reconstruction.placement == "worker":
        if rl.reconstruction.source != "frozen":
            raise ConfigError(
                "RL.reconstruction.placement: worker imagines with the pretrained video expert; "
                f"source {rl.reconstruction.source!r} needs placement: learner"
            )
        world_size(run, "reward")
    ratio = env.action_video_freq_ratio
    if rl.video_sft.enabled and (chunk % ratio or env.num_future_frames * ratio < chunk - ratio):
        raise ConfigError(
            "RL.video_sft needs pictures at even distances over a whole chunk: "
            f"actor.model.num_action_chunks = {chunk} must be a multiple of "
            f"env.train.action_video_freq_ratio = {ratio}, and env.train.num_future_frames at "
            f"least {chunk // ratio - 1}"
        )


def _check_group(run: DictConfig) -> None:
    group = run.RL.group_size
    if group < 2:
        raise ConfigError(
            f"RL.group_size must be at least 2, got {group}: an advantage compares an episode "
            "with others of its group"
        )
    for key in ("algorithm.group_size", "env.train.group_size"):
        if _get(run, key) != group:
            raise ConfigError(f"{key} = {_get(run, key)} must equal RL.group_size = {group}")
    if run.algorithm.update_epoch != run.RL.update_epochs:
        raise ConfigError("algorithm.update_epoch must equal RL.update_epochs; set the latter")


def _check_batch(run: DictConfig) -> None:
    micro, total = run.actor.micro_batch_size, run.actor.global_batch_size
    ranks = world_size(run, "actor")
    fsdp = run.actor.fsdp_config
    if fsdp.strategy == "fsdp" and (fsdp.sharding_strategy, fsdp.use_orig_params) != (
        "no_shard",
        True,
    ):
        raise ConfigError(
            "actor.fsdp_config.strategy: fsdp (FSDP1) works with sharding_strategy: no_shard and "
            f"use_orig_params: true, got {fsdp.sharding_strategy} and {fsdp.use_orig_params}; "
            "shard with strategy: fsdp2"
        )
    if run.actor.fsdp_config.strategy == "plain" and ranks > 1:
        raise ConfigError(
            f"actor.fsdp_config.strategy: plain is for one actor rank, got {ranks}; use fsdp2"
        )
    if total % (micro * ranks):
        raise ConfigError(
            f"actor.global_batch_size = {total} must be a multiple of actor.micro_batch_size x "
            f"actor ranks = {micro} x {ranks}"
        )
    stored = run.env.train.total_num_envs * run.env.train.rollout_epoch
    groups = stored // run.RL.group_size
    sources = world_size(run, "env") * run.rollout.pipeline_stage_num
    if groups % ranks or (sources % ranks and ranks % sources):
        raise ConfigError(
            f"{groups} groups per iteration (env.train.total_num_envs x rollout_epoch / "
            f"RL.group_size) cannot be shared by {ranks} actor ranks from {sources} environment "
            "sources; make one a multiple of the other"
        )


def _check_model(run: DictConfig) -> None:
    if run.runner.use_training_pipeline and run.algorithm.staleness_threshold:
        raise ConfigError(
            "runner.use_training_pipeline and algorithm.staleness_threshold = "
            f"{run.algorithm.staleness_threshold} exclude each other: learn from each round while "
            "the next is collected, or from each iteration"
        )
    if run.runner.use_training_pipeline and run.runner.only_eval:
        raise ConfigError("runner.use_training_pipeline needs training; drop runner.only_eval")
    model = run.actor.model
    checkpoint = resolve_checkpoint(model)
    config = checkpoint.config
    if model.num_action_chunks > config.action_horizon:
        raise ConfigError(
            f"actor.model.num_action_chunks = {model.num_action_chunks}, but the model predicts "
            f"chunks of {config.action_horizon} actions"
        )
    width = config.action_dit_config.action_dim
    if model.action_dim != width:
        raise ConfigError(
            f"actor.model.action_dim = {model.action_dim}, but {checkpoint.path.name} predicts "
            f"actions of width {width}"
        )
    ratio = config.action_horizon / (config.num_video_frames - 1)
    for side in ("train", "eval"):
        given = run.env[side].action_video_freq_ratio
        if ratio % given:
            raise ConfigError(
                f"env.{side}.action_video_freq_ratio = {given} captures no frame where the model "
                f"imagines one, every {ratio:g} actions ({config.num_video_frames} frames over "
                f"{config.action_horizon} actions): use {ratio:g} or a divisor of it"
            )
    env = run.env.train
    if run.RL.lambda_rec > 0 and env.num_future_frames * env.action_video_freq_ratio < ratio:
        raise ConfigError(
            f"RL.lambda_rec > 0 compares with frames imagined every {ratio:g} actions, but "
            f"env.train.num_future_frames = {env.num_future_frames} at every "
            f"{env.action_video_freq_ratio} do not reach the first: take at least "
            f"{math.ceil(ratio / env.action_video_freq_ratio)}"
        )
    for message in checkpoint.warnings:
        warnings.warn(message, stacklevel=2)
    _check_acceleration(run)
    given, own = run.rollout.model.precision, model.precision
    if run.algorithm.staleness_threshold and given == "bf16":
        warnings.warn(
            "algorithm.staleness_threshold: 1 keeps the log-probs that rollouts in bf16 recorded "
            "(the weights that acted are gone), so ratios do not start at 1: watch 'first ratio'",
            stacklevel=2,
        )
    if run.RL.wam_cache == "store" and given != own:
        raise ConfigError(
            f"RL.wam_cache: store hands the rollout's keys and values to the learner, but "
            f"rollout.model.precision = {given} and actor.model.precision = {own}: make them "
            "equal, or use recompute"
        )


def _check_acceleration(run: DictConfig) -> None:
    if not run.rollout.enable_cuda_graph or run.cluster.num_nodes > 1:
        return  # on several nodes this one need not have what the rollout workers have
    import torch  # only here, as it takes seconds

    if not torch.cuda.is_available():
        raise ConfigError("rollout.enable_cuda_graph needs a CUDA device; leave it false")


def check_lengths(run: DictConfig) -> None:
    """Check what depends on the rollout lengths: micro-batches of pipeline mode.

    Pipeline mode cuts each source's rows into micro-batches for its actors.
    """
    if not run.runner.use_training_pipeline:
        return
    sources = world_size(run, "env") * run.rollout.pipeline_stage_num
    ranks, micro = world_size(run, "actor"), run.actor.micro_batch_size
    chunks = run.env.train.max_steps_per_rollout_epoch // run.actor.model.num_action_chunks
    rows = run.env.train.total_num_envs // max(sources, ranks) * chunks
    if rows % micro:
        fitting = [size for size in range(1, rows + 1) if rows % size == 0 and size <= 2 * micro]
        raise ConfigError(
            f"runner.use_training_pipeline: the {rows} macro-steps an env source sends to an actor "
            f"per round must be a multiple of actor.micro_batch_size = {micro}; "
            f"use for example {fitting[-1]}"
        )


def _check_intervals(run: DictConfig) -> None:
    """Evaluation sends weights, and a resumed run begins with new ones: only where they are due."""
    sent = run.runner.weight_sync_interval
    for key in ("runner.val_check_interval", "runner.save_interval"):
        every = _get(run, key)
        if every > 0 and every % sent:
            raise ConfigError(
                f"{key} = {every} must be a multiple of runner.weight_sync_interval = {sent}, or "
                "it would change when the rollout workers get new weights"
            )


def _check_files(run: DictConfig) -> None:
    weights = run.runner.ckpt_path
    if weights is not None and not Path(weights).is_file():
        raise ConfigError(f"runner.ckpt_path = {weights!r} is not a file")
    resume = run.runner.resume_dir
    if resume is not None:
        folder = Path(resume)
        if not folder.name.startswith("global_step_") or not folder.name[12:].isdigit():
            raise ConfigError(
                f"runner.resume_dir = {resume!r} must be a folder named global_step_N"
            )
        if not folder.is_dir():
            raise ConfigError(f"runner.resume_dir = {resume!r} does not exist")
    for side in ("train", "eval"):
        assets = run.env[side].assets_dir
        if assets is not None and not Path(assets).is_dir():
            raise ConfigError(f"env.{side}.assets_dir = {assets!r} is not a folder")
