"""Task instructions as tensors, so that they travel in the record of a macro-step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["INSTRUCTION_BYTES", "pack_instructions", "unpack_instructions"]

INSTRUCTION_BYTES = 256
"""Room for an instruction in a record, UTF-8, padded with zeros."""


def pack_instructions(instructions: Sequence[str]) -> Tensor:
    """Store instructions as uint8 [B, 256], UTF-8 padded with zeros.

    Raises:
        ValueError: an instruction is longer than 256 bytes.
    """
    encoded = [instruction.encode() for instruction in instructions]
    for instruction, text in zip(instructions, encoded, strict=True):
        if len(text) > INSTRUCTION_BYTES:
            raise ValueError(
                f"an instruction may have {INSTRUCTION_BYTES} bytes, this one has {len(text)}: "
                f"{instruction!r}"
            )
    padded = b"".join(text.ljust(INSTRUCTION_BYTES, b"\0") for text in encoded)
    packed = np.frombuffer(padded, dtype=np.uint8).reshape(-1, INSTRUCTION_BYTES)
    return torch.from_numpy(packed.copy())


def unpack_instructions(packed: Tensor) -> list[str]:
    """Invert :func:`pack_instructions`."""
    return [bytes(row).rstrip(b"\0").decode() for row in packed.cpu().numpy()]
