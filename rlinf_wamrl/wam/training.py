"""Flow-matching losses of every variant, with all random draws made in one place.

Shapes: B batch, C latent channels, f latent frames, T images, H actions, A action width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlinf_wamrl.wam.config import TEMPORAL_STRIDE
from rlinf_wamrl.wam.masks import mixture_mask, teacher_forcing_mask, video_mask

__all__ = [
    "TrainingBatch",
    "TrainingDraws",
    "TrainingLoss",
    "build_batch",
    "compute_loss",
    "draw",
    "joint_attention_mask",
    "teacher_forcing_attention_mask",
]

if TYPE_CHECKING:
    from rlinf_wamrl.wam.wam import WAM


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """What a training step learns from, checked and on the model's device."""

    latents: Tensor  # [B, C, f, h, w] clean
    context: Tensor  # [B, L + 1, text_dim] text and proprio token
    context_mask: Tensor  # [B, L + 1] bool
    actions: Tensor  # [B, H, A] clean
    action_is_pad: Tensor | None  # [B, H] bool
    frame_is_pad: Tensor | None  # [B, f - 1] bool, of the latent frames after the first


@dataclass(frozen=True, kw_only=True)
class TrainingDraws:
    """Every random quantity of a training step."""

    video_noise: Tensor  # [B, C, f, h, w]
    video_timestep: Tensor  # [B] in 0..1000
    action_noise: Tensor  # [B, H, A]
    action_timestep: Tensor  # [B] in 0..1000
    conditioning_is_noised: Tensor | None = None  # [B] bool, idm variants
    conditioning_timestep: Tensor | None = None  # [B], where some sample is noised
    conditioning_noise: Tensor | None = None  # [B, C, f, h, w], where some sample is noised
    actions_see_video: Tensor | None = None  # [B] bool, optional_idm


@dataclass(frozen=True, kw_only=True)
class TrainingLoss:
    """Losses of one step and the predictions behind them."""

    total: Tensor  # [] weighted sum, with gradient
    video: Tensor  # [] not weighted by lambda
    action: Tensor | None  # [] not weighted by lambda; None when only the video was computed
    video_velocity: Tensor  # [B, C, f, h, w]
    action_velocity: Tensor | None  # [B, H, A]

    def scalars(self) -> dict[str, Tensor]:
        """Detached losses by name, still on their device."""
        values = {"loss": self.total, "loss_video": self.video, "loss_action": self.action}
        return {name: value.detach() for name, value in values.items() if value is not None}


def build_batch(model: WAM, sample: Mapping[str, Any]) -> TrainingBatch:
    """Checks a sample and encodes its video.

    Args:
        model: encodes the video with its VAE when the sample has no latents.
        sample: ``video`` [B, 3, T, H, W] in [-1, 1] or ``video_latents`` [B, C, f, h, w];
            ``context`` [B, L, text_dim]; ``context_mask`` [B, L]; ``action`` [B, H, A];
            ``proprio`` [B, T', P] (only the first is used); optionally ``action_is_pad`` [B, H] and
            ``image_is_pad`` [B, T].

    Raises:
        ValueError: a missing entry or a wrong shape, by name.
    """
    for name in ("context", "context_mask", "action"):
        if sample.get(name) is None:
            raise ValueError(f"The training sample lacks {name!r}.")
    latents = _latents(model, sample)
    batch, _, frames = latents.shape[:3]
    if frames < 2:
        raise ValueError(
            "The training video must have at least two latent frames (five images), got "
            f"{frames}: the first is given and not learned."
        )
    actions = sample["action"].to(model.device, torch.float32)
    width = model.action_dim
    if actions.ndim != 3 or actions.shape[0] != batch or actions.shape[2] != width:
        raise ValueError(
            f"sample['action'] must be [{batch}, H, {width}], got {list(actions.shape)}."
        )
    proprio = sample.get("proprio")
    if proprio is not None:
        if proprio.ndim != 3:
            raise ValueError(f"sample['proprio'] must be [B, T, P], got {list(proprio.shape)}.")
        proprio = proprio[:, 0]
    context, context_mask = model.append_proprio(sample["context"], sample["context_mask"], proprio)
    images = 1 + TEMPORAL_STRIDE * (frames - 1)
    image_is_pad = _pad_mask(sample, "image_is_pad", (batch, images), model.device)
    if image_is_pad is not None:
        groups = image_is_pad[:, 1:].unflatten(1, (-1, TEMPORAL_STRIDE))
        image_is_pad = groups.all(dim=2)
    return TrainingBatch(
        latents=latents,
        context=context,
        context_mask=context_mask,
        actions=actions,
        action_is_pad=_pad_mask(sample, "action_is_pad", actions.shape[:2], model.device),
        frame_is_pad=image_is_pad,
    )


def _latents(model: WAM, sample: Mapping[str, Any]) -> Tensor:
    latents, video = sample.get("video_latents"), sample.get("video")
    if latents is None and video is None:
        raise ValueError("The training sample lacks both 'video' and 'video_latents'.")
    if latents is None:
        latents = model.encode_video(video)
    return latents.to(model.device, torch.float32)


def _pad_mask(
    sample: Mapping[str, Any], name: str, shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    mask = sample.get(name)
    if mask is None:
        return None
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(f"sample[{name!r}] must be {list(shape)}, got {list(mask.shape)}.")
    return mask.to(device, torch.bool)


def draw(
    model: WAM, batch: TrainingBatch, generator: torch.Generator | None = None
) -> TrainingDraws:
    """Makes a training step's draws, in the official order.

    Video noise, video timesteps, action noise, action timesteps; for the idm variants then the coin
    of each sample and, only if some sample is to be noised, timesteps and noise of the conditioning
    video; for optional_idm last the coin of what the actions see.

    Args:
        model: gives variant, probabilities and schedules.
        batch: gives the shapes.
        generator: source of randomness; draws are made on its device. None is the global one of the
            model's device.
    """
    source = model.device if generator is None else generator.device
    config, size = model.config, len(batch.latents)

    def normal(like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=generator, device=source, dtype=torch.float32)
        return noise.to(model.device)

    def coin(probability: float) -> Tensor:
        uniform = torch.rand(size, generator=generator, device=source, dtype=torch.float32)
        return uniform < probability

    def video_timestep() -> Tensor:
        return model.train_video_scheduler.sample_training_t(
            size, model.device, generator=generator
        )

    draws: dict[str, Tensor] = {
        "video_noise": normal(batch.latents),
        "video_timestep": video_timestep(),
        "action_noise": normal(batch.actions),
        "action_timestep": model.train_action_scheduler.sample_training_t(
            size, model.device, generator=generator
        ),
    }
    if config.variant in ("idm", "optional_idm"):
        noised = coin(config.video_cond_noise_prob)
        draws["conditioning_is_noised"] = noised.to(model.device)
        if config.video_cond_noise_prob > 0 and bool(noised.any()):
            draws["conditioning_timestep"] = video_timestep()
            draws["conditioning_noise"] = normal(batch.latents)
    if config.variant == "optional_idm":
        draws["actions_see_video"] = coin(config.action_idm_prob).to(model.device)
    return TrainingDraws(**draws)


def compute_loss(
    model: WAM,
    batch: TrainingBatch,
    draws: TrainingDraws,
    lambda_video: float,
    lambda_action: float,
) -> TrainingLoss:
    """The loss of a batch for given draws.

    With ``lambda_action`` 0 the action expert is not run: the video never sees actions, so the
    video loss is the same number without it.

    Args:
        model: the WAM.
        batch: from :func:`build_batch`.
        draws: from :func:`draw`.
        lambda_video: weight of the video loss.
        lambda_action: weight of the action loss.
    """
    video_scheduler, action_scheduler = model.train_video_scheduler, model.train_action_scheduler
    noisy_video = _with_clean_first_frame(
        video_scheduler.add_noise(batch.latents, draws.video_noise, draws.video_timestep),
        batch.latents,
    )
    if lambda_action == 0:
        video_velocity = model.video_expert(
            noisy_video,
            draws.video_timestep,
            batch.context,
            batch.context_mask,
            _conditioning_actions(model, batch),
        )
        action_velocity = action_loss = None
    else:
        noisy_actions = action_scheduler.add_noise(
            batch.actions, draws.action_noise, draws.action_timestep
        )
        video_velocity, action_velocity = _predict(model, batch, draws, noisy_video, noisy_actions)
        action_loss = _weighted_mean(
            (action_velocity - action_scheduler.training_target(batch.actions, draws.action_noise))
            .square()
            .mean(dim=2),
            batch.action_is_pad,
            action_scheduler.training_weight(draws.action_timestep),
        )
    error = video_velocity - video_scheduler.training_target(batch.latents, draws.video_noise)
    video_loss = _weighted_mean(
        error[:, :, 1:].square().mean(dim=(1, 3, 4)),
        batch.frame_is_pad,
        video_scheduler.training_weight(draws.video_timestep),
    )
    total = lambda_video * video_loss
    if action_loss is not None:
        total = total + lambda_action * action_loss
    return TrainingLoss(
        total=total,
        video=video_loss,
        action=action_loss,
        video_velocity=video_velocity,
        action_velocity=action_velocity,
    )


def _weighted_mean(per_step: Tensor, is_pad: Tensor | None, weight: Tensor) -> Tensor:
    """Mean over the steps [B, N] that are not padding, then the weighted mean over B."""
    if is_pad is None:
        per_sample = per_step.mean(dim=1)
    else:
        kept = (~is_pad).to(per_step.dtype)
        per_sample = (per_step * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1.0)
    return (per_sample * weight).mean()


def _with_clean_first_frame(noisy: Tensor, clean: Tensor) -> Tensor:
    return torch.cat((clean[:, :, :1], noisy[:, :, 1:]), dim=2)


def _conditioning_actions(model: WAM, batch: TrainingBatch) -> Tensor | None:
    return batch.actions if model.config.video_dit_config.action_conditioned else None


def _predict(
    model: WAM, batch: TrainingBatch, draws: TrainingDraws, noisy_video: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    """Video and action velocities under the variant's mask."""
    if model.config.variant in ("uncond", "joint"):
        return model.joint_velocity(
            noisy_video,
            draws.video_timestep,
            actions,
            draws.action_timestep,
            batch.context,
            batch.context_mask,
            _conditioning_actions(model, batch),
        )
    return _predict_teacher_forced(model, batch, draws, noisy_video, actions)


def _predict_teacher_forced(
    model: WAM, batch: TrainingBatch, draws: TrainingDraws, noisy_video: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`_predict`, the actions reading a second, conditioning copy of the video."""
    expert, context = model.video_expert, (batch.context, batch.context_mask)
    noisy, time = expert.embed(noisy_video, draws.video_timestep, *context)
    conditioning, _ = expert.embed(*_conditioning_video(model, batch, draws), *context)
    action = model.action_expert.embed(actions, draws.action_timestep, *context)
    video_tokens, action_tokens = model.mot(
        noisy.followed_by(conditioning),
        action,
        teacher_forcing_attention_mask(model, batch.latents, actions.shape[1], draws),
    )
    kept = video_tokens[:, : noisy.tokens.shape[1]]
    return expert.velocity(kept, time, noisy_video), model.action_expert.velocity(
        action_tokens, actions.dtype
    )


def _conditioning_video(
    model: WAM, batch: TrainingBatch, draws: TrainingDraws
) -> tuple[Tensor, Tensor]:
    """Latents and timesteps of the video the actions read: clean, or noised where drawn so."""
    if draws.conditioning_noise is None:
        return batch.latents, torch.zeros_like(draws.video_timestep)
    noised = draws.conditioning_is_noised
    timestep = torch.where(noised, draws.conditioning_timestep, 0.0)
    latents = model.train_video_scheduler.add_noise(
        batch.latents, draws.conditioning_noise, timestep
    )
    return _with_clean_first_frame(latents, batch.latents), timestep


def joint_attention_mask(model: WAM, latents: Tensor, num_actions: int) -> Tensor:
    """Mask [S + H, S + H] of one noisy video and the actions."""
    video, tokens_per_frame = _video_mask(model, latents)
    visible = tokens_per_frame if model.config.variant == "uncond" else len(video)
    return mixture_mask(video, num_actions, visible)


def teacher_forcing_attention_mask(
    model: WAM, latents: Tensor, num_actions: int, draws: TrainingDraws
) -> Tensor:
    """Mask [2 S + H, 2 S + H], or [B, 1, ...] where the samples' actions see different things."""
    video, tokens_per_frame = _video_mask(model, latents)
    whole = teacher_forcing_mask(video, num_actions, len(video))
    if draws.actions_see_video is None:
        return whole
    first = teacher_forcing_mask(video, num_actions, tokens_per_frame)
    return torch.where(draws.actions_see_video[:, None, None, None], whole, first)


def _video_mask(model: WAM, latents: Tensor) -> tuple[Tensor, int]:
    frames, rows, columns = model.video_expert.grid(latents)
    mode = model.config.video_dit_config.video_attention_mask_mode
    return video_mask(mode, frames, rows * columns, latents.device), rows * columns
