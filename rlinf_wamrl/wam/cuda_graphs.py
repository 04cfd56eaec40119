"""Denoising steps of the actions replayed as CUDA graphs, without launching kernels one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rlinf.utils.cuda_graph import CUDAGraphManager, GraphCaptureSpec
from torch import Tensor

__all__ = ["ReplayedActions"]


class ReplayedActions:
    """A model as the samplers see it, after its prefill: velocities come from CUDA graphs.

    There is one graph per batch size, captured when that size first comes by. Weights are read
    where they lie, so new ones may be copied into them, but they must not move. Without gradient.
    """

    def __init__(self, model: Any, batch_sizes: Iterable[int], manager: CUDAGraphManager) -> None:
        """Wrap a model; other batch sizes than the given ones run as they always do.

        Args:
            model: a WAM or an adapted official object, on a CUDA device.
            batch_sizes: which batches recur.
            manager: owns the graphs and their memory.
        """
        self._model = model
        self._sizes = frozenset(batch_sizes)
        self._graphs = manager
        self._cache_in: dict[int, Any] = {}  # the cache whose copy a graph holds, by batch size

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: Any) -> Tensor:
        """As the model's own; the result is valid until the next call of the same batch size."""
        size = len(actions)
        if size not in self._sizes:
            return self._model.action_velocity(actions, timestep, cache)
        name, inputs = f"action_velocity_{size}", {"actions": actions, "timestep": timestep}
        if name not in self._graphs:
            self._capture(name, inputs | {"cache": vars(cache)}, type(cache))
        if self._cache_in.get(size) is not cache:  # the same one in all K steps of a chunk
            inputs["cache"] = vars(cache)
            self._cache_in[size] = cache
        return self._graphs.replay(name, inputs)["velocity"]

    def _capture(self, name: str, inputs: dict[str, Any], kind: type) -> None:
        def velocity(given: dict[str, Any]) -> dict[str, Tensor]:
            cache = kind(**given["cache"])
            result = self._model.action_velocity(given["actions"], given["timestep"], cache)
            return {"velocity": result}

        self._graphs.capture(
            GraphCaptureSpec(
                name=name,
                func=velocity,
                inputs={key: _copied(value) for key, value in inputs.items()},
                external_inputs=set(inputs),
            )
        )


def _copied(tree: Any) -> Any:
    """Copy tensors in dicts and tuples: a graph reads its inputs where they were at its capture."""
    if isinstance(tree, Tensor):
        return tree.clone(memory_format=torch.contiguous_format)
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tuple(_copied(value) for value in tree)
