"""What the learner asks of the policy beside log-probs: imagination rewards and video losses.

They are functions on a :class:`~rlinf_wamrl.policy.WAMPolicy`, reached through its ``forward``
because a sharded model is whole only inside that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlinf_wamrl.data.success_buffer import VideoWindows
from rlinf_wamrl.processing import pixels_to_unit
from rlinf_wamrl.rl.losses import (
    FeatureStatistics,
    feature_kl_loss,
    feature_moments,
    video_sft_loss,
)
from rlinf_wamrl.rl.moments import Moments
from rlinf_wamrl.rl.reward import (
    ReconstructionReward,
    RewardBatch,
    RewardSettings,
    reconstruction_reward,
)
from rlinf_wamrl.rl.similarity import Similarity
from rlinf_wamrl.streams import random_stream
from rlinf_wamrl.wam.features import capture_video_features
from rlinf_wamrl.wam.lora import (
    Features,
    frozen_features,
    live_and_frozen_features,
    pretrained_features,
)
from rlinf_wamrl.wam.state import WAMState, stack_keys_values

if TYPE_CHECKING:
    from rlinf_wamrl.policy import WAMPolicy

__all__ = ["VideoLoss", "calibration_moments", "imagination_rewards", "video_cache", "video_loss"]


@dataclass(frozen=True, kw_only=True)
class VideoLoss:
    """One step of video training."""

    total: Tensor  # [] with gradient to the adapters
    metrics: Mapping[str, Tensor]  # detached scalars
    live: Moments | None  # of the features of the batch; None without feature KL
    frozen: Moments | None


def imagination_rewards(
    policy: WAMPolicy,
    records: Mapping[str, Tensor],
    frames: Mapping[str, Tensor],
    *,
    settings: RewardSettings,
    similarity: Similarity,
    keep_imagined: int = 0,
) -> ReconstructionReward:
    """Score recorded macro-steps by what the model imagines of them.

    Args:
        policy: the policy; its frozen or live video expert imagines.
        records: ``forward_inputs`` of N macro-steps, with ``executed_mask``.
        frames: ``future_frames`` uint8 [N,n,3,H,W] and ``future_frames_mask`` bool [N,n].
        settings: how to compare.
        similarity: the measure.
        keep_imagined: imagined macro-steps kept for pictures.
    """
    context, mask, rows = policy.shared_context(policy.instructions_of(records))
    keys = zip(records["episode_id"].tolist(), records["elapsed_steps"].tolist(), strict=True)
    batch = RewardBatch(
        image=records["image"],
        future_frames=frames["future_frames"],
        future_frames_exist=frames["future_frames_mask"],
        executed_mask=records["executed_mask"],
        context=context,
        context_mask=mask,
        context_index=rows,
        proprio=records["proprio"].to(policy.dtype),
        video_latents=records.get("video_latents"),
    )
    return reconstruction_reward(
        policy.wam,
        batch,
        settings=settings,
        generators=[random_stream(policy.settings.seed, "reward", *key) for key in keys],
        similarity=similarity,
        keep_imagined=keep_imagined,
    )


def video_loss(
    policy: WAMPolicy,
    windows: VideoWindows,
    *,
    generator: torch.Generator,
    lambda_action: float,
    lambda_kl: float,
    statistics: FeatureStatistics | None,
) -> VideoLoss:
    """Return video SFT plus λ_KL feature KL on windows of successful episodes.

    Args:
        policy: the policy, with adapters on its video expert.
        windows: what happened.
        generator: of timesteps and noise.
        lambda_action: weight of the action loss.
        lambda_kl: λ_KL; 0 leaves the feature KL out.
        statistics: variances of the feature KL; needed when ``lambda_kl`` is positive.
    """
    sample = training_sample(policy, windows)
    video = policy.wam.encode_video(sample.pop("video"))
    sample["video_latents"] = video
    if lambda_kl == 0 or statistics is None:
        total, metrics = video_sft_loss(policy.wam, sample, generator, lambda_action)
        return VideoLoss(total=total, metrics=metrics, live=None, frozen=None)
    with capture_video_features(policy.wam) as passed:
        total, metrics = video_sft_loss(policy.wam, sample, generator, lambda_action)
    live, frozen = _features(policy, windows, sample, passed)
    kl = feature_kl_loss(live, frozen, statistics)
    metrics = {
        **metrics,
        "video/feature_kl": kl.loss.detach(),
        "video/feature_kl_layer_max": kl.per_layer.max(),
    }
    return VideoLoss(
        total=total + lambda_kl * kl.loss,
        metrics=metrics,
        live=feature_moments(live),
        frozen=feature_moments(frozen),
    )


def _features(
    policy: WAMPolicy, windows: VideoWindows, sample: Mapping[str, Any], passed: Features
) -> tuple[Features, Features]:
    """Return live and frozen features of what the policy acts on at the start of each window.

    A first frame that sees no other has passed through the live expert already, in the video loss.

    Args:
        policy: the policy.
        windows: what the sample was made of.
        sample: with ``video_latents``.
        passed: features of the video loss, of each layer once.
    """
    video = sample["video_latents"].to(policy.dtype)
    context, mask, rows = policy.shared_context(windows.instruction)
    state = WAMState(
        first_frame=video[:, :, :1],
        context=context,
        context_mask=mask,
        context_rows=rows,
        proprio=sample["proprio"][:, 0],
        video=video if policy.imagines else None,
    )
    if policy.imagines or not policy.wam.first_frame_stands_alone:
        return live_and_frozen_features(policy.wam, state)
    frozen = pretrained_features(policy.wam, state)
    tokens = frozen[0][0].shape[1]
    return [(key[:, :tokens], value[:, :tokens]) for key, value in passed], frozen


@torch.no_grad()
def calibration_moments(policy: WAMPolicy, records: Mapping[str, Tensor]) -> Moments:
    """Return the moments of the frozen video features of recorded observations."""
    state = policy.recorded_state(records)
    with frozen_features(policy.wam), capture_video_features(policy.wam) as frozen:
        policy.wam.prefill(state)
    return feature_moments(frozen)


@torch.no_grad()
def video_cache(policy: WAMPolicy, records: Mapping[str, Tensor]) -> Tensor:
    """Return what the action expert reads of the video of N recorded macro-steps.

    Returns:
        Keys and values [N,layers,2,S,I], as a record's ``video_cache``.
    """
    cache = policy.wam.prefill(policy.recorded_state(records))
    return stack_keys_values(list(zip(cache.video_keys, cache.video_values, strict=True)))


def training_sample(policy: WAMPolicy, windows: VideoWindows) -> dict[str, Any]:
    """Return windows as the sample that ``training_loss`` takes."""
    context, mask = policy.context(windows.instruction)
    return {
        "video": pixels_to_unit(windows.video.to(policy.device)),
        "action": policy.processor.training_actions(windows.action).to(policy.device),
        "action_is_pad": windows.action_is_pad.to(policy.device),
        "image_is_pad": windows.image_is_pad.to(policy.device),
        "proprio": windows.proprio.to(policy.device, policy.dtype),
        "context": context,
        "context_mask": mask,
    }
