"""What an environment is told and what it shows; light enough for configuration checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["RENDER_QUALITIES", "EnvSettings", "Observation"]

RENDER_QUALITIES = ("stock", "fast", "light")


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """How an environment draws and settles.

    ``render_quality``: ``stock`` as LIBERO draws (what released checkpoints were trained on);
    ``fast`` without multisampling and mirror reflections; ``light`` also draws the arm by its
    collision meshes (a tenth of the faces).
    """

    image_size: int = 128  # height and width of both cameras, pixels
    render_quality: str = "stock"
    max_texture_size: int | None = None  # larger textures are shrunk, to save memory
    settle_steps: int | None = None  # None: the suite's own number

    def __post_init__(self) -> None:
        if not 16 <= self.image_size <= 1024:
            raise ValueError(f"image_size={self.image_size}: give a size from 16 to 1024 pixels")
        if self.render_quality not in RENDER_QUALITIES:
            raise ValueError(
                f"render_quality={self.render_quality!r}: choose one of "
                f"{', '.join(RENDER_QUALITIES)}"
            )
        if self.max_texture_size is not None and self.max_texture_size < 16:
            raise ValueError(
                f"max_texture_size={self.max_texture_size}: give at least 16 pixels, or null"
            )
        if self.settle_steps is not None and self.settle_steps < 1:
            raise ValueError(
                f"num_settle_steps={self.settle_steps}: give at least 1 step, or null for the "
                "suite's own number"
            )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the policy sees."""

    main: np.ndarray  # uint8 [H, W, 3], agentview camera, upright (rotated by 180 degrees)
    wrist: np.ndarray  # uint8 [H, W, 3], eye-in-hand camera, rotated likewise
    proprio: np.ndarray  # float64 [8]: position 3 (m), axis-angle 3 (rad), fingers 2 (m)
