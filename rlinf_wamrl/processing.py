"""From an environment's observation to what the model reads, and from its output to an action.

Two cameras become one picture side by side, proprioception and actions are normalised with the
statistics of the data the model was trained on, and the gripper gets the sign the simulator wants.
Everything here is batched; nothing here has weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rlinf_wamrl.normalisation import DatasetStatistics, LinearNormaliser, NormalisationMode

__all__ = [
    "GripperConvention",
    "Processor",
    "ProcessorConfig",
    "center_crop_resize",
    "finish_gripper",
    "pixels_to_unit",
    "unit_to_pixels",
]

GripperConvention = Literal["fastwam", "libero"]
"""What the gripper dimension of the *data* means, after denormalisation.

``fastwam``: 0 = close, 1 = open, as in FastWAM's data and so in its released checkpoints; the
simulator (-1 = open, +1 = close) gets ``-(2g - 1)``, or its sign.
``libero``: -1 = open, +1 = close, LIBERO's own; the simulator gets ``g``, or its sign.
"""


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """How observations and actions are prepared. The defaults are those of FastWAM on LIBERO."""

    image_height: int = 224
    """Height of one camera's picture as the model sees it."""
    image_width: int = 224
    """Width of one camera's picture; the model sees two of them side by side."""
    normalisation: NormalisationMode = "min/max"
    """Of actions and proprioception (FastWAM: min/max on LIBERO, z-score on RoboTwin)."""
    statistics_key: str | None = None
    """Entry of the statistics file to use; None takes the only one."""
    gripper_convention: GripperConvention = "fastwam"
    """Meaning of the last action dimension in the training data."""
    binarise_gripper: bool = True
    """Execute the sign of the gripper's command rather than its value."""

    def __post_init__(self) -> None:
        if self.image_height < 1 or self.image_width < 1:
            raise ValueError(
                f"image size must be positive, got {self.image_height}x{self.image_width}"
            )
        if self.normalisation not in get_args(NormalisationMode):
            raise ValueError(
                f"normalisation={self.normalisation!r} is unknown; "
                f"known: {', '.join(get_args(NormalisationMode))}"
            )
        _check_convention(self.gripper_convention)


@dataclass(frozen=True)
class Processor:
    """A :class:`ProcessorConfig` with the statistics it needs."""

    config: ProcessorConfig
    statistics: DatasetStatistics
    action_normaliser: LinearNormaliser
    proprio_normaliser: LinearNormaliser

    @classmethod
    def build(cls, config: ProcessorConfig, statistics: DatasetStatistics) -> Processor:
        """Join ``config`` and ``statistics``."""
        return cls(
            config=config,
            statistics=statistics,
            action_normaliser=LinearNormaliser(statistics.action, config.normalisation),
            proprio_normaliser=LinearNormaliser(statistics.proprio, config.normalisation),
        )

    def images(self, main: Any, wrist: Any) -> Tensor:
        """Resize both cameras and join them side by side.

        Args:
            main: uint8 [...,H,W,3], tensor or array, upright (already rotated by 180 degrees).
            wrist: uint8 [...,H,W,3] of the same leading shape.

        Returns:
            uint8 [...,3,height,2*width], main left, on the CPU.
        """
        size = self.config.image_height, self.config.image_width
        views = [center_crop_resize(view, *size) for view in (main, wrist)]
        if views[0].shape != views[1].shape:
            raise ValueError(
                "main and wrist images must come in equal numbers, got leading shapes "
                f"{list(views[0].shape[:-3])} and {list(views[1].shape[:-3])}"
            )
        return torch.cat(views, dim=-2).movedim(-1, -3).contiguous()

    def proprio(self, raw: Any) -> Tensor:
        """Normalise proprioception [...,P] in real units to float32 in [-5,5]."""
        return self.proprio_normaliser.normalise(torch.as_tensor(raw))

    def normalise_actions(self, raw: Any) -> Tensor:
        """Normalise recorded actions [...,A] to what the model is trained on, in [-5,5]."""
        return self.action_normaliser.normalise(torch.as_tensor(raw))

    def training_actions(self, executed: Any) -> Tensor:
        """Normalise actions that the simulator executed [...,A]; inverts the gripper's finish."""
        raw = torch.as_tensor(executed)
        gripper = raw[..., -1:]
        if self.config.gripper_convention == "fastwam":
            gripper = (1.0 - gripper) / 2.0
        return self.normalise_actions(torch.cat([raw[..., :-1], gripper], dim=-1))

    def executable_actions(self, normalised: Tensor) -> Tensor:
        """Turn the model's actions [...,A] into what the simulator executes, float32 [...,A].

        The magnitude of a binarised gripper is not executed: log-probabilities count it, the
        simulator sees its sign.
        """
        actions = self.action_normaliser.denormalise(normalised)
        gripper = finish_gripper(
            actions[..., -1:], self.config.gripper_convention, self.config.binarise_gripper
        )
        return torch.cat([actions[..., :-1], gripper], dim=-1)


def center_crop_resize(images: Any, height: int, width: int) -> Tensor:
    """Scale uint8 images [...,H,W,3] to cover height x width, then cut the centre out.

    Bilinear with antialiasing as PIL does it, which is how FastWAM prepares LIBERO's 256 x 256
    renders for its 224 x 224 input, bit for bit.

    Raises:
        ValueError: not uint8 RGB images.
    """
    images = torch.as_tensor(images)
    if images.dtype != torch.uint8 or images.dim() < 3 or images.shape[-1] != 3:
        raise ValueError(
            f"images must be uint8 [...,H,W,3], got {images.dtype} {list(images.shape)}"
        )
    source_height, source_width = images.shape[-3:-1]
    if (source_height, source_width) == (height, width):
        return images.cpu()
    scale = max(width / source_width, height / source_height)
    scaled = round(source_width * scale), round(source_height * scale)
    left, top = max((scaled[0] - width) // 2, 0), max((scaled[1] - height) // 2, 0)
    box = (left, top, left + width, top + height)
    flat = images.reshape(-1, source_height, source_width, 3).cpu().numpy()
    resized = [
        np.asarray(Image.fromarray(image).resize(scaled, Image.Resampling.BILINEAR).crop(box))
        for image in flat
    ]
    stacked = np.stack(resized) if resized else np.zeros((0, height, width, 3), np.uint8)
    return torch.from_numpy(stacked).reshape(*images.shape[:-3], height, width, 3)


def pixels_to_unit(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Map uint8 pixels to [-1,1]: ``x * 2/255 - 1``, computed in float32."""
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels must be uint8, got {pixels.dtype}")
    return (pixels.float() * (2.0 / 255.0) - 1.0).to(dtype)


def unit_to_pixels(values: Tensor) -> Tensor:
    """Map [-1,1] to uint8 pixels, clamped and rounded; inverts :func:`pixels_to_unit`."""
    return ((values.float().clamp(-1, 1) + 1.0) * 127.5).round().to(torch.uint8)


def finish_gripper(gripper: Tensor, convention: GripperConvention, binarise: bool) -> Tensor:
    """Turn the data's gripper command into the simulator's (-1 = open, +1 = close).

    Args:
        gripper: denormalised gripper command, any shape.
        convention: what it means (see :data:`GripperConvention`).
        binarise: return the sign rather than the value.
    """
    _check_convention(convention)
    command = -(2.0 * gripper - 1.0) if convention == "fastwam" else gripper
    return command.sign() if binarise else command


def _check_convention(convention: str) -> None:
    if convention not in get_args(GripperConvention):
        raise ValueError(
            f"gripper_convention={convention!r} is unknown; 'fastwam' for FastWAM's data and "
            "checkpoints (0 = close, 1 = open), 'libero' for data recorded in LIBERO's own "
            "convention (-1 = open, +1 = close)"
        )
