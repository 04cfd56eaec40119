"""Pretraining of a small World-Action Model on recorded episodes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_wamrl.config.checkpoints import checkpoint_path, shipped_checkpoints
from rlinf_wamrl.data.recorded_episode import Episode
from rlinf_wamrl.policy import SamplingSettings, WAMPolicy
from rlinf_wamrl.pretrain.dataset import Windows, episode_videos, load_successes, statistics_of
from rlinf_wamrl.pretrain.evaluate import Played, evaluate_pretrained, pretrained_policy
from rlinf_wamrl.pretrain.imagine import imagine_pretrained
from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.config import ACTION_INFER_MODES, WAMConfig
from rlinf_wamrl.wam.pretrained import PretrainedWAM, load_pretrained, save_pretrained
from rlinf_wamrl.wam.text import HashedWordEncoder
from rlinf_wamrl.wam.vae import reconstruction_psnr
from rlinf_wamrl.wam.vae_patch import PatchVAE, PatchVAEConfig
from rlinf_wamrl.wam.wam import WAM

__all__ = ["pretrain", "train_wam"]

HOLD_OUT = 10
"""Every tenth episode measures the autoencoder instead of fitting it."""

FIT_STRIDE = 48
"""Steps between windows the autoencoder is fitted to: neighbours look alike."""


def pretrain(cfg: DictConfig, report: Callable[[str], None] = print) -> PretrainedWAM:
    """Fit the autoencoder or load a checkpoint, train the model, save it.

    Args:
        cfg: a :class:`~rlinf_wamrl.pretrain.config.PretrainConfig`.
        report: called with lines that describe progress.
    """
    if cfg.train.num_threads:
        torch.set_num_threads(cfg.train.num_threads)
    episodes = load_successes(cfg.demos_dir)
    window = {
        "horizon": cfg.model.action_horizon,
        "num_frames": cfg.model.num_video_frames,
    }
    start = _trained_before(cfg) if cfg.start_from else _untrained(cfg, episodes, window)
    processor, vae = start.processor, start.vae
    windows = Windows.build(episodes, processor, vae, start.text_encoder, **window)
    quality = reconstruction_psnr(
        vae, episode_videos(episodes[::HOLD_OUT], processor, stride=FIT_STRIDE, **window)
    )
    report(f"{len(episodes)} successful episodes, {len(windows)} windows; {quality}")
    averaged = train_wam(start.model, windows, cfg.train, report)
    recipe = OmegaConf.to_container(cfg, resolve=True)
    for folder in ("demos_dir", "output_dir"):
        recipe.pop(folder)
    training = {"autoencoder": asdict(quality), "recipe": recipe}
    # measuring takes long and may fail: the weights are kept before it begins
    pretrained = _save(replace(start, model=averaged), training, cfg, report)
    policy = pretrained_policy(pretrained, _evaluation_settings(cfg))
    played = _play_in_each_mode(policy, cfg, report)
    trained_mode = averaged.action_infer_mode
    imagined = imagine_pretrained(policy, played[trained_mode], Path(cfg.output_dir), report)
    success = {
        mode: {f"task_{task}": one.score for task, one in tasks.items()}
        for mode, tasks in played.items()
    }
    measured = {"held_out_success": success, "imagination": imagined}
    return _save(pretrained, measured | training, cfg, report)


def _untrained(
    cfg: DictConfig, episodes: Sequence[Episode], window: Mapping[str, int]
) -> PretrainedWAM:
    """Fit the autoencoder and the normalisation to the data, and draw a model's weights."""
    processor = Processor.build(_processor_config(cfg), statistics_of(episodes))
    fitted = [episode for index, episode in enumerate(episodes) if index % HOLD_OUT] or episodes
    videos = episode_videos(fitted, processor, stride=FIT_STRIDE, **window)
    vae = PatchVAE.fit(videos, _vae_config(cfg))
    torch.manual_seed(cfg.train.seed)
    return PretrainedWAM(
        model=WAM(_wam_config(cfg), vae),
        vae=vae,
        text_encoder=_text_encoder(cfg),
        processor=processor,
    )


def _trained_before(cfg: DictConfig) -> PretrainedWAM:
    """Load the checkpoint ``start_from``.

    Raises:
        FileNotFoundError: it is no checkpoint folder.
        ValueError: its sizes are not those that the recipe describes.
    """
    name = f"start_from = {cfg.start_from!r}"
    try:
        found = load_pretrained(checkpoint_path(cfg.start_from), config=_wam_config(cfg))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: {error}; give one that ships with the package "
            f"({', '.join(shipped_checkpoints())}) or a folder written by 'rlinf pretrain'"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{name}: {error}; keep model and latent_channels as the checkpoint has them"
        ) from error
    for keys, recipe, stored in (
        ("demos.image_size", asdict(_processor_config(cfg)), asdict(found.processor.config)),
        ("latent_scale", asdict(_vae_config(cfg)), asdict(found.vae.config)),
        ("text_length", _text_encoder(cfg).settings, found.text_encoder.settings),
    ):
        for field, value in stored.items():
            if recipe[field] != value:
                raise ValueError(
                    f"{name} was made with {field} = {value!r}, but {keys} makes it "
                    f"{recipe[field]!r}: keep what the checkpoint has"
                )
    return found


def _processor_config(cfg: DictConfig) -> ProcessorConfig:
    size = cfg.demos.image_size
    return ProcessorConfig(image_height=size, image_width=size, gripper_convention="libero")


def _vae_config(cfg: DictConfig) -> PatchVAEConfig:
    size = cfg.demos.image_size
    return PatchVAEConfig(
        image_height=size,
        image_width=2 * size,
        latent_channels=cfg.latent_channels,
        scale=cfg.latent_scale,
    )


def _text_encoder(cfg: DictConfig) -> HashedWordEncoder:
    return HashedWordEncoder(dim=cfg.model.video_dit_config.text_dim, length=cfg.text_length)


def _wam_config(cfg: DictConfig) -> WAMConfig:
    model = OmegaConf.to_container(cfg.model, resolve=True)
    for width in ("in_dim", "out_dim"):
        model["video_dit_config"][width] = cfg.latent_channels
    return WAMConfig.from_dict(model)


def _save(
    pretrained: PretrainedWAM,
    training: dict[str, Any],
    cfg: DictConfig,
    report: Callable[[str], None],
) -> PretrainedWAM:
    """Write the checkpoint with what is known of it."""
    pretrained = replace(pretrained, training=training)
    save_pretrained(pretrained, Path(cfg.output_dir), overwrite=True)
    report(f"checkpoint {cfg.output_dir}")
    return pretrained


def _play_in_each_mode(
    policy: WAMPolicy, cfg: DictConfig, report: Callable[[str], None]
) -> dict[str, dict[int, Played]]:
    """Play the held-out states in every inference mode the variant was trained for."""
    own = policy.wam.config
    modes = ACTION_INFER_MODES if own.variant == "optional_idm" else (own.action_infer_mode,)
    played = {}
    for mode in modes:
        report(f"held-out states, action_infer_mode {mode}")
        policy.wam.config = replace(own, action_infer_mode=mode)
        states = cfg.evaluation.init_state_range
        played[mode] = evaluate_pretrained(policy, cfg.demos, states, report=report)
    policy.wam.config = own
    return played


def _evaluation_settings(cfg: DictConfig) -> SamplingSettings:
    return SamplingSettings(
        num_executed=cfg.evaluation.num_action_chunks,
        denoising_steps=cfg.evaluation.denoising_steps,
        eval_denoising_steps=cfg.evaluation.denoising_steps,
        imagination_steps=cfg.evaluation.denoising_steps,
        noise_level=0.5,
        seed=cfg.train.seed,
    )


def train_wam(model: WAM, windows: Windows, train: Any, report: Callable[[str], None]) -> WAM:
    """Minimise the flow-matching loss over random windows.

    Args:
        model: trained in place.
        windows: the data.
        train: :class:`~rlinf_wamrl.pretrain.config.TrainConfig`.
        report: called with progress lines.

    Returns:
        A copy of the model with exponentially averaged weights.
    """
    generator = torch.Generator().manual_seed(train.seed)
    weights = windows.weights(train.task_weights)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.lr, betas=(0.9, 0.95), weight_decay=train.weight_decay
    )
    averaged = copy.deepcopy(model)
    trained, smooth = list(model.parameters()), list(averaged.parameters())
    totals: dict[str, float] = {}
    started = time.monotonic()
    for step in range(train.steps):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * _rate(step, train)
        rows = torch.multinomial(weights, train.batch_size, replacement=True, generator=generator)
        loss, scalars = model.training_loss(windows.sample(rows), generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, train.clip_grad)
        optimizer.step()
        decay = min(train.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(smooth, trained, 1 - decay)
        for name, value in scalars.items():
            totals[name] = totals.get(name, 0.0) + float(value)
        if not math.isfinite(totals["loss"]):
            raise FloatingPointError(f"the loss is not finite at step {step}: lower train.lr")
        if (step + 1) % 100 == 0 or step + 1 == train.steps:
            count = step % 100 + 1
            means = "  ".join(f"{name} {value / count:.4f}" for name, value in totals.items())
            report(f"step {step + 1}/{train.steps}  {means}  {time.monotonic() - started:.0f}s")
            totals = {}
    return averaged


def _rate(step: int, train: Any) -> float:
    """Linear warm-up, then cosine down to ``final_lr_rate``."""
    warm = min(1.0, (step + 1) / max(train.warmup_steps, 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / max(train.steps, 1)))
    return warm * (train.final_lr_rate + (1.0 - train.final_lr_rate) * cosine)
