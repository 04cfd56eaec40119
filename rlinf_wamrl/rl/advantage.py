"""Returns, group-relative advantages and task weights (the method's section on advantages).

A group holds the episodes of one task and one initial state. Its mean return is the baseline, as in
GRPO (arXiv 2402.03300); a group in which every episode ended the same way teaches nothing about the
task and is *degenerate*.

Shapes: T macro-steps, B episodes (groups are consecutive), G = B / group_size groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "GroupAdvantages",
    "all_groups_degenerate_message",
    "degenerate_groups",
    "episode_returns",
    "group_advantages",
    "reconstruction_share",
    "step_advantages",
    "task_sampling_weights",
    "update_success_average",
    "weigh_episodes_alike",
]

DEGENERATE_MODES = ("drop", "rec_only", "keep")


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """Advantages of a batch of episodes, one group after the other."""

    advantage: Tensor  # [B] float32; 0 in dropped groups
    is_degenerate: Tensor  # [G] bool, all episodes succeeded or all failed
    is_used: Tensor  # [B] bool, False where the group was dropped
    group_mean: Tensor  # [G] mean return
    group_std: Tensor  # [G] population standard deviation of the return


def episode_returns(
    task_reward: Tensor,
    reconstruction_reward: Tensor | None = None,
    reconstruction_mask: Tensor | None = None,
    lambda_rec: float = 0.0,
) -> Tensor:
    """Return ``R = Σ_t r_task + λ_rec · mean_t r_rec`` per episode.

    The reconstruction part is a mean: summed, longer episodes would earn more.

    Args:
        task_reward: [T,B], 0 after the end of an episode.
        reconstruction_reward: [T,B] normalised; None leaves it out.
        reconstruction_mask: [T,B] bool, True where the reward exists; None means everywhere.
        lambda_rec: λ_rec.

    Returns:
        [B] float32. An episode without any reconstruction reward gets its task return alone.
    """
    returns = task_reward.float().sum(dim=0)
    if reconstruction_reward is None or lambda_rec == 0.0:
        return returns
    reward = reconstruction_reward.float()
    if reconstruction_mask is None:
        reconstruction_mask = torch.ones_like(reward, dtype=torch.bool)
    # where, not a product: an unreached step may hold anything, even NaN
    total = torch.where(reconstruction_mask, reward, 0.0).sum(dim=0)
    return returns + lambda_rec * total / reconstruction_mask.sum(dim=0).clamp(min=1)


def degenerate_groups(task_return: Tensor, group_size: int) -> Tensor:
    """Return [G] bool, True where every episode of a group has the same task outcome.

    Args:
        task_return: [B] task part of the return.
        group_size: episodes per group, at least 2.

    Raises:
        ValueError: group_size < 2, or a batch that is no multiple of it.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2 for group-relative advantages, got {group_size}: "
            "one episode has no other to be compared with"
        )
    if task_return.shape[0] % group_size:
        raise ValueError(
            f"{task_return.shape[0]} episodes are no multiple of group_size {group_size}"
        )
    task = task_return.view(-1, group_size)
    return (task == task[:, :1]).all(dim=1)


def group_advantages(
    returns: Tensor,
    task_return: Tensor,
    group_size: int,
    *,
    degenerate: str = "drop",
    min_std: float = 1e-3,
) -> GroupAdvantages:
    """Return ``A_i = (R_i − mean_g) / max(std_g, min_std)``.

    Degeneracy is judged by the task outcome alone: a dense reward always varies a little, and
    dividing by its tiny spread would turn noise into full-size advantages.

    Args:
        returns: [B] episode returns R.
        task_return: [B] task part of the return; equal values inside a group mean degenerate.
        group_size: episodes per group, at least 2.
        degenerate: what happens to such groups. ``drop`` leaves them out. ``rec_only`` learns from
            what else varies in the return at its own small scale, undivided. ``keep`` treats them
            like any group.
        min_std: floor of the divisor.

    Raises:
        ValueError: group_size < 2, a batch that is no multiple of it, an unknown mode.
    """
    if degenerate not in DEGENERATE_MODES:
        raise ValueError(f"degenerate must be one of {DEGENERATE_MODES}, got {degenerate!r}")
    is_degenerate = degenerate_groups(task_return, group_size)
    grouped = returns.float().view(-1, group_size)
    mean = grouped.mean(dim=1, keepdim=True)
    std = grouped.std(dim=1, correction=0, keepdim=True)
    divisor = std.clamp(min=min_std)
    if degenerate == "rec_only":
        divisor = torch.where(is_degenerate[:, None], 1.0, divisor)
    advantage = (grouped - mean) / divisor
    used = torch.ones_like(grouped, dtype=torch.bool)
    if degenerate == "drop":
        used = used & ~is_degenerate[:, None]
        advantage = torch.where(used, advantage, 0.0)
    return GroupAdvantages(
        advantage=advantage.flatten(),
        is_degenerate=is_degenerate,
        is_used=used.flatten(),
        group_mean=mean.squeeze(1),
        group_std=std.squeeze(1),
    )


def reconstruction_share(returns: Tensor, task_return: Tensor, group_size: int) -> float:
    """Return how much of what the advantages compare is not the task's.

    ``Σ (ΔR − Δtask)² / Σ [(ΔR − Δtask)² + Δtask²]``, Δ the difference to the group's mean, summed
    over groups that are not degenerate.

    Args:
        returns: [B] episode returns R.
        task_return: [B] task part of them.
        group_size: episodes per group, at least 2.

    Returns:
        Share in [0,1]; 0 where every group is degenerate.
    """
    used = ~degenerate_groups(task_return, group_size)

    def spread(value: Tensor) -> Tensor:
        grouped = value.float().view(-1, group_size)[used]
        return (grouped - grouped.mean(dim=1, keepdim=True)).square().sum()

    dense, task = spread(returns - task_return), spread(task_return)
    return float(dense / (dense + task).clamp(min=torch.finfo(torch.float32).tiny))


def step_advantages(
    advantage: Tensor,
    valid: Tensor,
    group_size: int,
    *,
    reconstruction_reward: Tensor | None = None,
    reconstruction_mask: Tensor | None = None,
    lambda_step: float = 0.0,
) -> Tensor:
    """Spread episode advantages over macro-steps, with an optional per-step part.

    ``A_t = A_i + λ_step (r̃_t − mean of the group at t)``; the mean runs over the members that have
    a reward at t, and the others get no such part.

    Args:
        advantage: [B].
        valid: [T,B] bool, macro-steps that were executed.
        group_size: episodes per group.
        reconstruction_reward: [T,B] normalised r̃.
        reconstruction_mask: [T,B] bool, True where the reward exists; None means wherever valid.
        lambda_step: λ_step.

    Returns:
        [T,B] float32, 0 where not valid.
    """
    steps = torch.where(valid, advantage.float()[None], 0.0)
    if reconstruction_reward is None or lambda_step == 0.0:
        return steps
    rewarded = valid if reconstruction_mask is None else valid & reconstruction_mask
    reward = torch.where(rewarded, reconstruction_reward.float(), 0.0)
    grouped = reward.view(reward.shape[0], -1, group_size)
    member = rewarded.view_as(grouped)
    mean = grouped.sum(-1, keepdim=True) / member.sum(-1, keepdim=True).clamp(min=1)
    return steps + lambda_step * torch.where(member, grouped - mean, 0.0).view_as(steps)


def weigh_episodes_alike(advantages: Tensor, valid: Tensor) -> Tensor:
    """Scale advantages so that long episodes do not outweigh short ones.

    An advantage counts once per macro-step. Failures last longer than successes, so although the
    advantages of a group sum to 0 over its episodes, they sum to less over its macro-steps, and a
    negative sum favours moving away from whatever was done. Divided by the length L_i of their
    episode, times the mean length of the batch, they sum to 0 over macro-steps as well; a scale of
    PPO's advantage is a weight of its loss.

    Args:
        advantages: [T,B] as of :func:`step_advantages`.
        valid: [T,B] bool, macro-steps that were executed.
    """
    length = valid.sum(dim=0).clamp(min=1)
    return advantages * (length.float().mean() / length)


def update_success_average(
    average: Tensor, successes: Tensor, episodes: Tensor, decay: float
) -> Tensor:
    """Return the exponential moving average of success per task.

    Args:
        average: [N] current values; NaN where a task was never tried (its first result is taken).
        successes: [N] successful episodes of this iteration.
        episodes: [N] episodes of this iteration; tasks with 0 keep their value.
        decay: weight of the old value, in [0,1).
    """
    rate = successes.float() / episodes.clamp(min=1)
    updated = torch.where(average.isnan(), rate, decay * average + (1.0 - decay) * rate)
    return torch.where(episodes > 0, updated, average)


def task_sampling_weights(
    success_average: Tensor, mode: str = "learnable", *, epsilon: float = 0.05, beta: float = 1.0
) -> Tensor:
    """Return the probability of each task in the next iteration.

    ``learnable`` prefers tasks that are neither solved nor hopeless, weight ∝ ε + p(1−p); ``hard``
    prefers failing ones, weight ∝ (1−p)^β + ε; ``uniform`` ignores p. Tasks never tried count as
    p = 0.5.

    Args:
        success_average: [N] success average per task, NaN where unknown.
        mode: ``learnable``, ``hard`` or ``uniform``.
        epsilon: keeps every task alive.
        beta: sharpness of ``hard``.
    """
    p = torch.where(success_average.isnan(), 0.5, success_average.float())
    if mode == "learnable":
        weight = epsilon + p * (1.0 - p)
    elif mode == "hard":
        weight = epsilon + (1.0 - p) ** beta
    elif mode == "uniform":
        weight = torch.ones_like(p)
    else:
        raise ValueError(f"task weights must be learnable, hard or uniform, got {mode!r}")
    return weight / weight.sum()


def all_groups_degenerate_message(attempts: int, success: int, episodes: int) -> str:
    """Say what to do when no group of an iteration teaches anything."""
    cause = "every episode failed" if success == 0 else "every group ended alike"
    return (
        f"no learning signal after {attempts} rollouts: {cause} ({success}/{episodes} successes). "
        "Start from a checkpoint that sometimes succeeds, choose easier or harder tasks "
        "(env.train.task_ids), raise RL.group_size, or raise RL.max_resample."
    )
