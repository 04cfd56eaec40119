"""The action expert: denoises one chunk of actions.

Shapes: B batch, H actions, A action width, D width, I attention width, L context tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam.config import ActionExpertConfig
from rlinf_wamrl.wam.context import Context
from rlinf_wamrl.wam.layers import (
    Block,
    Embeddings,
    RotaryTable,
    Stream,
    attend,
    attention_mask_of_context,
    run_layer,
)
from rlinf_wamrl.wam.state import ActionCache

__all__ = ["ActionExpert"]


class ActionExpert(Embeddings):
    """Predicts the velocity of noisy actions that attend to the video's keys and values."""

    def __init__(self, config: ActionExpertConfig):
        super().__init__(config)
        self.config = config
        self.action_encoder = nn.Linear(config.action_dim, config.hidden_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.hidden_dim, config.action_dim)
        self.rotary = RotaryTable(config.attn_head_dim)

    def embed(
        self, actions: Tensor, timestep: Tensor, context: Context, context_mask: Tensor | None
    ) -> Stream:
        """Turns noisy actions and their context into a stream of tokens.

        Args:
            actions: [B, H, A].
            timestep: [B] in 0..1000.
            context: [B, L, text_dim], with the proprio token.
            context_mask: [B, L] bool or None.
        """
        dtype = self.action_encoder.weight.dtype
        return Stream(
            tokens=self.action_encoder(actions.to(dtype)),
            rotation=self.rotary(actions.shape[1]),
            modulation=self.embed_time(timestep)[1].unsqueeze(1),
            context=self.embed_context(context),
            context_mask=attention_mask_of_context(context_mask),
        )

    def context_keys_values(self, context: Context) -> list[tuple[Tensor, Tensor]]:
        """Cross-attention keys and values [B, L, I] of each layer, of context [B, L, text_dim]."""
        embedded = self.embed_context(context)
        return [block.cross_attn.keys_values(embedded) for block in self.blocks]

    def forward(self, actions: Tensor, timestep: Tensor, cache: ActionCache) -> Tensor:
        """Predicts the velocity of actions from what is cached of the observation.

        Args:
            actions: [B, H, A].
            timestep: [B] in 0..1000.
            cache: of the same batch.

        Returns:
            [B, H, A] in the dtype of actions.
        """
        tokens = self.action_encoder(actions.to(self.action_encoder.weight.dtype))
        rotation = self.rotary(actions.shape[1])
        time_modulation = self.embed_time(timestep)[1].unsqueeze(1)
        context_mask = attention_mask_of_context(cache.context_mask)

        def layer(index: int, tokens: Tensor) -> Tensor:
            block: Block = self.blocks[index]
            modulation = block.split(time_modulation)
            normed = block.attention_input(tokens, modulation)
            key, value = block.self_attn.keys_values(normed, rotation)
            attended = attend(
                block.self_attn.queries(normed, rotation),
                torch.cat((cache.video_keys[index], key), dim=1),
                torch.cat((cache.video_values[index], value), dim=1),
                block.self_attn.num_heads,
                None,
            )
            context = (cache.context_keys[index], cache.context_values[index])
            return block.finish(tokens, attended, modulation, context, context_mask)

        for index in range(len(self.blocks)):
            tokens = run_layer(layer, self.config.use_gradient_checkpointing, index, tokens)
        return self.velocity(tokens, actions.dtype)

    def velocity(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Applies the head to the last block's tokens [B, H, D]: [B, H, A] in dtype."""
        return self.head(tokens).to(dtype)
