"""The reconstruction reward: does what happened look like what the model had imagined?

From the observation before a chunk the video expert imagines the coming frames; those that the
executed actions reached are compared with what the cameras then saw. The reward is minus the error.
Between iterations it is normalised by a running mean and standard deviation.

Shapes: B macro-steps, n later frames kept of each, C executed actions, V cameras side by side, H
and W pixels of the whole picture, c channels, f frames, h and w cells of the latent video.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from rlinf_wamrl.rl.adapters import adapters_disabled
from rlinf_wamrl.rl.moments import RunningNormaliser
from rlinf_wamrl.rl.similarity import (
    FramePairs,
    Similarity,
    motion_weight,
    pixel_mse,
    weighted_mean,
)

__all__ = [
    "ImaginationModel",
    "Observation",
    "ReconstructionReward",
    "RewardBatch",
    "RewardSettings",
    "RunningNormaliser",
    "place_in_last_executed",
    "reached_frames",
    "reconstruction_reward",
]

Source = Literal["rollout", "frozen", "live"]
Comparison = Literal["pixels", "vae_roundtrip"]
Weighting = Literal["uniform", "motion"]


class ImaginationModel(Protocol):
    """What the reward asks of a World-Action Model."""

    device: torch.device
    num_latent_frames: int  # f
    vae: Any  # encode(video [B,3,T,H,W] in [-1,1]), decode(latents), temporal_factor
    video_expert: nn.Module  # perhaps with adapters

    def imagine(
        self,
        state: Any,
        num_steps: int,
        *,
        noise: Tensor,
        shift: float | None,
        actions: Tensor | None,
    ) -> Tensor:
        """Denoise the video of an :class:`Observation`; [B, c, f, h, w], first frame given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What an imagination starts from."""

    first_frame: Tensor  # [B, c, 1, h, w] the current picture, encoded
    context: Tensor  # [U, L, text_dim] of the U instructions
    context_mask: Tensor  # [U, L] bool
    context_rows: Tensor  # [B] int64, the instruction of each
    proprio: Tensor | None  # [B, P] normalised


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """How imagination and execution are compared."""

    source: Source = "frozen"
    """Whose imagination: of the pretrained video expert, of the live one, or the very video that
    the actions were conditioned on (rollout: from the record)."""
    num_steps: int = 10
    """K_video: denoising steps of the video."""
    shift: float | None = None
    """Sigma shift of the video's denoising grid; None takes the model's."""
    compare: Comparison = "pixels"
    """``vae_roundtrip`` encodes and decodes the executed frames, too, so that what the autoencoder
    loses counts on neither side."""
    weight: Weighting = "uniform"
    """``motion`` gives half of the weight to where something moves."""
    action_video_freq_ratio: int = 4
    """Actions per video frame: kept frame j shows the state after (j + 1) times as many."""
    num_cameras: int = 2
    """V: pictures side by side, compared one by one."""
    max_batch: int = 8
    """Macro-steps imagined and decoded at a time."""

    def __post_init__(self) -> None:
        for name, kind in (("source", Source), ("compare", Comparison), ("weight", Weighting)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"the reward's {name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}"
                )
        for name in ("num_steps", "action_video_freq_ratio", "num_cameras", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"the reward's {name} must be at least 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardBatch:
    """What the reward needs of B macro-steps, on any device."""

    image: Tensor  # uint8 [B, 3, H, W] before the chunk
    future_frames: Tensor  # uint8 [B, n, 3, H, W]
    future_frames_exist: Tensor  # bool [B, n]; False: past the end of the episode
    executed_mask: Tensor  # bool [B, C]; False: the action did not run
    context: Tensor  # [U, L, text_dim] text embeddings of the U instructions
    context_mask: Tensor  # bool [U, L]
    context_index: Tensor  # int64 [B], row of ``context``
    proprio: Tensor | None = None  # float32 [B, P] normalised
    video_latents: Tensor | None = None  # [B, c, f, h, w] imagined in the rollout
    actions: Tensor | None = None  # [B, horizon, A], for an action-conditioned video expert

    def __post_init__(self) -> None:
        size = len(self.image)
        picture = tuple(self.image.shape[1:])
        if self.image.dtype != torch.uint8 or len(picture) != 3 or picture[0] != 3:
            raise ValueError(
                f"image must be uint8 [B, 3, H, W], got {self.image.dtype} {list(self.image.shape)}"
            )
        frames = tuple(self.future_frames.shape)
        fits = len(frames) == 5 and frames[0] == size and frames[1] > 0 and frames[2:] == picture
        if self.future_frames.dtype != torch.uint8 or not fits:
            raise ValueError(
                f"future_frames must be uint8 [{size}, n, {', '.join(map(str, picture))}] with at "
                f"least one frame, got {self.future_frames.dtype} {list(frames)}"
            )
        if tuple(self.future_frames_exist.shape) != frames[:2]:
            raise ValueError(
                f"future_frames_exist must be {list(frames[:2])}, got "
                f"{list(self.future_frames_exist.shape)}"
            )
        for name in ("executed_mask", "context_index", "proprio", "video_latents", "actions"):
            value = getattr(self, name)
            if value is not None and len(value) != size:
                raise ValueError(f"{name} has {len(value)} rows, the batch has {size}")

    def __len__(self) -> int:
        return len(self.image)

    def select(self, rows: Tensor) -> RewardBatch:
        """Return the macro-steps ``rows`` (int64)."""
        shared = ("context", "context_mask")
        chosen = {
            name: value[rows.to(value.device)]
            for name, value in vars(self).items()
            if name not in shared and value is not None
        }
        return replace(self, **chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReconstructionReward:
    """Rewards on the CPU, not normalised: minus the error, so 0 is a perfect match."""

    reward: Tensor  # float32 [B], mean over reached frames; 0 where ``mask`` is False
    mask: Tensor  # bool [B], False: no frame was reached, there is no reward
    per_frame: Tensor  # float32 [B, n], 0 where ``frame_mask`` is False
    frame_mask: Tensor  # bool [B, n]
    imagined: Tensor  # uint8 [k, n, 3, H, W] of the first k macro-steps, black where not imagined


@torch.no_grad()
def reconstruction_reward(
    model: ImaginationModel,
    batch: RewardBatch,
    use_frozen: bool | None = None,
    *,
    settings: RewardSettings | None = None,
    generators: Sequence[torch.Generator] | None = None,
    similarity: Similarity = pixel_mse,
    keep_imagined: int = 0,
) -> ReconstructionReward:
    """Imagine each macro-step, decode, and compare with what happened.

    The video starts from noise with the encoded current picture as its first frame, which stays
    clean through K_video steps of the video expert alone. Only macro-steps that reached a frame are
    imagined, at most ``max_batch`` at a time, and each costs K_video passes of the video expert.

    Args:
        model: a WAM with its autoencoder, or an adapted official object.
        batch: the macro-steps.
        use_frozen: True imagines with the video expert's adapters off, False with them on; None
            does as ``settings.source`` says.
        settings: how to compare; None takes the defaults.
        generators: one CPU generator per macro-step, of its initial noise: the reward of a
            macro-step then does not depend on the batch it is in. Unused with source rollout.
        similarity: see :mod:`rlinf_wamrl.rl.similarity`.
        keep_imagined: k, macro-steps whose imagined frames are kept for pictures.

    Raises:
        ValueError: what the settings ask for is not in the batch, or sizes that do not fit.
    """
    settings = settings or RewardSettings()
    source = settings.source if use_frozen is None else ("frozen" if use_frozen else "live")
    _check(model, batch, settings, source, generators)
    frame_mask = reached_frames(
        batch.executed_mask, batch.future_frames_exist, settings.action_video_freq_ratio
    ).cpu()
    per_frame = torch.zeros(frame_mask.shape)
    shape = (min(keep_imagined, len(batch)), *batch.future_frames.shape[1:])
    kept = torch.zeros(shape, dtype=torch.uint8)
    rows = frame_mask.any(dim=1).nonzero().squeeze(1)
    parts = rows.split(settings.max_batch) if len(rows) else ()
    with adapters_disabled(model.video_expert) if source == "frozen" else nullcontext():
        for part in parts:
            chosen, reached = batch.select(part), frame_mask[part]
            seen = _observe(model, chosen, reached, settings)
            if source == "rollout":
                video = chosen.video_latents
            else:
                streams = [generators[row] for row in part.tolist()]
                video = _imagine(model, chosen, seen.first_frame, settings, streams)
            imagined = _decode(model, video, reached.shape[1])[:, 1:]
            per_frame[part] = _compare(seen, imagined, reached, settings, similarity)
            wanted = part < len(kept)
            kept[part[wanted]] = imagined[wanted].mul(255.0).round().to(torch.uint8).cpu()
    return ReconstructionReward(
        reward=per_frame.sum(dim=1) / frame_mask.sum(dim=1).clamp(min=1),
        mask=frame_mask.any(dim=1),
        per_frame=per_frame,
        frame_mask=frame_mask,
        imagined=kept,
    )


def _check(
    model: ImaginationModel,
    batch: RewardBatch,
    settings: RewardSettings,
    source: str,
    generators: Sequence[torch.Generator] | None,
) -> None:
    if model.vae is None:
        raise ValueError("the reconstruction reward decodes pictures, but the model has no VAE")
    frames, width = batch.future_frames.shape[1], batch.image.shape[-1]
    if frames > model.vae.temporal_factor * (model.num_latent_frames - 1):
        raise ValueError(
            f"{frames} executed frames cannot be compared with a video of "
            f"{model.num_latent_frames} latent frames: keep fewer (env.train.num_future_frames)"
        )
    if width % settings.num_cameras:
        raise ValueError(
            f"a picture {width} pixels wide does not hold {settings.num_cameras} equal cameras"
        )
    if source == "rollout":
        if batch.video_latents is None:
            raise ValueError(
                "the reward's source is rollout, but the record holds no video_latents: only in "
                "idm mode are actions conditioned on an imagined video; use frozen or live"
            )
    elif generators is None or len(generators) != len(batch):
        given = "none" if generators is None else len(generators)
        raise ValueError(f"{len(batch)} macro-steps need as many generators, got {given}")


def reached_frames(
    executed_mask: Tensor, future_frames_exist: Tensor, action_video_freq_ratio: int
) -> Tensor:
    """Return which kept frames the executed actions reached.

    Args:
        executed_mask: bool [B, C].
        future_frames_exist: bool [B, n].
        action_video_freq_ratio: actions per frame.

    Returns:
        bool [B, n]; a frame counts only with all frames before it.

    Raises:
        ValueError: frames beyond the C executed actions.
    """
    frames, actions = future_frames_exist.shape[1], executed_mask.shape[1]
    if frames * action_video_freq_ratio > actions:
        raise ValueError(
            f"{frames} frames, one every {action_video_freq_ratio} actions, reach beyond the "
            f"{actions} executed actions of a chunk: keep fewer (env.train.num_future_frames)"
        )
    executed = executed_mask[:, action_video_freq_ratio - 1 :: action_video_freq_ratio][:, :frames]
    reached = executed.bool() & future_frames_exist.bool().to(executed.device)
    return reached.cumprod(dim=1).bool()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seen:
    """What the cameras saw, in [0, 1], as it is compared."""

    current: Tensor  # [b, 3, H, W]
    executed: Tensor  # [b, n, 3, H, W]
    first_frame: Tensor | None  # [b, c, 1, h, w] the current picture, where it was encoded anyway


def _observe(
    model: ImaginationModel, batch: RewardBatch, reached: Tensor, settings: RewardSettings
) -> _Seen:
    """Bring the pictures to the model, and through its autoencoder if so wanted."""
    pictures = torch.cat((batch.image.unsqueeze(1), batch.future_frames), dim=1)
    if settings.compare == "pixels":
        first_frame = None
        frames = (_to_unit(pictures.to(model.device)) + 1.0) / 2.0
    else:
        count = 1 + model.vae.temporal_factor * _later_latents(model, reached.shape[1])
        # past the last frame that was reached the picture stands still
        index = torch.arange(count).minimum(reached.sum(dim=1, keepdim=True)).to(pictures.device)
        clip = pictures[torch.arange(len(pictures), device=pictures.device)[:, None], index]
        latents = model.vae.encode(_to_unit(clip.to(model.device)).transpose(1, 2))
        first_frame = latents[:, :, :1]
        frames = _decode(model, latents, reached.shape[1])
    return _Seen(current=frames[:, 0], executed=frames[:, 1:], first_frame=first_frame)


def _to_unit(pixels: Tensor) -> Tensor:
    """Map uint8 pixels to [-1, 1], as the policy does."""
    return pixels.float() * (2.0 / 255.0) - 1.0


def _later_latents(model: ImaginationModel, frames: int) -> int:
    """Latent frames after the first that hold the first ``frames`` later pictures."""
    return -(-frames // model.vae.temporal_factor)


def _imagine(
    model: ImaginationModel,
    batch: RewardBatch,
    first_frame: Tensor | None,
    settings: RewardSettings,
    streams: Sequence[torch.Generator],
) -> Tensor:
    if first_frame is None:
        first_frame = model.vae.encode(_to_unit(batch.image.to(model.device)).unsqueeze(2))
    channels, _, height, width = first_frame.shape[1:]
    shape = (channels, model.num_latent_frames, height, width)
    noise = torch.stack([torch.randn(shape, generator=stream) for stream in streams])
    observation = Observation(
        first_frame=first_frame,
        context=batch.context,
        context_mask=batch.context_mask,
        context_rows=batch.context_index.to(batch.context.device),
        proprio=None if batch.proprio is None else batch.proprio.to(model.device),
    )
    actions = None if batch.actions is None else batch.actions.to(model.device)
    return model.imagine(
        observation, settings.num_steps, noise=noise, shift=settings.shift, actions=actions
    )


def _decode(model: ImaginationModel, latents: Tensor, frames: int) -> Tensor:
    """Return the first picture and ``frames`` later ones, [b, 1 + frames, 3, H, W] in [0, 1].

    Time is causal in the autoencoder: latent frames past the last wanted picture are not needed.
    """
    needed = latents[:, :, : 1 + _later_latents(model, frames)]
    video = model.vae.decode(needed.to(model.device, torch.float32)).float()
    return (video[:, :, : 1 + frames].clamp(-1.0, 1.0).transpose(1, 2) + 1.0) / 2.0


def _compare(
    seen: _Seen,
    imagined: Tensor,
    reached: Tensor,
    settings: RewardSettings,
    similarity: Similarity,
) -> Tensor:
    """Return minus the error of each reached frame [b, n], averaged over cameras."""
    rows, frames = reached.to(imagined.device).nonzero(as_tuple=True)

    def cameras(pictures: Tensor) -> Tensor:
        """[m, 3, H, W] to [m * V, 3, H, W / V]."""
        views = pictures.unflatten(-1, (settings.num_cameras, -1)).movedim(-2, 1)
        return views.flatten(0, 1)

    pairs = FramePairs(
        current=cameras(seen.current[rows]),
        imagined=cameras(imagined[rows, frames]),
        executed=cameras(seen.executed[rows, frames]),
    )
    weight = motion_weight(pairs) if settings.weight == "motion" else None
    error = weighted_mean(similarity(pairs), weight).view(-1, settings.num_cameras).mean(dim=1)
    reward = error.new_zeros(reached.shape)
    reward[rows, frames] = -error
    return reward.float().cpu()


def place_in_last_executed(reward: Tensor, mask: Tensor, executed_mask: Tensor) -> Tensor:
    """Lay one reward per macro-step out over its actions, as RLinf's reward models return it.

    A value per macro-step broadcast over the actions would count as often as there are actions.

    Args:
        reward: [B].
        mask: bool [B], False where there is none.
        executed_mask: bool [B, C].

    Returns:
        float32 [B, C]: the reward in the slot of the last executed action, 0 elsewhere.
    """
    actions = executed_mask.shape[1]
    slots = torch.arange(actions, device=executed_mask.device)
    last = torch.where(executed_mask, slots, -1).amax(dim=1, keepdim=True)
    value = torch.where(mask, reward, 0.0).float().to(executed_mask.device)
    return torch.where(slots == last, value.unsqueeze(1), 0.0)
