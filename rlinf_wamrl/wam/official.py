"""The two ways in which official FastWAM code takes a denoising step apart.

* :class:`DictGeneration`: ``pre_dit`` / ``post_dit`` with dictionaries, ``mot.prefill_video_cache``
  and ``mot.forward_action_with_video_cache``.
* :class:`TensorGeneration`: ``prepare`` / ``post`` with tuples, ``mot.prefill_video_cache_tensor``
  and ``mot.forward_action_with_video_cache_tensor``.

Which one an object has is found by looking for these methods, never by its class or version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.wam.masks import mixture_mask

__all__ = ["DictGeneration", "Generation", "OfficialCache", "TensorGeneration", "generation_of"]


@dataclass(frozen=True, kw_only=True)
class OfficialCache:
    """What stays constant over the denoising steps of an official model."""

    video_keys: tuple[Tensor, ...]  # [B, S, I] per layer
    video_values: tuple[Tensor, ...]  # [B, S, I] per layer
    context: Tensor  # [B, L + 1, text_dim] with the proprio token
    context_mask: Tensor  # [B, L + 1] bool

    def index(self, rows: Tensor | slice) -> OfficialCache:
        """Selects rows of the batch, given as indices, a mask or a slice."""
        return self._map(lambda x: x[rows])

    def detach(self) -> OfficialCache:
        """The same cache without a gradient."""
        return self._map(Tensor.detach)

    def _map(self, function) -> OfficialCache:
        return OfficialCache(
            video_keys=tuple(map(function, self.video_keys)),
            video_values=tuple(map(function, self.video_values)),
            context=function(self.context),
            context_mask=function(self.context_mask),
        )


class Generation(ABC):
    """One way to take the official forward pass apart.

    Attributes:
        expert_method: by which both experts of this generation are recognised.
        mixture_method: by which the mixture of this generation is recognised.
    """

    expert_method: str
    mixture_method: str

    def __init__(self, model: Any):
        """Args: model: the official FastWAM object."""
        self.model = model

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether the object has the methods of this generation."""
        experts = (model.video_expert, model.action_expert)
        return all(hasattr(expert, cls.expert_method) for expert in experts) and hasattr(
            model.mot, cls.mixture_method
        )

    @abstractmethod
    def keys_values(
        self, video: Tensor, timestep: Tensor, context: Tensor, context_mask: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values [B, S, I] of each layer, of a video [B, C, f, h, w]."""

    @abstractmethod
    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: OfficialCache) -> Tensor:
        """Velocity [B, H, A] of actions [B, H, A] at timestep [B]."""


class DictGeneration(Generation):
    """``pre_dit`` and ``prefill_video_cache``."""

    expert_method = "pre_dit"
    mixture_method = "prefill_video_cache"

    def keys_values(
        self, video: Tensor, timestep: Tensor, context: Tensor, context_mask: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As :meth:`Generation.keys_values`."""
        expert = self.model.video_expert
        embedded = expert.pre_dit(
            x=video,
            timestep=timestep,
            context=context,
            context_mask=context_mask,
            action=None,
            fuse_vae_embedding_in_latents=True,
        )
        layers = self.model.mot.prefill_video_cache(
            video_tokens=embedded["tokens"],
            video_freqs=embedded["freqs"],
            video_t_mod=embedded["t_mod"],
            video_context_payload=_payload(embedded),
            video_attention_mask=_video_mask(
                expert, embedded["tokens"], embedded["meta"]["tokens_per_frame"]
            ),
        )
        return [layer["k"] for layer in layers], [layer["v"] for layer in layers]

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: OfficialCache) -> Tensor:
        """As :meth:`Generation.action_velocity`."""
        expert = self.model.action_expert
        embedded = expert.pre_dit(
            action_tokens=actions,
            timestep=timestep,
            context=cache.context,
            context_mask=cache.context_mask,
        )
        size = cache.video_keys[0].shape[1]
        layers = zip(cache.video_keys, cache.video_values, strict=True)
        # Only the actions' rows are read; the cache holds exactly what they may see.
        unread = torch.ones(size, size, dtype=torch.bool, device=actions.device)
        tokens = self.model.mot.forward_action_with_video_cache(
            action_tokens=embedded["tokens"],
            action_freqs=embedded["freqs"],
            action_t_mod=embedded["t_mod"],
            action_context_payload=_payload(embedded),
            video_kv_cache=[{"k": key, "v": value} for key, value in layers],
            attention_mask=mixture_mask(unread, actions.shape[1], size),
            video_seq_len=size,
        )
        return expert.post_dit(tokens, embedded)


class TensorGeneration(Generation):
    """``prepare`` and ``prefill_video_cache_tensor``."""

    expert_method = "prepare"
    mixture_method = "prefill_video_cache_tensor"

    def keys_values(
        self, video: Tensor, timestep: Tensor, context: Tensor, context_mask: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As :meth:`Generation.keys_values`."""
        expert = self.model.video_expert
        tokens, _, modulation, embedded, mask, freqs, *_, tokens_per_frame = expert.prepare(
            x=video,
            timestep=timestep,
            context=context,
            context_mask=context_mask,
            action=None,
            fuse_vae_embedding_in_latents=True,
        )
        return self.model.mot.prefill_video_cache_tensor(
            video_tokens=tokens,
            video_freqs=freqs,
            video_t_mod=modulation,
            video_context=embedded,
            video_context_mask=mask,
            video_attention_mask=_video_mask(expert, tokens, tokens_per_frame),
        )

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: OfficialCache) -> Tensor:
        """As :meth:`Generation.action_velocity`."""
        expert = self.model.action_expert
        tokens, _, modulation, embedded, mask, freqs = expert.prepare(
            action_tokens=actions,
            timestep=timestep,
            context=cache.context,
            context_mask=cache.context_mask,
        )
        horizon, size = actions.shape[1], cache.video_keys[0].shape[1]
        tokens = self.model.mot.forward_action_with_video_cache_tensor(
            action_tokens=tokens,
            action_freqs=freqs,
            action_t_mod=modulation,
            action_context=embedded,
            action_context_mask=mask,
            video_cache_k=list(cache.video_keys),
            video_cache_v=list(cache.video_values),
            action_attention_mask=torch.ones(
                horizon, size + horizon, dtype=torch.bool, device=actions.device
            ),
        )
        return expert.post(tokens)


_GENERATIONS = (TensorGeneration, DictGeneration)
"""Tried in this order: newer objects keep the older methods beside the ones they use."""


def _payload(embedded: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"context": embedded["context"], "mask": embedded["context_mask"]}


def _video_mask(expert: Any, tokens: Tensor, tokens_per_frame: int) -> Tensor:
    return expert.build_video_to_video_mask(
        video_seq_len=tokens.shape[1],
        video_tokens_per_frame=int(tokens_per_frame),
        device=tokens.device,
    )


def generation_of(model: Any) -> Generation:
    """Finds out how to take the forward pass of an official object apart.

    Raises:
        TypeError: it can be done in neither way; the message says what is missing.
    """
    needed = ("video_expert", "action_expert", "mot", "infer_action", "infer_action_scheduler")
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"{type(model).__name__} is neither a WAM nor a FastWAM: it lacks {', '.join(missing)}."
        )
    for generation in _GENERATIONS:
        if generation.fits(model):
            return generation(model)
    raise TypeError(
        f"{type(model).__name__} has the experts of a FastWAM, but neither pre_dit with "
        "mot.prefill_video_cache nor prepare with mot.prefill_video_cache_tensor."
    )
