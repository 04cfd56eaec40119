"""Text encoders: an instruction becomes a fixed number of context tokens.

Wan's convention holds for every encoder here: embeddings are padded with zeros to a fixed length
and the pads stay visible (mask all True). So the length is part of what a model was trained with.
"""

from __future__ import annotations

import hashlib
import math
import pkgutil
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FASTWAM_PROMPT",
    "TEXT_ENCODER_KINDS",
    "HashedWordEncoder",
    "TextEncoder",
    "build_text_encoder",
    "format_prompt",
]

FASTWAM_PROMPT = (
    "A video recorded from a robot's point of view executing the following instruction: {task}"
)
"""The prompt that the released FastWAM checkpoints were trained with."""


TEXT_ENCODER_KINDS: dict[str, str] = {
    "hashed_words": "rlinf_wamrl.wam.text:HashedWordEncoder",
    "umt5": "rlinf_wamrl.wam.text_umt5:umt5_encoder",
}
"""Kind of text encoder -> ``module:name`` of what builds it from its settings."""


@runtime_checkable
class TextEncoder(Protocol):
    """Turns instructions into context tokens.

    Attributes:
        length: tokens L of every encoding.
        dim: width D of a token.
        identity: a string that differs whenever the same instruction would be encoded otherwise.
    """

    length: int
    dim: int
    identity: str

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode B ``instructions`` to embeddings [B,L,D] and a mask [B,L] bool, True = visible.

        Raises:
            ValueError: an instruction is empty or needs more than L tokens.
        """
        ...


def build_text_encoder(kind: str, **settings: Any) -> TextEncoder:
    """Build a text encoder of a registered kind.

    Args:
        kind: a key of :data:`TEXT_ENCODER_KINDS`.
        **settings: what that kind takes (see its own documentation).

    Raises:
        ValueError: the kind is unknown, or it does not take these settings.
    """
    if kind not in TEXT_ENCODER_KINDS:
        raise ValueError(
            f"unknown kind of text encoder {kind!r}; known kinds: {', '.join(TEXT_ENCODER_KINDS)}"
        )
    try:
        return pkgutil.resolve_name(TEXT_ENCODER_KINDS[kind])(**settings)
    except TypeError as error:
        raise ValueError(f"text encoder {kind!r}: {error}") from error


def format_prompt(template: str, instruction: str) -> str:
    """Put ``instruction`` in place of ``{task}``, with white space collapsed.

    Raises:
        ValueError: the instruction is empty, or the template has no ``{task}``.
    """
    if "{task}" not in template:
        raise ValueError(f"prompt template {template!r} lacks the place holder {{task}}")
    words = instruction.split()
    if not words:
        raise ValueError("an instruction is empty")
    return template.replace("{task}", " ".join(words))


class HashedWordEncoder:
    """The small model's text encoder: each word is a fixed pseudo-random vector.

    It has no weights and downloads nothing, and knows nothing of meaning: instructions that share
    words share tokens, which is what a model of a few tasks needs. The values of a word come
    from the stream SHAKE-256(seed, word), read as 32-bit integers and mapped to the uniform
    distribution of mean 0 and variance 1: integer arithmetic, so every machine and every version
    of any library gives the same bits. Word i gets ``[cos(i w) | sin(i w)]`` added,
    ``w_j = 10000^(-j/(D/2))``.
    """

    def __init__(self, dim: int, length: int, seed: int = 0) -> None:
        """Set the width ``dim`` (even) and the number of words ``length`` of an encoding."""
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even and positive, got {dim}")
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.dim = dim
        self.length = length
        self.seed = seed
        self.identity = f"hashed-words-v1 dim={dim} length={length} seed={seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What :func:`build_text_encoder` makes this encoder from."""
        return {
            "kind": "hashed_words",
            "dim": self.dim,
            "length": self.length,
            "seed": self.seed,
        }

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See :meth:`TextEncoder.encode`; embeddings are float32 on the CPU."""
        embeddings = torch.zeros(len(instructions), self.length, self.dim)
        for row, instruction in zip(embeddings, instructions, strict=True):
            words = re.findall(r"\w+", instruction.lower())
            if not words:
                raise ValueError(f"instruction {instruction!r} has no words")
            if len(words) > self.length:
                raise ValueError(
                    f"instruction {instruction!r} has {len(words)} words, the text encoder takes "
                    f"at most {self.length}; shorten it, or train with a larger text length"
                )
            vectors = torch.stack([self._word(word) for word in words])
            row[: len(words)] = vectors + _sinusoid(len(words), self.dim)
        return embeddings, torch.ones(len(instructions), self.length, dtype=torch.bool)

    def _word(self, word: str) -> Tensor:
        stream = hashlib.shake_256(f"{self.seed}:{word}".encode()).digest(4 * self.dim)
        integers = torch.from_numpy(np.frombuffer(stream, dtype="<i4").astype(np.float64))
        # int32 is uniform on [-2^31, 2^31); variance 1 needs the half width sqrt(3).
        return ((integers + 0.5) * (math.sqrt(3.0) / 2**31)).float()


def _sinusoid(count: int, dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()
