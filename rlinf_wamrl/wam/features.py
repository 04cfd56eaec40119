"""What the action expert reads of the video, captured by forward hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["capture_video_features"]


@contextmanager
def capture_video_features(model: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Records keys and values of every video layer that runs inside the block.

    Whatever runs is recorded, with its gradient: ``prefill``, ``training_loss`` (the tokens of the
    noisy video, for the idm variants followed by those of the conditioning video), ``imagine``. For
    the features of the frozen expert, run the same call again with its adapters disabled.

    On our experts the keys are those the action expert reads, after norm and rotation. An official
    expert rotates outside of any submodule: there they are taken before the rotation.

    Args:
        model: anything with ``video_expert.blocks``.

    Yields:
        A list that fills up with (keys, values) [B, S, I], one pair per layer, pass after pass.
    """
    recorded: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as handles:
        for block in model.video_expert.blocks:
            for module, hook in _hooks(block.self_attn, recorded):
                handles.callback(module.register_forward_hook(hook).remove)
        yield recorded


def _hooks(attention: nn.Module, recorded: list[tuple[Tensor, Tensor]]):
    tap = getattr(attention, "key_value", None)
    if tap is not None:
        return [(tap, lambda module, arguments, output: recorded.append(output))]
    keys: list[Tensor] = []  # of this layer, until its values are computed

    def take_value(module: nn.Module, arguments: Any, output: Tensor) -> None:
        recorded.append((keys.pop(), output))

    return [
        (attention.norm_k, lambda module, arguments, output: keys.append(output)),
        (attention.v, take_value),
    ]
