"""A new model from the Wan2.2 base model: its video expert, and an action expert made from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlinf_wamrl.wam.config import WAMConfig
from rlinf_wamrl.wam.wam import WAM
from rlinf_wamrl.wam.weights import (
    ACTION_PREFIX,
    VIDEO_PREFIX,
    check_fit,
    parameter_shapes,
    strip_prefix,
    wam_from_state,
)

__all__ = ["from_wan22", "initial_action_expert", "missing_parts"]


def from_wan22(
    folder: str | Path,
    config: WAMConfig,
    *,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> WAM:
    """Start a new model from the Wan2.2 base model.

    The video expert gets the base model's weights; the action expert gets them resized (see
    :func:`initial_action_expert`); what has no counterpart is drawn as a fresh linear layer.

    Args:
        folder: where ``diffusion_pytorch_model*.safetensors`` of ``Wan2.2-TI2V-5B`` lie (the
            official names, not those of the diffusers conversion).
        config: the model.
        generator: of the fresh layers.
        device: where the weights go.
        dtype: dtype of the weights.

    Raises:
        FileNotFoundError: no such files.
        ValueError: the files do not fit the configuration.
    """
    folder = Path(folder)
    shards = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no diffusion_pytorch_model*.safetensors in {folder}")
    state = {VIDEO_PREFIX + key: value for key, value in _read_shards(shards).items()}
    state |= missing_parts(state, config, generator, folder)
    return wam_from_state(config, state, folder, device=device, dtype=dtype)


def initial_action_expert(
    video: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Derive an action expert from a video expert, as FastWAM does.

    Every weight but those of ``action_encoder`` and ``head`` is the video expert's weight of the
    same name, resized one dimension after the other by linear interpolation (end points aligned).
    A weight of two or more dimensions whose last dimension changed is scaled by
    ``sqrt(old / new)``, which keeps the variance of what it computes.

    Args:
        video: weights of the video expert, names relative to it.
        shapes: shapes of the action expert's weights, names relative to it.

    Returns:
        The derived weights in float32.

    Raises:
        ValueError: the video expert lacks one of them.
    """
    derived = {}
    for key, shape in shapes.items():
        if key.startswith(("action_encoder.", "head.")):
            continue
        if key not in video:
            raise ValueError(
                f"the video expert has no {key!r} to initialise the action expert from"
            )
        source = video[key]
        if source.dim() != len(shape):
            raise ValueError(
                f"{key} has shape {list(source.shape)} in the video expert and {list(shape)} in "
                "the action expert: another number of dimensions"
            )
        value = source.float()
        for dimension, size in enumerate(shape):
            value = _resize(value, dimension, size)
        if len(shape) >= 2 and source.shape[-1] != shape[-1]:
            value = value * math.sqrt(source.shape[-1] / shape[-1])
        derived[key] = value
    return derived


def missing_parts(
    state: Mapping[str, Tensor],
    config: WAMConfig,
    generator: torch.Generator | None,
    source: Path,
) -> dict[str, Tensor]:
    """Make what a base model lacks: the action expert and the layers of actions and proprio.

    Args:
        state: the video expert's weights under a model's names, perhaps with a proprio encoder.
        config: the model.
        generator: of the fresh layers, which are drawn as ``nn.Linear`` does.
        source: where the weights come from, for messages.

    Raises:
        ValueError: there is no generator, or the weights do not fit the configuration.
    """
    if generator is None:
        raise ValueError(f"{source} has no action expert: starting one needs a generator")
    shapes = parameter_shapes(config)
    fresh = (
        VIDEO_PREFIX + "action_embedding.",
        ACTION_PREFIX + "action_encoder.",
        ACTION_PREFIX + "head.",
        "proprio_encoder.",
    )
    base = {k: v for k, v in shapes.items() if k.startswith(VIDEO_PREFIX)}
    given = {k: v for k, v in state.items() if k.startswith(VIDEO_PREFIX)}
    check_fit({k: v for k, v in base.items() if not k.startswith(fresh)}, given, str(source))
    derived = initial_action_expert(
        strip_prefix(state, VIDEO_PREFIX), strip_prefix(shapes, ACTION_PREFIX)
    )
    new = {ACTION_PREFIX + key: value for key, value in derived.items()}
    for key, shape in shapes.items():
        if key.startswith(fresh) and key not in state:
            inputs = shapes[key.rpartition(".")[0] + ".weight"][1]
            uniform = torch.rand(shape, generator=generator) * 2 - 1
            new[key] = uniform / math.sqrt(inputs)
    return new


def _resize(value: Tensor, dimension: int, size: int) -> Tensor:
    if value.shape[dimension] == size:
        return value
    rows = value.movedim(dimension, -1)
    flat = rows.reshape(-1, 1, rows.shape[-1])
    resized = F.interpolate(flat, size=size, mode="linear", align_corners=True)
    return resized.reshape(*rows.shape[:-1], size).movedim(-1, dimension)


def _read_shards(shards: Iterable[Path]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                state.update((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{shard} is no complete safetensors file: {error}") from error
    return state
