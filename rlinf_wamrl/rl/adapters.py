"""Switching low-rank adapters off for a while, to compute with the pretrained weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

__all__ = ["adapted_layers", "adapters_disabled"]


def adapted_layers(module: nn.Module) -> list[BaseTunerLayer]:
    """Return the layers below ``module`` that carry adapters."""
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Compute as if ``module`` had no adapters, bit for bit, within the block.

    A module that was never adapted and does not train is its own pretrained state. What may be
    trained stays as it is.

    Args:
        module: for example a model's video expert.

    Raises:
        ValueError: the pretrained state is gone: adapters are merged into the weights, or the
            weights themselves train.
    """
    layers = adapted_layers(module)
    if not layers and any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} trains without adapters, so its pretrained state is not at "
            "hand: give it adapters (inject_lora), or use the live model"
        )
    if any(layer.merged for layer in layers):
        raise ValueError(
            "the adapters are merged into the weights, so the pretrained state is not at hand: use "
            "a model with separate adapters, or the live model"
        )
    switched = [layer for layer in layers if not layer.disable_adapters]
    _switch(switched, enabled=False)
    try:
        yield
    finally:
        _switch(switched, enabled=True)


def _switch(layers: Sequence[BaseTunerLayer], *, enabled: bool) -> None:
    """Flip the flag that a layer reads in its forward pass, and nothing else.

    peft's own switch goes through all weights to change what trains, which has to be undone again:
    for a small model half of what the frozen features cost.
    """
    for layer in layers:
        layer._disable_adapters = not enabled
        if layer.disable_adapters is enabled:
            raise RuntimeError(
                "the installed peft keeps the switch of its adapters elsewhere: this version of "
                "rlinf-wamrl does not know it"
            )
