"""Statistics of actions and proprioception, and the linear normaliser they define.

The file format is FastWAM's ``*_dataset_stats.json``::

    {"action": {"default": {"global_min": [7 numbers], "global_max": ..., "global_mean": ...,
                            "global_std": ..., "global_q01": ..., "global_q99": ...}},
     "state":  {"default": {... 8 numbers each ...}},
     "num_episodes": 1693, "num_transition": 273465}

Official files also hold ``stepwise_*`` (one row per step of a window), which no released
configuration uses; they are ignored here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf_wamrl.files import write_text_atomic

__all__ = [
    "DatasetStatistics",
    "FieldStatistics",
    "LinearNormaliser",
    "NormalisationMode",
    "compute_statistics",
]

NormalisationMode = Literal["min/max", "z-score", "q01/q99"]
"""Which statistics map to what: min..max -> -1..1, mean/std -> 0/1, 1 %..99 % -> -1..1."""

CLAMP = 5.0
"""Normalised values are clamped to +-CLAMP on the way in; nothing is clamped on the way back."""
RANGE_TOLERANCE = 1e-4
"""A dimension whose range is smaller is constant: it is shifted to 0 and not scaled."""
STD_REGULARISER = 1e-8


@dataclass(frozen=True, kw_only=True)
class FieldStatistics:
    """Per-dimension statistics of one field, each a tuple of its width."""

    min: tuple[float, ...]
    max: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Population standard deviation."""
    q01: tuple[float, ...]
    q99: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in asdict(self).items():
            if len(values) != self.width:
                raise ValueError(
                    f"statistics disagree in width: {name} has {len(values)} values, "
                    f"min has {self.width}"
                )
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"statistic {name} has values that are not finite: {values}")
        for low, high in (("min", "max"), ("q01", "q99")):
            for index, (a, b) in enumerate(
                zip(getattr(self, low), getattr(self, high), strict=True)
            ):
                if a > b:
                    raise ValueError(f"{low} {a} is above {high} {b} in dimension {index}")
        if any(value < 0 for value in self.std):
            raise ValueError(f"std has negative values: {self.std}")

    @property
    def width(self) -> int:
        """Number of dimensions."""
        return len(self.min)


@dataclass(frozen=True, kw_only=True)
class DatasetStatistics:
    """What a policy must know of the data it was trained on to read and write real units."""

    action: FieldStatistics
    """Raw actions as stored in the data."""
    proprio: FieldStatistics
    """Raw proprioception ("state" in the file)."""
    num_episodes: int
    num_transitions: int

    @classmethod
    def load(cls, path: str | Path, key: str | None = None) -> DatasetStatistics:
        """Read a ``dataset_stats.json``.

        Args:
            path: the file.
            key: which entry of ``action`` and ``state`` to take; None takes the only one.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not JSON, or an entry is missing or impossible.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"no dataset statistics at {path}: a checkpoint works only with the statistics it "
                "was trained with (the *_dataset_stats.json released beside it)"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from error
        try:
            return cls(
                action=_read_field(content, "action", key),
                proprio=_read_field(content, "state", key),
                num_episodes=int(content.get("num_episodes", 0)),
                num_transitions=int(content.get("num_transition", 0)),
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"dataset statistics {path}: {error}") from error

    def save(self, path: str | Path, key: str = "default") -> None:
        """Write the official file format, atomically."""
        content: dict[str, Any] = {
            section: {key: {f"global_{name}": list(v) for name, v in asdict(field).items()}}
            for section, field in (("action", self.action), ("state", self.proprio))
        }
        content["num_episodes"] = self.num_episodes
        content["num_transition"] = self.num_transitions
        write_text_atomic(path, json.dumps(content, indent=2) + "\n")


class LinearNormaliser:
    """``x * scale + offset`` per dimension, and its inverse; numbers as FastWAM computes them."""

    def __init__(self, statistics: FieldStatistics, mode: NormalisationMode) -> None:
        """Build from ``statistics``; ``mode`` says which of them map to what.

        Raises:
            ValueError: the mode is unknown.
        """
        if mode == "z-score":
            std = torch.tensor(statistics.std) + STD_REGULARISER
            self.scale = 1.0 / std
            self.offset = -torch.tensor(statistics.mean) / std
            return
        if mode == "min/max":
            low, high = torch.tensor(statistics.min), torch.tensor(statistics.max)
        elif mode == "q01/q99":
            low, high = torch.tensor(statistics.q01), torch.tensor(statistics.q99)
        else:
            raise ValueError(
                f"unknown normalisation mode {mode!r}; known: 'min/max', 'z-score', 'q01/q99'"
            )
        constant = high - low < RANGE_TOLERANCE
        self.scale = torch.where(constant, 1.0, 2.0 / (high - low).clamp(min=RANGE_TOLERANCE))
        self.offset = torch.where(constant, -low, -1.0 - self.scale * low)

    @property
    def width(self) -> int:
        """Number of dimensions of a value."""
        return self.scale.shape[0]

    def normalise(self, values: Tensor) -> Tensor:
        """Map real units [..., width] to normalised float32, clamped to +-5."""
        self._check(values)
        scale, offset = self.scale.to(values.device), self.offset.to(values.device)
        return (values.float() * scale + offset).clamp(-CLAMP, CLAMP)

    def denormalise(self, values: Tensor) -> Tensor:
        """Map normalised values [..., width] back to real units in float32, without a clamp."""
        self._check(values)
        scale, offset = self.scale.to(values.device), self.offset.to(values.device)
        return (values.float() - offset) / scale

    def _check(self, values: Tensor) -> None:
        if values.shape[-1] != self.width:
            raise ValueError(
                f"the statistics have {self.width} dimensions, the values {values.shape[-1]}: "
                "they belong to different data"
            )


def compute_statistics(episodes: Iterable[tuple[Tensor, Tensor]]) -> DatasetStatistics:
    """Statistics of recorded episodes, over all their steps alike.

    Args:
        episodes: per episode (actions [T,A], proprio [T or T+1,P]) in real units.

    Raises:
        ValueError: no episodes, or values that are not finite.
    """
    actions, proprios = [], []
    for action, proprio in episodes:
        actions.append(action.double())
        proprios.append(proprio.double())
    if not actions:
        raise ValueError("statistics of no episodes: record some first")
    return DatasetStatistics(
        action=_describe(torch.cat(actions)),
        proprio=_describe(torch.cat(proprios)),
        num_episodes=len(actions),
        num_transitions=sum(len(action) for action in actions),
    )


def _describe(values: Tensor) -> FieldStatistics:
    # torch.quantile refuses more than 2^24 elements, hence column by column.
    low, high = zip(
        *((column.quantile(0.01).item(), column.quantile(0.99).item()) for column in values.T),
        strict=True,
    )
    return FieldStatistics(
        min=tuple(values.amin(0).tolist()),
        max=tuple(values.amax(0).tolist()),
        mean=tuple(values.mean(0).tolist()),
        std=tuple(values.std(0, correction=0).tolist()),
        q01=low,
        q99=high,
    )


def _read_field(content: Any, section: str, key: str | None) -> FieldStatistics:
    if not isinstance(content, dict) or not isinstance(content.get(section), dict):
        raise ValueError(f"the section {section!r} is missing")
    entries = content[section]
    if key is None and len(entries) != 1:
        raise ValueError(
            f"section {section!r} has {len(entries)} entries {list(entries)}: name one"
        )
    if key is None:
        (key,) = entries
    if key not in entries:
        raise ValueError(f"section {section!r} has no entry {key!r}, only {list(entries)}")
    values = {}
    for field in fields(FieldStatistics):
        name = f"global_{field.name}"
        if name not in entries[key]:
            raise ValueError(f"{section}.{key}.{name} is missing")
        if not isinstance(entries[key][name], list):
            raise ValueError(f"{section}.{key}.{name} is no list of numbers")
        values[field.name] = tuple(float(value) for value in entries[key][name])
    try:
        return FieldStatistics(**values)
    except ValueError as error:
        raise ValueError(f"{section}.{key}: {error}") from error
