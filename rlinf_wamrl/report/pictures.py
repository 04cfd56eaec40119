"""Pictures of a run: what was imagined beside what happened."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from rlinf_wamrl.files import atomic_path

__all__ = ["save_imagination"]

_GAP, _CAPTION = 2, 12


def save_imagination(
    path: str | Path, *, current: Tensor, imagined: Tensor, executed: Tensor, rewards: Tensor
) -> None:
    """Save one row per macro-step: the picture before, then each later frame imagined | executed.

    Args:
        path: PNG file.
        current: uint8 [k,3,H,W].
        imagined: uint8 [k,n,3,H,W].
        executed: uint8 [k,n,3,H,W].
        rewards: [k], written above the row.
    """
    if not len(current):
        return
    rows = []
    for before, dreamt, seen in zip(current, imagined, executed, strict=True):
        pairs = [picture for pair in zip(dreamt, seen, strict=True) for picture in pair]
        rows.append(_beside([before, *pairs]))
    height, width = rows[0].shape[1:]
    sheet = Image.new("RGB", (width, len(rows) * (height + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (row, reward) in enumerate(zip(rows, rewards.tolist(), strict=True)):
        top = index * (height + _CAPTION)
        draw.text((2, top), f"now | imagined, executed ...   reward {reward:.4f}", fill="black")
        sheet.paste(Image.fromarray(row.permute(1, 2, 0).numpy()), (0, top + _CAPTION))
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")


def _beside(pictures: list[Tensor]) -> Tensor:
    gap = torch.full((3, pictures[0].shape[1], _GAP), 255, dtype=torch.uint8)
    spaced = [part for picture in pictures for part in (picture, gap)]
    return torch.cat(spaced[:-1], dim=2)
