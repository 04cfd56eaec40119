"""The video expert: Wan2.2-TI2V's diffusion transformer with a clean first frame.

Shapes: B batch, C latent channels, f latent frames, h and w latent rows and columns, n tokens per
frame, S = f * n tokens, D width, I attention width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam.config import VideoExpertConfig, rotary_widths
from rlinf_wamrl.wam.context import Context, joined
from rlinf_wamrl.wam.layers import (
    Block,
    Embeddings,
    RotaryTable,
    Stream,
    attend,
    attention_mask_of_context,
    modulate,
    run_layer,
)
from rlinf_wamrl.wam.masks import action_conditioned_context_mask, video_mask

__all__ = ["VideoExpert", "VideoHead"]


class VideoHead(nn.Module):
    """Norm, modulation by the time embedding and a linear layer to the pixels of a patch."""

    def __init__(self, config: VideoExpertConfig):
        super().__init__()
        width = config.hidden_dim
        rows, columns = config.patch_size[1:]
        self.norm = nn.LayerNorm(width, eps=config.eps, elementwise_affine=False)
        self.head = nn.Linear(width, config.out_dim * rows * columns)
        self.modulation = nn.Parameter(torch.randn(1, 2, width) / width**0.5)

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        """Maps tokens [B, S, D] and their time embedding [B, F, D] to patches [B, S, p * q * C]."""
        shift, scale = (self.modulation.unsqueeze(1) + time.unsqueeze(2)).unbind(2)
        return self.head(modulate(self.norm(tokens), shift, scale))


class VideoExpert(Embeddings):
    """Predicts the velocity of video latents, and yields the keys and values the actions read.

    The first latent frame is always taken as clean: its tokens have timestep 0.
    """

    def __init__(self, config: VideoExpertConfig):
        super().__init__(config)
        self.config = config
        self.patch_embedding = nn.Conv3d(
            config.in_dim,
            config.hidden_dim,
            kernel_size=config.patch_size,
            stride=config.patch_size,
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = VideoHead(config)
        self.rotary = nn.ModuleList(
            RotaryTable(width) for width in rotary_widths(config.attn_head_dim)
        )
        if config.action_conditioned:
            self.action_embedding = nn.Linear(config.action_dim, config.hidden_dim)

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor | None,
        context: Context,
        context_mask: Tensor | None,
        actions: Tensor | None = None,
    ) -> Tensor:
        """Predicts the velocity of the video alone.

        Args:
            latents: [B, C, f, h, w], the first frame clean.
            timestep: [B] in 0..1000 of the later frames; None = all frames are clean.
            context: [B, L, text_dim], with the proprio token.
            context_mask: [B, L] bool or None.
            actions: [B, H, A], only for an action-conditioned expert.

        Returns:
            Velocity [B, C, f, h, w]; the one of the first frame means nothing.
        """
        stream, time = self.embed(latents, timestep, context, context_mask, actions)
        mask = self.mask(latents)
        tokens = stream.tokens
        for block in self.blocks:
            tokens = run_layer(self._layer, self._recompute, block, tokens, stream, mask)
        return self.velocity(tokens, time, latents)

    def keys_values(self, stream: Stream, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, S, I] of each layer, computing nothing that they do not need.

        Args:
            stream: embedded video.
            mask: [S, S] or None.
        """
        collected = []
        tokens = stream.tokens
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            tokens, key, value = run_layer(
                self._prefill_layer, self._recompute, block, tokens, stream, mask, last
            )
            collected.append((key, value))
        return collected

    @property
    def _recompute(self) -> bool:
        return self.config.use_gradient_checkpointing

    @staticmethod
    def _prefill_layer(
        block: Block, tokens: Tensor, stream: Stream, mask: Tensor | None, last: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        modulation = block.split(stream.modulation)
        normed = block.attention_input(tokens, modulation)
        key, value = block.self_attn.keys_values(normed, stream.rotation)
        if last:  # nothing reads the tokens after the last keys and values
            return None, key, value
        query = block.self_attn.queries(normed, stream.rotation)
        attended = attend(query, key, value, block.self_attn.num_heads, mask)
        context = block.cross_attn.keys_values(stream.context)
        tokens = block.finish(tokens, attended, modulation, context, stream.context_mask)
        return tokens, key, value

    @classmethod
    def _layer(cls, block: Block, tokens: Tensor, stream: Stream, mask: Tensor | None) -> Tensor:
        return cls._prefill_layer(block, tokens, stream, mask, False)[0]

    def embed(
        self,
        latents: Tensor,
        timestep: Tensor | None,
        context: Context,
        context_mask: Tensor | None,
        actions: Tensor | None = None,
    ) -> tuple[Stream, Tensor]:
        """Turns the arguments of :meth:`forward` into tokens.

        Returns:
            The stream of tokens and the time embedding [1 or B, F, D] for the head.
        """
        frames, rows, columns = self.grid(latents)
        patches = self.patch_embedding(latents.to(self.patch_embedding.weight.dtype))
        time, modulation = self._embed_frames(timestep, frames)
        context = self.embed_context(context)
        if self.config.action_conditioned and frames > 1:
            context, context_mask = self._append_actions(
                joined(context), context_mask, actions, frames, rows * columns
            )
        stream = Stream(
            tokens=patches.flatten(2).transpose(1, 2),
            rotation=self.rotation(frames, rows, columns),
            modulation=modulation,
            context=context,
            context_mask=attention_mask_of_context(context_mask),
        )
        return stream, time

    def _embed_frames(self, timestep: Tensor | None, frames: int) -> tuple[Tensor, Tensor]:
        """Time embedding [1 or B, 1 or f, D] and modulation [1 or B, 1 or f, 6, D] per frame.

        Only the distinct timesteps go through the network: 0, and one per sample.
        """
        device = self.patch_embedding.weight.device
        if timestep is None or frames == 1:
            embedded = self.embed_time(torch.zeros(1, device=device))
            return embedded[0].unsqueeze(1), embedded[1].unsqueeze(1)
        batch = len(timestep)
        distinct = torch.cat((timestep.new_zeros(1), timestep))
        first = torch.zeros(batch, 1, dtype=torch.long, device=device)
        later = torch.arange(1, batch + 1, device=device)[:, None].expand(-1, frames - 1)
        row = torch.cat((first, later), dim=1)  # [B, f]
        time, modulation = self.embed_time(distinct)
        return time[row], modulation[row]

    def _append_actions(
        self,
        context: Tensor,
        context_mask: Tensor | None,
        actions: Tensor | None,
        frames: int,
        tokens_per_frame: int,
    ) -> tuple[Tensor, Tensor]:
        if actions is None:
            raise ValueError(
                "An action-conditioned video expert needs the actions of the chunk to predict more "
                "than the first frame; pass actions [B, H, A]."
            )
        embedded = self.action_embedding(actions.to(context.dtype))
        # The official code casts its position sinusoid to integers, which leaves the cosines of
        # position 0 alone: checkpoints were trained with that.
        position = torch.zeros_like(embedded[0])
        position[0, : position.shape[1] // 2] = 1
        if context_mask is None:
            context_mask = torch.ones(context.shape[:2], dtype=torch.bool, device=context.device)
        mask = action_conditioned_context_mask(
            context_mask,
            self.config.action_group_causal_mask_mode,
            frames,
            tokens_per_frame,
            actions.shape[1],
        )
        return torch.cat((context, embedded + position), dim=1), mask

    def rotation(self, frames: int, rows: int, columns: int) -> Tensor:
        """Rotations [S, d / 2] complex64: the parts for frame, row and column side by side."""
        grid = (frames, rows, columns, -1)
        frame, row, column = (
            table(length) for table, length in zip(self.rotary, grid[:3], strict=True)
        )
        parts = (
            frame[:, None, None].expand(grid),
            row[None, :, None].expand(grid),
            column[None, None].expand(grid),
        )
        return torch.cat(parts, dim=-1).flatten(0, 2)

    def grid(self, latents: Tensor) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens of latents [B, C, f, h, w].

        Raises:
            ValueError: wrong channels, or rows or columns that the patch does not divide.
        """
        _, rows, columns = self.config.patch_size
        if latents.ndim != 5 or latents.shape[1] != self.config.in_dim:
            raise ValueError(
                f"Video latents must be [B, {self.config.in_dim}, f, h, w], got "
                f"{list(latents.shape)}."
            )
        frames, height, width = latents.shape[2:]
        if height % rows or width % columns:
            raise ValueError(
                f"Latents of {height} x {width} cannot be cut into patches of {rows} x {columns}: "
                f"images must be multiples of {16 * rows} x {16 * columns} pixels with the Wan2.2 "
                "VAE."
            )
        return frames, height // rows, width // columns

    def mask(self, latents: Tensor) -> Tensor | None:
        """Video mask [S, S] for these latents; None where everything may be attended."""
        frames, rows, columns = self.grid(latents)
        if frames == 1 or self.config.video_attention_mask_mode == "bidirectional":
            return None
        mode = self.config.video_attention_mask_mode
        return video_mask(mode, frames, rows * columns, latents.device)

    def velocity(self, tokens: Tensor, time: Tensor, latents: Tensor) -> Tensor:
        """Applies the head and puts the patches back in place.

        Args:
            tokens: output of the last block [B, S, D].
            time: second result of :meth:`embed`.
            latents: the input [B, C, f, h, w], for its shape and dtype.

        Returns:
            [B, C, f, h, w] in the dtype of latents.
        """
        frames, rows, columns = self.grid(latents)
        _, height, width = self.config.patch_size
        patches = self.head(tokens, time).to(latents.dtype)
        patches = patches.unflatten(2, (height, width, -1)).unflatten(1, (frames, rows, columns))
        # [B, f, r, q, p_h, p_w, C] -> [B, C, f, r, p_h, q, p_w]
        return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
