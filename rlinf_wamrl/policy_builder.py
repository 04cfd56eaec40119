"""Builds the policy that a configuration describes."""

from __future__ import annotations

from typing import Any

import torch

from rlinf_wamrl.config.checkpoints import checkpoint_folder
from rlinf_wamrl.policy import SamplingSettings, WAMPolicy
from rlinf_wamrl.wam.pretrained import load_pretrained

__all__ = ["build_policy", "sampling_settings"]


def build_policy(cfg: Any, dtype: torch.dtype) -> WAMPolicy:
    """Load the checkpoint of ``cfg`` (RLinf's ``actor.model`` section) and freeze what stays fixed.

    Trainable are the action expert and the proprio encoder.

    Args:
        cfg: the section, with ``model_path``, ``num_action_chunks`` and ``sampling``.
        dtype: of the model's weights.
    """
    parts = load_pretrained(checkpoint_folder(cfg.model_path), dtype=dtype)
    policy = WAMPolicy(
        wam=parts.model,
        vae=parts.vae,
        text_encoder=parts.text_encoder,
        processor=parts.processor,
        settings=sampling_settings(cfg),
    )
    if policy.action_dim != cfg.action_dim:
        raise ValueError(
            f"actor.model.action_dim = {cfg.action_dim}, but the checkpoint {cfg.model_path!r} "
            f"predicts actions of width {policy.action_dim}"
        )
    policy.wam.video_expert.requires_grad_(False)
    return policy


def sampling_settings(cfg: Any) -> SamplingSettings:
    """Read the sampling part of RLinf's ``actor.model`` section."""
    sampling = cfg.sampling
    steps = sampling.stochastic_steps
    return SamplingSettings(
        num_executed=cfg.num_action_chunks,
        denoising_steps=sampling.denoising_steps,
        eval_denoising_steps=sampling.eval_denoising_steps,
        noise_level=sampling.noise_level,
        stochastic_steps=tuple(sampling.window) if steps == "window" else steps,
        ignore_last=sampling.ignore_last,
        variant=sampling.variant,
        shift=sampling.shift,
        seed=sampling.seed,
    )
