"""Builds the policy that a configuration describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf_wamrl.config.checkpoints import Checkpoint, resolve_checkpoint
from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.policy import SamplingSettings, WAMPolicy
from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.base_model import from_wan22
from rlinf_wamrl.wam.loading import from_fastwam
from rlinf_wamrl.wam.lora import inject_lora, select_trainable
from rlinf_wamrl.wam.pretrained import PretrainedWAM, load_pretrained
from rlinf_wamrl.wam.wan22_parts import Wan22Parts

__all__ = ["build_policy", "policy_of", "sampling_settings"]


def build_policy(cfg: Any, dtype: torch.dtype) -> WAMPolicy:
    """Load the checkpoint of ``cfg`` (RLinf's ``actor.model`` section) and freeze what stays fixed.

    Small and released checkpoints take the same way from here on.

    Args:
        cfg: the section; see :func:`~rlinf_wamrl.config.checkpoints.resolve_checkpoint`.
        dtype: of the model's weights.

    Raises:
        ValueError: a part is missing or damaged, or the parts do not fit together.
    """
    return policy_of(_load(resolve_checkpoint(cfg), cfg, dtype), cfg)


def policy_of(parts: PretrainedWAM, cfg: Any) -> WAMPolicy:
    """Make a loaded model the policy of a run; trainable are action expert and proprio encoder.

    Args:
        parts: the model and what surrounds it.
        cfg: RLinf's ``actor.model`` section.

    Raises:
        ValueError: ``num_action_chunks`` or ``action_dim`` does not fit the model.
    """
    processor = parts.processor
    if cfg.binarize_gripper is not None:
        changed = replace(processor.config, binarise_gripper=cfg.binarize_gripper)
        processor = Processor.build(changed, processor.statistics)
    policy = WAMPolicy(
        wam=parts.model,
        vae=parts.vae,
        text_encoder=parts.text_encoder,
        processor=processor,
        settings=sampling_settings(cfg),
    )
    if policy.wam.action_dim != cfg.action_dim:
        raise ValueError(
            f"actor.model.action_dim = {cfg.action_dim}, but the checkpoint {cfg.model_path!r} "
            f"predicts actions of width {policy.wam.action_dim}"
        )
    parts_to_train = []
    if cfg.train_video:
        # the same generator everywhere: adapters start alike in learner and rollout workers
        generator = torch.Generator().manual_seed(cfg.sampling.seed)
        inject_lora(policy.wam, generator=generator, rank=cfg.lora_rank, alpha=cfg.lora_alpha)
        parts_to_train.append("lora")
    if cfg.train_actions:
        parts_to_train += ["action_expert", "proprio_encoder"]
    select_trainable(policy.wam, parts_to_train, root=policy)
    policy.trained_parts = tuple(parts_to_train)
    return policy


def sampling_settings(cfg: Any) -> SamplingSettings:
    """Read the sampling part of RLinf's ``actor.model`` section."""
    sampling = cfg.sampling
    steps = sampling.stochastic_steps
    return SamplingSettings(
        num_executed=cfg.num_action_chunks,
        denoising_steps=sampling.denoising_steps,
        eval_denoising_steps=sampling.eval_denoising_steps,
        imagination_steps=sampling.imagination_steps,
        noise_level=sampling.noise_level,
        stochastic_steps=tuple(sampling.window) if steps == "window" else steps,
        ignore_last=sampling.ignore_last,
        variant=sampling.variant,
        shift=sampling.shift,
        initial_noise=sampling.initial_noise,
        noise_modes=sampling.noise_modes,
        noise_dims=tuple(sampling.noise_dims),
        seed=sampling.seed,
        keep_video_cache=sampling.wam_cache == "store" and cfg.train_actions,
    )


def _load(checkpoint: Checkpoint, cfg: Any, dtype: torch.dtype) -> PretrainedWAM:
    if checkpoint.kind == "folder":
        return load_pretrained(checkpoint.path, config=checkpoint.config, dtype=dtype)
    # every worker draws the same new weights: those that are not trained are never sent around
    generator = torch.Generator().manual_seed(cfg.sampling.seed)
    source = {"config": checkpoint.config, "dtype": dtype, "generator": generator}
    if checkpoint.kind == "fastwam":
        loaded = from_fastwam(checkpoint.path, checkpoint.statistics, **source)
        model, statistics = loaded.model, loaded.statistics
    else:
        model = from_wan22(checkpoint.path, **source)
        statistics = DatasetStatistics.load(checkpoint.statistics)
    parts = Wan22Parts(
        vae=Path(cfg.vae_path),
        text_encoder=Path(cfg.text_encoder_path),
        tokenizer=None if cfg.tokenizer_path is None else Path(cfg.tokenizer_path),
        text_embedding_cache=Path(cfg.text_embedding_cache_dir),
    )
    pretrained = parts.surround(model, statistics, _processor_config(cfg))
    if cfg.instructions:  # here the first worker does it for all; in a rollout all would wait
        pretrained.text_encoder.encode(list(cfg.instructions))
    return pretrained


def _processor_config(cfg: Any) -> ProcessorConfig:
    if cfg.video_size is None:
        return ProcessorConfig()
    height, width = cfg.video_size
    return ProcessorConfig(image_height=height, image_width=width // 2)
