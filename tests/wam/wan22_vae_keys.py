"""Names and shapes of the official Wan2.2 VAE at its real size, on the meta device."""

from pathlib import Path

import torch

REAL_KEYS = Path(__file__).parents[1] / "golden" / "wan22_vae_keys_real.txt"


def real_keys() -> dict[str, torch.Tensor]:
    lines = REAL_KEYS.read_text().splitlines()
    names, shapes = zip(*(line.split("\t") for line in lines), strict=True)
    return {
        name: torch.empty([int(n) for n in shape.strip("[]").split(",")], device="meta")
        for name, shape in zip(names, shapes, strict=True)
    }
