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
from rlinf_wamrl.config.checks_rl import check_rl
from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.config.limits import (
    CHOICES,
    DECAYS,
    FIXED,
    MAX_SEED,
    NOT_NEGATIVE,
    POSITIVE,
    SEEDS,
)
from rlinf_wamrl.config.placement import world_size

__all__ = ["check_lengths", "check_values"]

FEW_EPISODES = 64
"""An iteration with fewer gets a warning."""


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
    for key in SEEDS:
        if not 0 <= _get(run, key) <= MAX_SEED:
            raise ConfigError(f"{key} must be within 0..{MAX_SEED}, got {_get(run, key)}")
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
    check_rl(run)
    _check_env_side(run, "train")
    _check_env_side(run, "eval")
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


def _get(run: DictConfig, key: str) -> Any:
    node: Any = run
    for part in key.split("."):
        node = node[part]
    return node


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
    if not run.runner.only_eval and stored < FEW_EPISODES:
        warnings.warn(
            f"{stored} episodes in {groups} groups per iteration (env.train.total_num_envs x "
            "rollout_epoch) are few to learn from: updates are mostly noise, and success tends to "
            f"fall; take {FEW_EPISODES} or more",
            stacklevel=2,
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
