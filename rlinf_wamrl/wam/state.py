"""What the model is given for a batch of observations, and what it keeps between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ActionCache",
    "KeysValues",
    "WAMState",
    "stack_keys_values",
    "unstack_keys_values",
]

KeysValues = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [B, S, I] each of the video, one pair per layer."""


@dataclass(frozen=True, kw_only=True)
class WAMState:
    """One batch of observations, ready for the model."""

    first_frame: Tensor | None  # [B, C_lat, 1, h, w] latents of the current image, from the VAE;
    # None where the video's keys and values are known already
    context: Tensor  # [B, L, text_dim] text embeddings, without the proprio token
    context_mask: Tensor  # [B, L] bool, True = may attend
    proprio: Tensor | None = None  # [B, P] normalised
    video: Tensor | None = None  # [B, C_lat, f, h, w] finished imagination, for idm mode
    context_rows: Tensor | None = None  # [B] int64: the row of context and mask of each
    # observation, where several have the same text; None: one each, in order


@dataclass(frozen=True, kw_only=True)
class ActionCache:
    """Everything an action velocity needs that does not change over the denoising steps.

    The tuples have one entry per layer. Keys are after norm (and, for the video, rotation).
    """

    video_keys: tuple[Tensor, ...]  # [B, S, I] each: what the actions see of the video
    video_values: tuple[Tensor, ...]  # [B, S, I] each
    context_keys: tuple[Tensor, ...]  # [B, L + 1, I] each: the action expert's cross-attention
    context_values: tuple[Tensor, ...]  # [B, L + 1, I] each
    context_mask: Tensor  # [B, L + 1] bool

    def index(self, rows: Tensor | slice) -> ActionCache:
        """Selects rows of the batch, given as indices, a mask or a slice."""
        return self._map(lambda x: x[rows])

    def detach(self) -> ActionCache:
        """The same cache without a gradient."""
        return self._map(Tensor.detach)

    def _map(self, function) -> ActionCache:
        return ActionCache(
            video_keys=tuple(map(function, self.video_keys)),
            video_values=tuple(map(function, self.video_values)),
            context_keys=tuple(map(function, self.context_keys)),
            context_values=tuple(map(function, self.context_values)),
            context_mask=function(self.context_mask),
        )


def stack_keys_values(layers: KeysValues) -> Tensor:
    """Return keys and values of all layers as one tensor [B, layers, 2, S, I]."""
    return torch.stack([torch.stack(pair, dim=1) for pair in layers], dim=1)


def unstack_keys_values(stacked: Tensor) -> KeysValues:
    """Invert :func:`stack_keys_values`."""
    return [(pair[:, 0], pair[:, 1]) for pair in stacked.unbind(1)]
