"""Weights by name: checked against a model's own names and shapes, then put into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.wam.config import WAMConfig
from rlinf_wamrl.wam.wam import WAM

__all__ = [
    "ACTION_PREFIX",
    "VIDEO_PREFIX",
    "check_fit",
    "parameter_shapes",
    "strip_prefix",
    "wam_from_state",
]

VIDEO_PREFIX = "mot.mixtures.video."
ACTION_PREFIX = "mot.mixtures.action."

_LISTED = 8
"""Names given of each kind of problem; the others are counted."""


def wam_from_state(
    config: WAMConfig,
    state: Mapping[str, Tensor],
    source: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> WAM:
    """Build a model around given weights, without ever allocating it twice.

    Args:
        config: the model.
        state: all its weights, under its own names.
        source: where they come from, for error messages.
        device: where the weights go.
        dtype: dtype of the weights.

    Raises:
        ValueError: keys are missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        model = WAM(config)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    check_fit(expected, state, str(source))
    weights = {key: state[key].to(device=device, dtype=dtype, copy=True) for key in expected}
    model.load_state_dict(weights, assign=True)
    return model.to(device)


def parameter_shapes(config: WAMConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a model, without allocating it."""
    with torch.device("meta"):
        model = WAM(config)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def strip_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Entries of ``state`` whose names start with ``prefix``, named without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def check_fit(
    expected: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], source: str
) -> None:
    """Compare given weights with expected names and shapes.

    Args:
        expected: shapes by name.
        state: weights by name.
        source: where they come from, for the message.

    Raises:
        ValueError: names are missing, unexpected or of another shape; each kind is counted and
            its first names are given.
    """
    problems = [
        (sorted(expected.keys() - state.keys()), "missing"),
        (sorted(state.keys() - expected.keys()), "unexpected"),
        (
            [
                f"{key} ({list(state[key].shape)} there, {list(shape)} in the model)"
                for key, shape in expected.items()
                if key in state and tuple(state[key].shape) != shape
            ],
            "of another shape",
        ),
    ]
    found = [
        f"{len(names)} {kind}: {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for names, kind in problems
        if names
    ]
    if found:
        raise ValueError(f"{source} does not fit the model; {'; '.join(found)}")
