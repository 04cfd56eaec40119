"""Low-rank adapters on the video expert, and which weights of a model train.

The adapters sit in place, by peft's injection: the video expert keeps its class and its names. An
adapted layer ``X`` has its pretrained weights under ``X.base_layer`` and its adapter (rank r) under
``X.lora_A.default.weight`` [r, in] and ``X.lora_B.default.weight`` [out, r]; every other name stays
as it was. Its output is ``W x + b + alpha / r * B A x`` with B = 0 at the start (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlinf_wamrl.rl.adapters import adapted_layers, adapters_disabled
from rlinf_wamrl.rl.losses import gradient_stopped_at
from rlinf_wamrl.wam.features import capture_video_features

__all__ = [
    "TRAINABLE_PARTS",
    "TrainableSet",
    "frozen_features",
    "inject_lora",
    "live_and_frozen_features",
    "merged_state_dict",
    "pretrained_features",
    "select_trainable",
    "trainable_set",
]

TRAINABLE_PARTS = ("lora", "action_expert", "proprio_encoder")
"""What WAM-RL trains: the adapters by one optimiser, the other two by another."""

Features = list[tuple[Tensor, Tensor]]
"""Keys and values [B, S, I] of the video, one pair per layer: what the action expert reads."""

_TARGETS = r"(.*\.)?blocks\.\d+\.((self_attn|cross_attn)\.[qkvo]|ffn\.[02])"
_TARGETS_PER_BLOCK = 10


@dataclass(frozen=True, kw_only=True)
class TrainableSet:
    """The weights of a model that train, by part, and how many do not."""

    names: Mapping[str, tuple[str, ...]]  # part -> names of its parameters
    counts: Mapping[str, int]  # part -> numbers in them
    frozen: int  # numbers in all other parameters

    @property
    def trained(self) -> int:
        """Numbers that train."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        """One line per part, for the start of a run."""
        rows = [
            f"{part:<16} {self.counts[part]:>14,} in {len(names)} tensors"
            for part, names in self.names.items()
        ]
        share = 100 * self.trained / max(self.trained + self.frozen, 1)
        rows.append(f"{'trained':<16} {self.trained:>14,} ({share:.2f} %)")
        rows.append(f"{'frozen':<16} {self.frozen:>14,}")
        return "\n".join(rows)


def inject_lora(
    model: Any,
    *,
    generator: torch.Generator,
    rank: int = 16,
    alpha: float = 32.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Put adapters on the video expert and freeze everything else of it.

    Adapted are q, k, v, o of self- and cross-attention and both feed-forward layers of every block.
    There is no dropout: it would make two forward passes of the same weights differ. The model
    computes the same as before until the adapters are trained.

    Args:
        model: a WAM or an adapted official object, on any device; on meta the adapters are, too.
        generator: of the initial A; the global random state is left as it is.
        rank: r.
        alpha: the adapters' output is scaled by alpha / r.
        dtype: of the adapters; None takes each layer's own. float32 adapters on bfloat16 weights
            compute their own part in float32.

    Raises:
        ValueError: there are adapters already, an impossible rank, or blocks of another make.
    """
    expert = model.video_expert
    if adapted_layers(expert):
        raise ValueError("the video expert has adapters already")
    if rank < 1:
        raise ValueError(f"the rank of the adapters must be at least 1, got {rank}")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=_TARGETS)
    on_meta = any(parameter.is_meta for parameter in expert.parameters())
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, expert, low_cpu_mem_usage=on_meta)
    layers = adapted_layers(expert)
    expected = _TARGETS_PER_BLOCK * len(expert.blocks)
    if len(layers) != expected:
        raise ValueError(
            f"{len(layers)} layers of the video expert got adapters, {expected} were expected: "
            f"{len(expert.blocks)} blocks with self_attn and cross_attn q, k, v, o and ffn.0, ffn.2"
        )
    if dtype is not None:
        for parameter in _adapter_parameters(expert):
            parameter.data = parameter.data.to(dtype)


def _adapter_parameters(expert: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for layer in adapted_layers(expert)
        for name in layer.adapter_layer_names
        for parameter in getattr(layer, name).parameters()
    ]


def _parts(model: Any) -> dict[str, list[nn.Parameter]]:
    proprio = model.proprio_encoder
    return {
        "lora": _adapter_parameters(model.video_expert),
        "action_expert": list(model.action_expert.parameters()),
        "proprio_encoder": [] if proprio is None else list(proprio.parameters()),
    }


def select_trainable(
    model: Any, parts: Sequence[str] = TRAINABLE_PARTS, *, root: nn.Module | None = None
) -> TrainableSet:
    """Let exactly ``parts`` train and freeze the rest; arguments as :func:`trainable_set`'s."""
    for parameter in (model if root is None else root).parameters():
        parameter.requires_grad_(False)
    for part, parameters in _parts(model).items():
        for parameter in parameters:
            parameter.requires_grad_(part in parts)
    return trainable_set(model, parts, root=root)


def trainable_set(
    model: Any, parts: Sequence[str] = TRAINABLE_PARTS, *, root: nn.Module | None = None
) -> TrainableSet:
    """Check that exactly ``parts`` train, and describe them.

    Args:
        model: a WAM or an adapted official object.
        parts: of :data:`TRAINABLE_PARTS`.
        root: what is looked through, when more than the model: the policy around it, with its
            autoencoder and text encoder.

    Raises:
        ValueError: an unknown part, or parameters that train and should not or the other way
            round, by name.
    """
    unknown = sorted(set(parts) - set(TRAINABLE_PARTS))
    if unknown:
        raise ValueError(f"unknown parts {unknown}; known are {', '.join(TRAINABLE_PARTS)}")
    members = _parts(model)
    if "lora" in parts and not members["lora"]:
        raise ValueError("the video expert has no adapters to train: call inject_lora first")
    part_of = {id(p): part for part in parts for p in members[part]}
    names: dict[str, list[str]] = {part: [] for part in parts}
    counts = dict.fromkeys(parts, 0)
    wrongly_trained, wrongly_frozen, frozen = [], [], 0
    for name, parameter in (model if root is None else root).named_parameters():
        part = part_of.get(id(parameter))
        if part is None:
            frozen += parameter.numel()
            if parameter.requires_grad:
                wrongly_trained.append(name)
            continue
        names[part].append(name)
        counts[part] += parameter.numel()
        if not parameter.requires_grad:
            wrongly_frozen.append(name)
    for wrong, verb in ((wrongly_trained, "train and must not"), (wrongly_frozen, "do not train")):
        if wrong:
            raise ValueError(
                f"exactly {', '.join(parts)} should train, but {len(wrong)} parameters {verb}, for "
                f"example {wrong[:3]}: call select_trainable first"
            )
    return TrainableSet(
        names={part: tuple(found) for part, found in names.items()}, counts=counts, frozen=frozen
    )


def frozen_features(model: Any) -> AbstractContextManager[None]:
    """Within the block the video expert computes with its pretrained weights, bit for bit.

    See :func:`~rlinf_wamrl.rl.adapters.adapters_disabled`. Its input is another matter: the
    context it is given ends in the proprio token, which comes from the trained proprio encoder.
    """
    return adapters_disabled(model.video_expert)


def live_and_frozen_features(model: Any, state: Any) -> tuple[Features, Features]:
    """Features of the same observations from the live and from the frozen video expert.

    Args:
        model: a WAM or an adapted official object.
        state: the batch of observations that ``model.prefill`` takes; in idm mode with a video.

    Returns:
        The live features, whose gradient reaches the adapters alone, and the frozen ones, without
        gradient.
    """
    with gradient_stopped_at(model.proprio_encoder), capture_video_features(model) as live:
        model.prefill(state, video_gradient=True)
    return live, pretrained_features(model, state)


@torch.no_grad()
def pretrained_features(model: Any, state: Any) -> Features:
    """Features of observations from the frozen video expert; arguments as above."""
    with frozen_features(model), capture_video_features(model) as frozen:
        model.prefill(state)
    return frozen


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights without adapters, under the names of a model that never had any.

    ``W + alpha / r * B A`` is computed in float32 and cast back. The model is left as it is.
    """
    state = dict(model.state_dict())
    # official objects register the same layers under several names
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, LoraLayer):
            continue
        own = [key for key in state if key.startswith(f"{name}.")]
        base = {key: state.pop(key) for key in own if ".base_layer." in key[len(name) :]}
        for key in own:
            state.pop(key, None)
        for key, value in base.items():
            state[key.replace(".base_layer.", ".")] = value
        weight = state[f"{name}.weight"]
        for adapter in layer.active_adapters:
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            delta = layer.scaling[adapter] * (b.detach().float() @ a.detach().float())
            weight = (weight.float() + delta).to(weight.dtype)
        state[f"{name}.weight"] = weight
    return state
