"""Rows of a training batch: nested dicts of tensors that share their leading dimension."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "counting_rows",
    "flatten_time",
    "drift_message",
    "executed_steps",
    "mini_batches",
    "per_step_metrics",
    "resident_gib",
    "rows_of",
    "select_rows",
    "staleness_message",
    "task_rewards",
    "unflatten_time",
]


def flatten_time(batch: dict[str, Any]) -> dict[str, Any]:
    """Flatten [T, B, ...] to rows [T * B, ...]; boundary entries lose their last step."""
    chunks = batch["prev_logprobs"].shape[0]
    rows: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            rows[name] = {key: entry.flatten(0, 1) for key, entry in value.items()}
        elif value is not None:
            rows[name] = value[:chunks].flatten(0, 1)
    return rows


def task_rewards(batch: dict[str, Any]) -> Tensor:
    """Return the task's own rewards [T,B,C] of a rollout.

    With a reward component ``rewards`` is a weighted sum, and the task's part travels beside it.
    """
    after = batch.get("next_obs", {})
    if "task_reward" not in after:
        return batch["rewards"]
    alone = torch.zeros_like(batch["rewards"])
    alone[..., -1] = after["task_reward"]
    return alone


def unflatten_time(rows: dict[str, Any], chunks: int) -> dict[str, Any]:
    """Lay time-major rows [T * B, ...] out as [T, B, ...], nested dicts included."""
    return {
        name: unflatten_time(value, chunks)
        if isinstance(value, dict)
        else value.unflatten(0, (chunks, -1))
        for name, value in rows.items()
        if value is not None
    }


def counting_rows(rows: dict[str, Any]) -> Tensor:
    """Return the indices of the rows to train on: executed, with an advantage that is not 0.

    An advantage of 0 has no gradient; it would only dilute the mean. Degenerate groups have it.
    """
    mask = rows["loss_mask"].flatten(1).any(dim=1) & (rows["advantages"] != 0).flatten(1).any(dim=1)
    return mask.nonzero().squeeze(1)


def rows_of(batch: dict[str, Any]) -> int:
    """Return the number of rows of a flattened batch."""
    return batch["prev_logprobs"].shape[0]


def executed_steps(loss_mask: Tensor) -> int:
    """Return how many macro-steps count."""
    return int(loss_mask.sum())


def select_rows(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return the rows of every tensor of a nested batch; None stays None."""
    chosen: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            chosen[name] = select_rows(value, rows)
        else:
            chosen[name] = None if value is None else value[rows]
    return chosen


def mini_batches(
    batch: dict[str, Any], size: int, count: int, generator: torch.Generator | None = None
) -> Iterator[dict[str, Any]]:
    """Cut a batch into ``count`` mini-batches of exactly ``size`` rows.

    Rows are shuffled when a generator is given. Missing rows are filled with copies whose
    ``loss_mask`` is False, so that every rank takes equally many equal steps.

    Raises:
        ValueError: the batch has no row to copy, or does not fit.
    """
    total = rows_of(batch)
    if count == 0:
        return
    if total == 0:
        raise ValueError("a batch without rows cannot be cut into mini-batches")
    if total > size * count:
        raise ValueError(f"{total} rows do not fit into {count} mini-batches of {size}")
    order = torch.arange(total)
    if generator is not None:
        order = torch.randperm(total, generator=generator)
    padded = torch.cat([order, order[:1].expand(size * count - total)])
    for index in range(count):
        start = index * size
        part = select_rows(batch, padded[start : start + size])
        filler = torch.arange(start, start + size) >= total
        if filler.any():
            part["loss_mask"] = part["loss_mask"].clone()
            part["loss_mask"][filler] = False
        yield part


@torch.no_grad()
def per_step_metrics(rows: dict[str, Any], logprobs: Tensor) -> dict[str, float]:
    """Return ratio, KL and clip-prone share per stochastic denoising step, for chains with one.

    Args:
        rows: a batch with ``prev_logprobs``, ``loss_mask`` and ``forward_inputs``' ``k_star``.
        logprobs: [N,C,A] new log-probs.
    """
    k_star = rows["forward_inputs"]["k_star"]
    if k_star.shape[1] != 1:
        return {}
    counts = rows["loss_mask"].flatten(1).any(dim=1)
    log_ratio = (logprobs.cpu() - rows["prev_logprobs"].cpu()).sum(dim=(1, 2))
    metrics = {}
    for k in k_star[:, 0][counts].unique().tolist():
        mine = log_ratio[counts & (k_star[:, 0] == k)]
        ratio = mine.exp()
        metrics[f"actor/ratio_k{k}"] = float(ratio.mean())
        metrics[f"actor/approx_kl_k3_k{k}"] = float((ratio - 1.0 - mine).mean())
        metrics[f"actor/off_by_a_fifth_k{k}"] = float(((ratio - 1.0).abs() > 0.2).float().mean())
    return metrics


def resident_gib() -> float:
    """Return the resident memory of this process in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def drift_message(drift: float, bound: float) -> str:
    """Say why recorded and re-scored log-probs may differ."""
    return (
        f"recorded and re-scored log-probs differ by up to {drift:.4g} nats, more than "
        f"RL.max_logprob_drift = {bound}. Likely causes: rollout and learner run in different "
        "precision (rollout.model.precision, actor.model.precision), the rollout worker has stale "
        "weights (runner.weight_sync_interval), or another denoising grid (RL.denoising_steps, "
        "RL.sigma_shift). If bf16 rollouts are intended, raise the bound"
    )


def staleness_message(oldest: int, bound: int) -> str:
    """Say that a batch is from weights older than allowed."""
    return (
        f"a batch was collected {oldest} updates ago, more than the {bound} that "
        "algorithm.staleness_threshold and runner.weight_sync_interval allow"
    )
