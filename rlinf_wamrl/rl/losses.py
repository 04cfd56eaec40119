"""Losses of WAM-RL: PPO for the actions; supervision and a feature KL for the imagined video.

Pure functions on tensors; diagnostics are computed beside the loss, under no_grad.

Shapes of features: N layers, B samples, S video tokens, I attention width. A layer's feature is the
pair of its keys and values, what the action expert reads of the video.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlinf_wamrl.rl.moments import Moments

__all__ = [
    "FeatureKL",
    "FeatureStatistics",
    "VideoModel",
    "feature_kl_loss",
    "feature_moments",
    "gradient_stopped_at",
    "ppo_flow_loss",
    "video_sft_loss",
]


def ppo_flow_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    loss_mask: Tensor | None = None,
    clip_ratio_c: float | None = 3.0,
    log_ratio_bound: float = 20.0,
    **_: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped PPO loss of a batch of macro-steps (arXiv 1707.06347) and its diagnostics.

    ``ρ = exp(log π − log π_old)``, loss ``max(−A ρ, −A clip(ρ, 1−ε_low, 1+ε_high))``; where A < 0
    it is at most ``−A c`` (dual clip, arXiv 1912.09729). Averaged over the macro-steps that count.

    Args:
        logprobs: [N] new log-probs, with gradients.
        old_logprobs: [N] log-probs under the policy that acted.
        advantages: [N].
        clip_ratio_low: ε_low in (0,1).
        clip_ratio_high: ε_high > 0.
        loss_mask: [N] bool, macro-steps that count; None for all.
        clip_ratio_c: c > 1 of the dual clip; None turns it off.
        log_ratio_bound: the log-ratio is clamped to ± this before exp.
        **_: further keywords of RLinf's loss registry, unused.

    Returns:
        The scalar loss (0, with zero gradients, when nothing counts) and detached scalar metrics.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    count = mask.sum().clamp(min=1)

    def masked_mean(value: Tensor) -> Tensor:
        return torch.where(mask, value, 0.0).sum() / count

    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    log_ratio = log_ratio.clamp(-log_ratio_bound, log_ratio_bound)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    per_step = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(mask)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        dual = (advantages < 0) & (per_step > ceiling)
        per_step = torch.where(dual, ceiling, per_step)
    loss = masked_mean(per_step)
    with torch.no_grad():
        metrics = {
            "actor/policy_loss": loss.detach(),
            "actor/ratio": masked_mean(ratio),
            "actor/ratio_max": torch.where(mask, ratio, 0.0).max(),
            "actor/approx_kl": masked_mean(-log_ratio),
            "actor/approx_kl_k3": masked_mean(ratio - 1.0 - log_ratio),
            "actor/clip_fraction": masked_mean((clipped > unclipped).float()),
            "actor/dual_clip_fraction": masked_mean(dual.float()),
        }
    return loss, metrics


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureStatistics:
    """Variances of the Gaussians that :func:`feature_kl_loss` compares, per layer and dimension."""

    frozen_variance: Tensor  # s_old^2 [N, 2, I] float32 (keys, values), measured once
    live_variance: Tensor  # s_theta^2 [N, 2, I] float32, a moving average

    @classmethod
    def calibrate(cls, frozen: Moments, *, floor: float = 0.01) -> FeatureStatistics:
        """Measure the frozen variances; the live ones start equal to them.

        Args:
            frozen: :func:`feature_moments` of a calibration batch, merged over its parts and over
                the ranks, from the frozen video expert.
            floor: smallest variance, as a share of the mean variance of the same layer's keys or
                values. A dimension that hardly varies would count without bound.

        Raises:
            ValueError: fewer than two tokens, or a layer without any variance.
        """
        if frozen.count < 2:
            raise ValueError(
                f"feature statistics need at least two tokens, got {int(frozen.count)}"
            )
        variance = frozen.variance.float()
        mean = variance.mean(dim=-1, keepdim=True)
        if not bool((mean > 0).all()):
            layers = (mean <= 0).any(dim=1).flatten().nonzero().flatten().tolist()
            raise ValueError(f"the features of layers {layers} do not vary over the batch")
        variance = torch.maximum(variance, floor * mean)
        return cls(frozen_variance=variance, live_variance=variance.clone())

    def update(
        self, live: Moments, frozen: Moments, *, decay: float = 0.99, floor: float = 1e-3
    ) -> FeatureStatistics:
        """Return the statistics after a training batch.

        What is averaged is how the live variance of the batch differs from the frozen one of the
        same batch, in units of s_old^2. The batch's own distance from the calibration batch is no
        change of the model: averaged in, it would outweigh the change many times over.

        Args:
            live: moments of the live features of the batch.
            frozen: moments of the frozen features of the same batch.
            decay: weight of the old average.
            floor: smallest ratio of the two, and smallest variance in units of s_old^2.
        """
        tiny = floor * self.frozen_variance
        ratio = torch.maximum(live.variance.float(), tiny) / torch.maximum(
            frozen.variance.float(), tiny
        )
        average = torch.lerp(self.frozen_variance * ratio, self.live_variance, decay)
        return replace(self, live_variance=torch.maximum(average, tiny))

    def state_dict(self) -> dict[str, Tensor]:
        """Both variances by name."""
        return {
            "frozen_variance": self.frozen_variance,
            "live_variance": self.live_variance,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> FeatureStatistics:
        """Invert :meth:`state_dict`."""
        return cls(frozen_variance=state["frozen_variance"], live_variance=state["live_variance"])


class FeatureKL(NamedTuple):
    """What :func:`feature_kl_loss` returns."""

    loss: Tensor  # [] with gradient
    per_layer: Tensor  # [N] detached


def feature_moments(features: Sequence[tuple[Tensor, Tensor]]) -> Moments:
    """Return the moments [N, 2, I] of features over samples and tokens.

    Args:
        features: keys and values [B, S, I], one pair per layer.
    """
    layers = [
        Moments.of(torch.stack([key, value], dim=2).flatten(0, 1).detach())
        for key, value in features
    ]
    return Moments(
        layers[0].count,
        torch.stack([layer.mean for layer in layers]),
        torch.stack([layer.squares for layer in layers]),
    )


def feature_kl_loss(
    live: Sequence[tuple[Tensor, Tensor]],
    frozen: Sequence[tuple[Tensor, Tensor]],
    statistics: FeatureStatistics,
) -> FeatureKL:
    """Return how far the video features have moved from the pretrained ones.

    With z the live and z_old the frozen feature of a token, keys and values together,
    ``KL(N(z, s_theta^2) || N(z_old, s_old^2)) =
    1/2 sum_d [log(s_old^2 / s_theta^2) + (s_theta^2 + (z - z_old)^2) / s_old^2 - 1]``,
    averaged over samples, tokens and layers. The variances are constants: the gradient is that of
    the squared distance. Equal features give 0, with zero gradient, while s_theta = s_old.

    Args:
        live: keys and values [B, S, I] of each layer, with gradient.
        frozen: of the same observations from the frozen expert.
        statistics: of the same layers, on the features' device.

    Raises:
        ValueError: other numbers of layers or other shapes.
    """
    layers = len(statistics.frozen_variance)
    if len(live) != layers or len(frozen) != layers:
        raise ValueError(
            f"the feature statistics are of {layers} layers, got {len(live)} live and "
            f"{len(frozen)} frozen ones"
        )
    values = []
    for index, pairs in enumerate(zip(live, frozen, strict=True)):
        shapes = {tuple(tensor.shape) for pair in pairs for tensor in pair}
        if len(shapes) != 1:
            raise ValueError(
                f"keys and values of layer {index}, live and frozen, differ in shape: "
                f"{sorted(shapes)}"
            )
        moved = torch.stack(
            [
                (new.float() - old.detach().float()).square().mean(dim=(0, 1))
                for new, old in zip(*pairs, strict=True)
            ]
        )
        s_old, s_theta = statistics.frozen_variance[index], statistics.live_variance[index]
        terms = torch.log(s_old / s_theta) + (s_theta + moved) / s_old - 1.0
        values.append(0.5 * terms.sum())
    per_layer = torch.stack(values)
    return FeatureKL(per_layer.mean(), per_layer.detach())


class VideoModel(Protocol):
    """What :func:`video_sft_loss` asks of a World-Action Model."""

    proprio_encoder: nn.Module | None

    def training_loss(
        self,
        sample: Mapping[str, Any],
        generator: torch.Generator | None,
        lambda_video: float | None,
        lambda_action: float | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted flow-matching loss and its detached parts."""


def video_sft_loss(
    model: VideoModel,
    sample: Mapping[str, Any],
    generator: torch.Generator,
    lambda_action: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the flow-matching loss of executed successes, and its parts as metrics.

    The gradient stops at the proprio token: the proprio encoder belongs to the policy. With
    ``lambda_action`` 0 it reaches the video expert alone; above, it also reaches the action expert.

    Args:
        model: a WAM or an adapted official object; what of it trains is the caller's choice.
        sample: windows as ``model.training_loss`` takes them.
        generator: of the timesteps and the noise.
        lambda_action: weight of the action loss beside the video loss.

    Raises:
        ValueError: a negative weight, or a sample the model refuses.
    """
    if lambda_action < 0:
        raise ValueError(f"lambda_action must not be negative, got {lambda_action}")
    with gradient_stopped_at(model.proprio_encoder):
        loss, parts = model.training_loss(
            sample, generator, lambda_video=1.0, lambda_action=lambda_action
        )
    names = {"loss": "sft_loss", "loss_video": "sft_video_loss", "loss_action": "sft_action_loss"}
    return loss, {f"video/{names[name]}": value for name, value in parts.items()}


@contextmanager
def gradient_stopped_at(module: nn.Module | None) -> Iterator[None]:
    """Within the block no gradient passes through the output of ``module``; None does nothing."""
    if module is None:
        yield
        return
    handle = module.register_forward_hook(lambda module, arguments, output: output.detach())
    try:
        yield
    finally:
        handle.remove()
