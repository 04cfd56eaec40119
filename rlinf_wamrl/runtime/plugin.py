"""What RLinf learns from this package: a model, an environment, a loss, an advantage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.rl.advantage import (
    episode_returns,
    group_advantages,
    step_advantages,
    weigh_episodes_alike,
)
from rlinf_wamrl.rl.losses import ppo_flow_loss
from rlinf_wamrl.runtime.rlinf_compat import (
    add_environment_type,
    install_cpu_platform,
    let_fsdp1_run_on_cpu,
    share_gloo_devices,
)

__all__ = ["ADVANTAGE_NAME", "ENV_TYPE", "LOSS_NAME", "MODEL_TYPE", "register"]

MODEL_TYPE = "wamrl"
ENV_TYPE = "wamrl_libero"
LOSS_NAME = "wamrl_flow_ppo"
ADVANTAGE_NAME = "wamrl_group"


def register() -> None:
    """Register everything in RLinf's registries; calling it again changes nothing."""
    from rlinf.algorithms.registry import register_advantage, register_policy_loss
    from rlinf.models import register_model

    install_cpu_platform()
    let_fsdp1_run_on_cpu()
    share_gloo_devices()
    add_environment_type(ENV_TYPE, "rlinf_wamrl.envs.rlinf_env:WAMLiberoEnv")
    register_model(MODEL_TYPE, _build_policy, category="embodied", force=True)
    register_policy_loss(LOSS_NAME)(ppo_flow_loss)
    register_advantage(ADVANTAGE_NAME)(_group_advantage)


def _build_policy(cfg: Any, torch_dtype: Any) -> Any:
    from rlinf_wamrl.policy_builder import build_policy

    return build_policy(cfg, torch_dtype)


def _group_advantage(
    rewards: Tensor,
    loss_mask: Tensor,
    group_size: int,
    degenerate: str = "drop",
    min_group_std: float = 1e-3,
    reconstruction_reward: Tensor | None = None,
    reconstruction_mask: Tensor | None = None,
    lambda_rec: float = 0.0,
    lambda_step: float = 0.0,
    weigh_by: str = "step",
    **_: object,
) -> tuple[Tensor, None]:
    """Adapt group advantages to RLinf's registry.

    Args:
        rewards: [G, group_size] episode returns.
        loss_mask: [T, B] bool, macro-steps before the end of an episode.
        group_size: episodes per group.
        degenerate: see :func:`~rlinf_wamrl.rl.advantage.group_advantages`.
        min_group_std: likewise.
        reconstruction_reward: [T, B], normalised; None leaves it out.
        reconstruction_mask: [T, B] bool, where it exists.
        lambda_rec: weight of its mean in the return.
        lambda_step: weight of its per-step part in the advantage.
        weigh_by: ``step``, or ``episode``, see
            :func:`~rlinf_wamrl.rl.advantage.weigh_episodes_alike`.
        **_: further keywords of RLinf's registry, unused.

    Returns:
        Advantages [T, B], and no returns.
    """
    task_return, alive = rewards.flatten(), loss_mask.bool()
    exists = alive if reconstruction_mask is None else alive & reconstruction_mask
    returns = episode_returns(task_return[None], None)
    if reconstruction_reward is not None:
        returns = returns + episode_returns(
            torch.zeros_like(reconstruction_reward), reconstruction_reward, exists, lambda_rec
        )
    groups = group_advantages(
        returns, task_return, group_size, degenerate=degenerate, min_std=min_group_std
    )
    # a group that is left out gets no per-step part either
    exists = exists & groups.is_used
    advantages = step_advantages(
        groups.advantage,
        alive,
        group_size,
        reconstruction_reward=reconstruction_reward,
        reconstruction_mask=exists,
        lambda_step=lambda_step,
    )
    if weigh_by == "episode":
        advantages = weigh_episodes_alike(advantages, alive)
    return advantages, None
