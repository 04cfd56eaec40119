"""Pictures of a run: what was imagined beside what happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from rlinf_wamrl.files import atomic_path

__all__ = ["Film", "save_imagination"]

_GAP, _CAPTION = 2, 12


def save_imagination(
    path: str | Path,
    *,
    current: Tensor,
    imagined: Tensor,
    executed: Tensor,
    rewards: Tensor,
    magnified: int = 1,
) -> None:
    """Save one row per macro-step: the picture before, then each later frame imagined | executed.

    Args:
        path: PNG file.
        current: uint8 [k,3,H,W].
        imagined: uint8 [k,n,3,H,W].
        executed: uint8 [k,n,3,H,W].
        rewards: [k], written above the row.
        magnified: picture pixels per pixel.
    """
    if not len(current):
        return
    rows = []
    for before, dreamt, seen in zip(current, imagined, executed, strict=True):
        pairs = [picture for pair in zip(dreamt, seen, strict=True) for picture in pair]
        large = [
            picture.repeat_interleave(magnified, 1).repeat_interleave(magnified, 2)
            for picture in (before, *pairs)
        ]
        rows.append(_beside(large))
    height, width = rows[0].shape[1:]
    sheet = Image.new("RGB", (width, len(rows) * (height + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (row, reward) in enumerate(zip(rows, rewards.tolist(), strict=True)):
        top = index * (height + _CAPTION)
        draw.text((2, top), f"now | imagined, executed ...   reward {reward:.4f}", fill="black")
        sheet.paste(Image.fromarray(row.permute(1, 2, 0).numpy()), (0, top + _CAPTION))
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")


class Film:
    """Films the first environment of a batch: the pictures that were rendered anyway."""

    FRAMES_PER_SECOND = 5
    """LIBERO runs at 20 steps per second; a picture is rendered every 4th."""

    def __init__(self) -> None:
        """Begin an empty film."""
        self.frames: list[Tensor] = []

    def start(self, observation: Mapping[str, Any]) -> None:
        """Begin an episode with its first observation, both cameras side by side."""
        views = [observation[name][0] for name in ("main_images", "wrist_images")]
        self.frames.append(torch.cat(views, dim=1))

    def add(self, observation: Mapping[str, Any]) -> None:
        """Append the frames captured while a chunk was executed."""
        captured = observation["future_frames"][0][observation["future_frames_mask"][0]]
        self.frames += list(captured.movedim(1, -1))

    def save(self, path: str | Path) -> None:
        """Write the film as an mp4."""
        frames = [frame.repeat_interleave(4, 0).repeat_interleave(4, 1) for frame in self.frames]
        with atomic_path(path) as temporary:
            imageio.mimwrite(
                temporary,
                [frame.numpy() for frame in frames],
                format="mp4",
                fps=self.FRAMES_PER_SECOND,
                macro_block_size=1,
                output_params=["-f", "mp4"],  # the temporary name has no ending to tell by
            )


def _beside(pictures: list[Tensor]) -> Tensor:
    gap = torch.full((3, pictures[0].shape[1], _GAP), 255, dtype=torch.uint8)
    spaced = [part for picture in pictures for part in (picture, gap)]
    return torch.cat(spaced[:-1], dim=2)
