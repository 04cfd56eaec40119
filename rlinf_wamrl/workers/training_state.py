"""Weights and optimisers of a (sharded) model, as plain tensors for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["load_training_state", "training_state"]


def training_state(
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    trained: Sequence[str],
) -> dict[str, Any]:
    """Return ``model`` (trained weights alone) and ``optimizers``, complete on rank 0.

    Every rank must call it. Frozen weights are never gathered.

    Args:
        model: the wrapped model.
        optimizers: by name.
        trained: names of the weights that train.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights, names = get_model_state_dict(model, options=options), set(trained)
    return {
        "model": {name: value for name, value in weights.items() if name in names},
        "optimizers": {
            name: _optimizer_state(model, optimizer, options)
            for name, optimizer in optimizers.items()
        },
    }


def _optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions
) -> dict[str, Any]:
    """Return an optimiser's state; FSDP1, here unsharded, cannot gather one of two optimisers."""
    if isinstance(model, FullyShardedDataParallel):
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer, options=options)


def load_training_state(
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    trained: Sequence[str],
    state: Mapping[str, Any],
    source: str,
) -> None:
    """Load what :func:`training_state` returned, on every rank.

    Args:
        model: the wrapped model.
        optimizers: by name.
        trained: names of the weights that train.
        state: complete on every rank.
        source: where it came from, for messages.

    Raises:
        ValueError: it is of other trainable weights or other optimisers.
    """
    for what, have, need in (
        ("trainable parameters", state["model"].keys(), set(trained)),
        ("optimisers", state["optimizers"].keys(), optimizers.keys()),
    ):
        difference = sorted(set(have) ^ set(need))
        if difference:
            raise ValueError(
                f"{source} was written for other {what}; {len(difference)} differ, for example "
                f"{difference[:3]}: resume with the configuration it was trained with"
            )
    options = StateDictOptions(full_state_dict=True, strict=False, ignore_frozen_params=True)
    set_model_state_dict(model, state["model"], options=options)
    for name, optimizer in optimizers.items():
        if isinstance(model, FullyShardedDataParallel):
            optimizer.load_state_dict(state["optimizers"][name])
            continue
        set_optimizer_state_dict(model, optimizer, state["optimizers"][name], options=options)
