"""Losses of WAM-RL: clipped PPO on the Flow-SDE log-probability.

Pure functions on tensors; diagnostics are computed beside the loss, under no_grad.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ppo_flow_loss"]


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
