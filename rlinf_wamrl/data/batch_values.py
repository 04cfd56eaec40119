"""Batches as nested Python values: move, split, merge, compare and pickle them.

A *batch value* is ``None``, a tensor or array whose leading dimension is the batch, a list with one
entry per row, a dict of batch values, or a scalar that holds for every row. Every message of the
embodied data interface is made of such values, so the rules below are stated once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "CompactPickle",
    "batch_values_equal",
    "merge_batch_values",
    "merge_episode_data",
    "move_to_cpu",
    "split_batch_value",
    "split_episode_data",
]

_SCALARS = (bool, int, float, str)

# Episode payload of the LeRobot mode: entries listed per low-level step, and entries per batch row.
_EPISODE_STEP_LISTS = ("obs_list", "infos_list")
_EPISODE_BATCH_VALUES = ("chunk_actions", "terminations", "truncations", "valid_action_mask")


def move_to_cpu(value: Any, *, detach: bool = False) -> Any:
    """Bring every tensor of a nested value to contiguous CPU memory.

    Dicts and lists are updated in place and returned, so the container that a caller hands over is
    the one that is kept. A tensor that already lies contiguously on the CPU stays the same object:
    two names of one tensor remain one tensor, which channels rely on to send it once.

    Args:
        value: Any nesting of dicts, lists and tuples; other leaves pass through.
        detach: Also cut tensors from the autograd graph.

    Returns:
        The same containers with moved tensors (tuples are rebuilt).
    """
    if isinstance(value, torch.Tensor):
        if detach and value.requires_grad:
            value = value.detach()
        return value.cpu().contiguous()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = move_to_cpu(item, detach=detach)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            value[index] = move_to_cpu(item, detach=detach)
    elif type(value) is tuple:
        return tuple(move_to_cpu(item, detach=detach) for item in value)
    return value


def split_batch_value(value: Any, split_sizes: Sequence[int], *, dim: int = 0) -> list[Any]:
    """Cut a batch value into consecutive shards.

    Args:
        value: A batch value with ``sum(split_sizes)`` rows.
        split_sizes: Rows of each shard; zero is allowed.
        dim: Batch dimension of the tensors and arrays. Lists are only understood along 0.

    Returns:
        One value per shard. Tensors are contiguous (views where the layout allows it), ``None`` and
        scalars are repeated.

    Raises:
        ValueError: A size is negative, or the rows do not add up.
        TypeError: The value (or a nested one) is of a kind that has no rows.
    """
    sizes = [int(size) for size in split_sizes]
    if any(size < 0 for size in sizes):
        raise ValueError(f"split sizes must not be negative, got {sizes}.")
    return _split(value, sizes, dim, "value")


def _split(value: Any, sizes: list[int], dim: int, path: str) -> list[Any]:
    if value is None or isinstance(value, _SCALARS):
        return [value] * len(sizes)
    if isinstance(value, torch.Tensor):
        _check_rows(value.shape[dim] if value.dim() > dim else None, sizes, path)
        return [piece.contiguous() for piece in value.split(sizes, dim=dim)]
    if isinstance(value, np.ndarray):
        _check_rows(value.shape[dim] if value.ndim > dim else None, sizes, path)
        bounds = np.cumsum(sizes)[:-1]
        return [np.ascontiguousarray(piece) for piece in np.split(value, bounds, axis=dim)]
    if isinstance(value, dict):
        shards: list[dict[Any, Any]] = [{} for _ in sizes]
        for key, item in value.items():
            for shard, piece in zip(
                shards, _split(item, sizes, dim, f"{path}[{key!r}]"), strict=True
            ):
                shard[key] = piece
        return shards
    if isinstance(value, list) and dim == 0:
        _check_rows(len(value), sizes, path)
        ends = np.cumsum(sizes, dtype=int)
        return [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    raise TypeError(f"cannot split {path}: {type(value).__name__} has no rows along {dim}.")


def _check_rows(rows: int | None, sizes: list[int], path: str) -> None:
    if rows != sum(sizes):
        raise ValueError(f"cannot split {path} with {rows} rows into {sizes} ({sum(sizes)} rows).")


def merge_batch_values(values: Sequence[Any], *, dim: int = 0) -> Any:
    """Join batch values in order; the inverse of :func:`split_batch_value`.

    The kind is taken from the first value. Nothing is padded or promoted.

    Args:
        values: Batch values of one kind.
        dim: Batch dimension of the tensors and arrays.

    Returns:
        The joined value. A single value is returned as it is.

    Raises:
        ValueError: No values; some but not all ``None``; dicts with different keys; tensors of
            different dtypes; scalars that differ ("conflicting scalar").
        TypeError: Values of different or unknown kinds.
    """
    return _merge(list(values), dim, "value")


def _merge(values: list[Any], dim: int, path: str) -> Any:
    if not values:
        raise ValueError(f"cannot merge {path}: there is nothing to merge.")
    missing = sum(value is None for value in values)
    if missing == len(values):
        return None
    if missing:
        raise ValueError(
            f"cannot merge {path}: {missing} of {len(values)} shards are None, the others are not."
        )
    first = values[0]
    kind = next(
        (k for k in (torch.Tensor, np.ndarray, dict, list, _SCALARS) if isinstance(first, k)), None
    )
    if kind is None:
        raise TypeError(f"cannot merge {path}: {type(first).__name__} has no rows.")
    other = next((value for value in values if not isinstance(value, kind)), None)
    if other is not None:
        raise TypeError(
            f"cannot merge {path}: {type(first).__name__} and {type(other).__name__} in one batch."
        )
    if kind is _SCALARS:
        if any(value != first for value in values):
            raise ValueError(f"cannot merge {path}: conflicting scalar values {values}.")
        return first
    if kind is dict:
        return _merge_dicts(values, dim, path)
    if len(values) == 1:
        return first
    if kind is list:
        return [row for value in values for row in value]
    dtypes = {str(value.dtype) for value in values}
    if len(dtypes) > 1:
        raise ValueError(f"cannot merge {path}: shards have different dtypes {sorted(dtypes)}.")
    return torch.cat(values, dim=dim) if kind is torch.Tensor else np.concatenate(values, axis=dim)


def _merge_dicts(values: list[dict[Any, Any]], dim: int, path: str) -> dict[Any, Any]:
    keys = set(values[0])
    for value in values[1:]:
        if set(value) != keys:
            differing = sorted(map(str, keys ^ set(value)))
            raise ValueError(f"cannot merge {path}: keys {differing} are in some shards only.")
    return {
        key: _merge([value[key] for value in values], dim, f"{path}[{key!r}]") for key in values[0]
    }


def split_episode_data(
    episode_data: dict[str, Any] | None, split_sizes: Sequence[int]
) -> list[dict[str, Any] | None]:
    """Split the payload of finished and running episodes by environment.

    ``obs_list`` and ``infos_list`` have one batch per low-level step: every shard keeps all steps
    and gets its rows of each. The other entries are ordinary batch values.

    Args:
        episode_data: ``None``, or a dict with ``chunk_actions`` [B, C, A], ``obs_list``,
            ``terminations``, ``truncations``, ``infos_list`` and optionally ``valid_action_mask``
            [B, C].
        split_sizes: Rows of each shard.

    Returns:
        One payload (or ``None``) per shard.
    """
    if episode_data is None:
        return [None] * len(split_sizes)
    shards: list[dict[str, Any]] = [{} for _ in split_sizes]
    for name in _EPISODE_BATCH_VALUES:
        for shard, piece in zip(
            shards, split_batch_value(episode_data.get(name), split_sizes), strict=True
        ):
            shard[name] = piece
    for name in _EPISODE_STEP_LISTS:
        steps = [split_batch_value(step, split_sizes) for step in episode_data[name]]
        for index, shard in enumerate(shards):
            shard[name] = [step[index] for step in steps]
    return shards


def merge_episode_data(episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join episode payloads of several environment shards; see :func:`split_episode_data`.

    Raises:
        ValueError: No payloads, or payloads that cover different numbers of low-level steps.
    """
    if not episodes:
        raise ValueError("cannot merge episode data: there is nothing to merge.")
    merged = {
        name: merge_batch_values([episode.get(name) for episode in episodes])
        for name in _EPISODE_BATCH_VALUES
    }
    for name in _EPISODE_STEP_LISTS:
        lengths = {len(episode[name]) for episode in episodes}
        if len(lengths) > 1:
            raise ValueError(
                f"cannot merge episode data: {name} has different lengths {sorted(lengths)}."
            )
        merged[name] = [
            merge_batch_values(list(step))
            for step in zip(*(episode[name] for episode in episodes), strict=True)
        ]
    return merged


def batch_values_equal(first: Any, second: Any) -> bool:
    """Whether two nested values hold the same data, bit for bit.

    Dataclass instances are compared field by field. Equal NaNs are equal; 0.0 and -0.0 are not.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(_bytes_of(first), _bytes_of(second))
        )
    if isinstance(first, np.ndarray):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.tobytes() == second.tobytes()
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            batch_values_equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(batch_values_equal, first, second))
    if hasattr(first, "__dataclass_fields__"):
        return all(
            batch_values_equal(getattr(first, name), getattr(second, name))
            for name in first.__dataclass_fields__
        )
    return bool(first == second)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class CompactPickle:
    """Pickles the tensors that an instance shows, not the storage they are views of.

    ``torch`` pickles a view together with the whole storage behind it. Shards of a batch are views,
    so sending n shards would send the batch n times. Only views are copied, and only on pickling.
    """

    def __getstate__(self) -> dict[str, Any]:
        copies: dict[int, torch.Tensor] = {}
        return {name: _own_storage(value, copies) for name, value in self.__dict__.items()}


def _own_storage(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
            return value
        # One copy per tensor object: aliases stay aliases on the other side.
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]
    if isinstance(value, dict):
        return {key: _own_storage(item, copies) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_storage(item, copies) for item in value]
    if type(value) is tuple:
        return tuple(_own_storage(item, copies) for item in value)
    return value
