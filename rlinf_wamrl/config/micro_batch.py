"""``actor.micro_batch_size: auto``: the largest micro-batch whose PPO step fits into memory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from rlinf_wamrl.config.checkpoints import Checkpoint, resolve_checkpoint
from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.config.placement import world_size
from rlinf_wamrl.wam.checkpoint_files import read_folder_config

__all__ = ["AUTO", "choose_micro_batch"]

AUTO = "auto"
GIB = 2**30

HOST_SHARE = 0.5
"""Of this machine's memory, where models live there: environments and rollouts need theirs."""


def choose_micro_batch(run: DictConfig) -> None:
    """Replace ``auto`` by a divisor of each rank's part of a mini-batch, in place.

    Raises:
        ConfigError: not even one macro-step fits, or the mini-batch cannot be shared by the ranks,
            or micro-batches are what travels (pipeline mode).
    """
    size = run.actor.micro_batch_size
    if size != AUTO:
        if not isinstance(size, int):
            raise ConfigError(f"actor.micro_batch_size must be a number or {AUTO!r}, got {size!r}")
        return
    if run.runner.use_training_pipeline:
        raise ConfigError(
            "actor.micro_batch_size: auto does not go with runner.use_training_pipeline, where "
            "macro-steps travel in micro-batches: give a number"
        )
    total, ranks = run.actor.global_batch_size, world_size(run, "actor")
    if total <= 0 or total % ranks:
        raise ConfigError(
            f"actor.global_batch_size = {total} must be a positive multiple of the {ranks} actor "
            "ranks"
        )
    budget = _budget(run.actor.memory_gib, ranks)
    per_rank = total // ranks
    needed = _needed_bytes(run, ranks)
    for candidate in range(per_rank, 0, -1):
        if per_rank % candidate == 0 and needed(candidate) <= budget:
            run.actor.micro_batch_size = candidate
            return
    raise ConfigError(
        f"actor.micro_batch_size: auto: a PPO step on a single macro-step needs "
        f"{needed(1) / GIB:.1f} GiB per actor rank, but there are {budget / GIB:.1f} "
        "(actor.memory_gib); use more ranks or a smaller model"
    )


def _budget(given: float | None, ranks: int) -> float:
    """Bytes that one actor rank and the rollout worker beside it may take."""
    if given is not None:
        return given * GIB
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HOST_SHARE * host / ranks


def _needed_bytes(run: DictConfig, ranks: int) -> Any:
    """Return the planned bytes of a PPO step as a function of the micro-batch."""
    from rlinf_wamrl.wam.memory import plan_memory, run_setup

    checkpoint = resolve_checkpoint(run.actor.model)
    setup = replace(run_setup(run, ranks), **_own_sizes(checkpoint))
    return lambda size: plan_memory(checkpoint.config, replace(setup, micro_batch=size)).total(
        "PPO step"
    )


def _own_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Sizes that a checkpoint folder brings along; its autoencoder is too small to count."""
    if checkpoint.kind != "folder":
        return {}
    stored = read_folder_config(checkpoint.path)
    return {
        "image_height": stored["processor"]["image_height"],
        "image_width": 2 * stored["processor"]["image_width"],
        "text_length": stored["text_encoder"]["length"],
        "vae_parameters": 0,
    }
