"""Gradient norms that are right on several ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["clip_gradients"]


def clip_gradients(model: torch.nn.Module, parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients to a total norm of at most ``max_norm``; returns the norm before.

    Under FSDP2 gradients are sharded tensors whose norm is taken over all ranks. RLinf 0.3.0 takes
    it per rank, so ranks would scale by different factors.

    Args:
        model: the wrapped model; FSDP1 knows its own shards.
        parameters: whose gradients; those without one are left alone.
        max_norm: the bound.
    """
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(max_norm))
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
