"""The transformer pieces both experts are made of.

Shapes: B batch, S tokens, D width of an expert, H heads, d head width, I = H * d, L context tokens,
F modulation rows (one per frame). Masks are boolean, True = may attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlinf_wamrl.wam.config import ExpertConfig
from rlinf_wamrl.wam.context import Context, each_token, joined

__all__ = [
    "Attention",
    "Block",
    "CrossAttention",
    "Embeddings",
    "KeyValueTap",
    "Modulation",
    "RMSNorm",
    "RotaryTable",
    "SelfAttention",
    "Stream",
    "attend",
    "attention_mask_of_context",
    "gate",
    "modulate",
    "rotate",
    "run_layer",
    "sinusoid",
]

ROTARY_BASE = 10000.0
MAX_POSITIONS = 1024


class RMSNorm(nn.Module):
    """Root-mean-square norm over the whole attention width, all heads together."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x [..., I] in float32, casts back, then scales."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class RotaryTable(nn.Module):
    """Cosines and sines ``position * 10000 ** (-2 j / width)`` of the positions 0..1023.

    The tables are buffers that are not saved. They are computed on construction whatever the
    default device is, and again after every move or cast, so a model built on the meta device has
    them, and neither ``to_empty`` nor ``to(bfloat16)`` harms them.
    """

    cos: Tensor  # [positions, width / 2] float32
    sin: Tensor  # [positions, width / 2] float32

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self._fill(torch.device("cpu"))

    def _fill(self, device: torch.device) -> None:
        pair = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu")
        position = torch.arange(MAX_POSITIONS, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, ROTARY_BASE ** (-pair / self.width))
        self.register_buffer("cos", angle.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angle.sin().float().to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        super()._apply(fn, recurse)
        self._fill(self.cos.device)
        return self

    def forward(self, length: int) -> Tensor:
        """Rotations ``cos + i sin`` [length, width / 2] complex64 of the positions 0..length-1."""
        if length > MAX_POSITIONS:
            raise ValueError(
                f"The rotary embedding has {MAX_POSITIONS} positions, {length} were asked for."
            )
        return torch.complex(self.cos[:length], self.sin[:length])


def rotate(x: Tensor, rotation: Tensor, num_heads: int) -> Tensor:
    """Rotates adjacent pairs of components, taken as complex numbers, the same way in each head.

    Args:
        x: queries or keys [B, S, I].
        rotation: [S, d / 2] complex64.
        num_heads: H.

    Returns:
        [B, S, I] in the dtype of x, computed in float32.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (num_heads, -1, 2)))  # [B, S, H, d / 2]
    return torch.view_as_real(pairs * rotation[:, None]).flatten(2).to(x.dtype)


def sinusoid(timestep: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of a timestep, cosines first.

    Args:
        timestep: [N] in 0..1000, not scaled.
        width: even.

    Returns:
        [N, width], computed in float64, in the dtype of timestep.
    """
    half = width // 2
    index = torch.arange(half, dtype=torch.float64, device=timestep.device)
    angle = torch.outer(timestep.double(), ROTARY_BASE ** (-index / half))
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(timestep.dtype)


def attend(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, mask: Tensor | None
) -> Tensor:
    """Scaled dot-product attention over heads.

    Args:
        query: [B, S, I].
        key: [B, T, I].
        value: [B, T, I].
        num_heads: H.
        mask: broadcastable to [B, H, S, T], or None when everything may be attended.

    Returns:
        [B, S, I].
    """
    query, key, value = (
        x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value)
    )
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attended.transpose(1, 2).flatten(2)


class KeyValueTap(nn.Module):
    """Passes self-attention keys and values through: a named place for forward hooks.

    ``video_expert.blocks[i].self_attn.key_value`` yields, for each layer i, the pair
    ``(keys, values)`` [B, S, I] each, keys after norm and rotation: exactly what the action expert
    reads. A forward hook there sees every path (prefill, imagination, training). With gradient
    checkpointing it is called a second time in the backward pass, so remove the hooks before it.
    """

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns its arguments."""
        return key, value


class Attention(nn.Module):
    """Projections of one attention; the attention itself is :func:`attend`."""

    def __init__(self, config: ExpertConfig):
        super().__init__()
        width, inner = config.hidden_dim, config.attention_dim
        self.num_heads = config.num_heads
        self.q = nn.Linear(width, inner)
        self.k = nn.Linear(width, inner)
        self.v = nn.Linear(width, inner)
        self.o = nn.Linear(inner, width)
        self.norm_q = RMSNorm(inner, config.eps)
        self.norm_k = RMSNorm(inner, config.eps)


class SelfAttention(Attention):
    """Self-attention with rotary positions."""

    def __init__(self, config: ExpertConfig):
        super().__init__(config)
        self.key_value = KeyValueTap()

    def queries(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Queries [B, S, I] of x [B, S, D]."""
        return rotate(self.norm_q(self.q(x)), rotation, self.num_heads)

    def keys_values(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, S, I] each, of x [B, S, D]."""
        return self.key_value(rotate(self.norm_k(self.k(x)), rotation, self.num_heads), self.v(x))


class CrossAttention(Attention):
    """Attention to the context, without positions."""

    def keys_values(self, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values [B, L, I] each, of the embedded context [B, L, D]."""
        keys = each_token(context, lambda tokens: self.norm_k(self.k(tokens)))
        return joined(keys), joined(each_token(context, self.v))

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attends from x [B, S, D] to projected context, mask [B, 1, 1 or S, L]: [B, S, D]."""
        query = self.norm_q(self.q(x))
        return self.o(attend(query, *keys_values, self.num_heads, mask))


@dataclass(frozen=True)
class Modulation:
    """Shift, scale and gate of a block's two modulated branches, [B, F, D] each."""

    attention_shift: Tensor
    attention_scale: Tensor
    attention_gate: Tensor
    ffn_shift: Tensor
    ffn_scale: Tensor
    ffn_gate: Tensor


def per_frame(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views tokens [B, S, D] as [B, F, S / F, D] beside rows [B, F, 1, D]; S is frame-major."""
    return x.unflatten(1, (rows.shape[1], -1)), rows.unsqueeze(2)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` with one row [B, F, D] of each per frame of x [B, S, D]."""
    frames, shift = per_frame(x, shift)
    return (frames * (1 + scale.unsqueeze(2)) + shift).flatten(1, 2)


def gate(x: Tensor, rows: Tensor) -> Tensor:
    """``x * rows`` with one row [B, F, D] per frame of x [B, S, D]."""
    frames, rows = per_frame(x, rows)
    return (frames * rows).flatten(1, 2)


class Block(nn.Module):
    """One transformer block, cut in two at its self-attention, which experts can share."""

    def __init__(self, config: ExpertConfig):
        super().__init__()
        width = config.hidden_dim
        self.self_attn = SelfAttention(config)
        self.cross_attn = CrossAttention(config)
        self.norm1 = nn.LayerNorm(width, eps=config.eps, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=config.eps, elementwise_affine=False)
        self.norm3 = nn.LayerNorm(width, eps=config.eps)
        self.ffn = nn.Sequential(
            nn.Linear(width, config.ffn_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.ffn_dim, width),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, width) / width**0.5)

    def split(self, time_modulation: Tensor) -> Modulation:
        """Adds the block's own offset to the time modulation [B, F, 6, D] and names the parts."""
        return Modulation(*(self.modulation.unsqueeze(1) + time_modulation).unbind(2))

    def attention_input(self, x: Tensor, modulation: Modulation) -> Tensor:
        """What queries, keys and values are projected from [B, S, D]."""
        return modulate(self.norm1(x), modulation.attention_shift, modulation.attention_scale)

    def finish(
        self,
        x: Tensor,
        attended: Tensor,
        modulation: Modulation,
        context: tuple[Tensor, Tensor],
        context_mask: Tensor | None,
    ) -> Tensor:
        """Everything of the block after its self-attention.

        Args:
            x: the block's input tokens [B, S, D].
            attended: output of the self-attention [B, S, I].
            modulation: of this block.
            context: cross-attention keys and values [B, L, I] each.
            context_mask: [B, 1, 1 or S, L] or None.

        Returns:
            The block's output [B, S, D].
        """
        x = x + gate(self.self_attn.o(attended), modulation.attention_gate)
        x = x + self.cross_attn(self.norm3(x), context, context_mask)
        hidden = modulate(self.norm2(x), modulation.ffn_shift, modulation.ffn_scale)
        return x + gate(self.ffn(hidden), modulation.ffn_gate)


class Embeddings(nn.Module):
    """Text and time embeddings, the same in both experts."""

    def __init__(self, config: ExpertConfig):
        super().__init__()
        width = config.hidden_dim
        self.freq_dim = config.freq_dim
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, width), nn.GELU(approximate="tanh"), nn.Linear(width, width)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def embed_context(self, context: Context) -> Context:
        """Embeds context tokens [B, L, text_dim]: [B, L, D] in the weights' dtype."""
        dtype = self.text_embedding[0].weight.dtype
        return each_token(context, lambda tokens: self.text_embedding(tokens.to(dtype)))

    def embed_time(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Embeds timesteps.

        Args:
            timestep: [N] in 0..1000.

        Returns:
            The embedding [N, D] and the blocks' modulation [N, 6, D].
        """
        weight = self.time_embedding[0].weight
        embedding = self.time_embedding(sinusoid(timestep, self.freq_dim).to(weight.dtype))
        return embedding, self.time_projection(embedding).unflatten(-1, (6, -1))


def attention_mask_of_context(mask: Tensor | None) -> Tensor | None:
    """Makes a context mask [B, L] or [B, S, L] broadcastable over heads and queries."""
    if mask is None:
        return None
    return mask[:, None, None] if mask.ndim == 2 else mask[:, None]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One expert's embedded input, before its first block."""

    tokens: Tensor  # [B, S, D]
    rotation: Tensor  # [S, d / 2] complex64
    modulation: Tensor  # [1 or B, F, 6, D]; F divides S: one row per frame of tokens
    context: Context  # [B, L, D] embedded text and proprio
    context_mask: Tensor | None  # [B, 1, 1 or S, L] bool

    def followed_by(self, other: Stream) -> Stream:
        """Both streams' tokens as one sequence, with this stream's context (the same for both)."""
        return Stream(
            tokens=torch.cat((self.tokens, other.tokens), dim=1),
            rotation=torch.cat((self.rotation, other.rotation)),
            modulation=torch.cat((self.modulation, other.modulation), dim=1),
            context=self.context,
            context_mask=self.context_mask,
        )


def run_layer(function: Callable[..., Any], recompute: bool, *arguments: Any) -> Any:
    """Calls a layer; with ``recompute`` its activations are computed again in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(function, *arguments, use_reentrant=False)
    return function(*arguments)
