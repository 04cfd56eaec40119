"""Mixture of transformers: two experts that share each layer's self-attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam.action_expert import ActionExpert
from rlinf_wamrl.wam.layers import Block, Stream, attend, run_layer
from rlinf_wamrl.wam.video_expert import VideoExpert

__all__ = ["MixtureOfTransformers"]


class MixtureOfTransformers(nn.Module):
    """Holds both experts and runs them in lock step, sequence order [video | action].

    In each layer each expert projects its own tokens; one attention runs over all of them; each
    expert goes on with its part of the result.
    """

    def __init__(self, video_expert: VideoExpert, action_expert: ActionExpert):
        super().__init__()
        self.mixtures = nn.ModuleDict({"video": video_expert, "action": action_expert})

    def forward(self, video: Stream, action: Stream, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Runs all layers.

        Args:
            video: S embedded video tokens.
            action: H embedded action tokens.
            mask: [S + H, S + H] bool, or [B, 1, S + H, S + H] when it differs per sample.

        Returns:
            Video tokens [B, S, D_video] and action tokens [B, H, D_action] after the last layer.
        """
        streams = (video, action)
        experts = (self.mixtures["video"], self.mixtures["action"])
        recompute = any(expert.config.use_gradient_checkpointing for expert in experts)
        tokens = (video.tokens, action.tokens)
        for blocks in zip(*(expert.blocks for expert in experts), strict=True):
            tokens = run_layer(self._layer, recompute, blocks, streams, mask, *tokens)
        return tokens

    @staticmethod
    def _layer(
        blocks: tuple[Block, Block], streams: tuple[Stream, Stream], mask: Tensor, *tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = tuple(zip(blocks, streams, tokens, strict=True))
        modulations = [block.split(stream.modulation) for block, stream, _ in parts]
        queries, keys, values = [], [], []
        for (block, stream, x), modulation in zip(parts, modulations, strict=True):
            normed = block.attention_input(x, modulation)
            key, value = block.self_attn.keys_values(normed, stream.rotation)
            queries.append(block.self_attn.queries(normed, stream.rotation))
            keys.append(key)
            values.append(value)
        attended = attend(
            *(torch.cat(part, dim=1) for part in (queries, keys, values)),
            blocks[0].self_attn.num_heads,
            mask,
        )
        pieces = attended.split([x.shape[1] for x in tokens], dim=1)
        video, action = (
            block.finish(
                x,
                piece,
                modulation,
                block.cross_attn.keys_values(stream.context),
                stream.context_mask,
            )
            for (block, stream, x), piece, modulation in zip(
                parts, pieces, modulations, strict=True
            )
        )
        return video, action
