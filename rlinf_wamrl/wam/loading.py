"""Official checkpoints in and out: FastWAM's ``.pt`` payload.

A payload is ``torch.save`` of ``{"mot": ..., "proprio_encoder": ..., "step": ..., "torch_dtype":
"torch.bfloat16"}``; a legacy one has ``dit`` (the video expert alone) in place of ``mot``. Reading
is strict: what is missing, unexpected or of another shape is an error that lists it. Nothing but
tensors and plain values is ever unpickled.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.files import atomic_path
from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.wam.base_model import missing_parts
from rlinf_wamrl.wam.checkpoint_files import KNOWN_RELEASES, contradictions, find_statistics
from rlinf_wamrl.wam.config import WAMConfig, fastwam_5b
from rlinf_wamrl.wam.wam import WAM
from rlinf_wamrl.wam.weights import (
    VIDEO_PREFIX,
    check_fit,
    parameter_shapes,
    strip_prefix,
    wam_from_state,
)

__all__ = ["LoadedWAM", "from_fastwam", "save_fastwam"]

_SECTIONS = {"mot", "dit", "proprio_encoder", "step", "torch_dtype", "optimizer"}
_FLOAT_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class LoadedWAM:
    """What an official checkpoint holds."""

    model: WAM
    statistics: DatasetStatistics
    step: int | None  # optimiser step the checkpoint was taken at


def from_fastwam(
    path: str | Path,
    statistics: str | Path | None = None,
    *,
    config: WAMConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> LoadedWAM:
    """Load an official FastWAM checkpoint.

    The file is memory-mapped and each tensor is copied once, straight to ``device`` and ``dtype``.

    Args:
        path: the ``.pt`` file.
        statistics: its ``*_dataset_stats.json``; None looks for
            ``<name>_dataset_stats.json`` and ``dataset_stats.json`` beside it, then for the
            latter in up to three folders above.
        config: the model; None for a file of :data:`KNOWN_RELEASES`. A known file whose
            configuration says otherwise gives a warning.
        device: where the weights go.
        dtype: dtype of the weights; None takes the one the file names.
        generator: only for a legacy payload, which lacks the action expert: draws its new parts.

    Raises:
        FileNotFoundError: the checkpoint or its statistics are missing.
        ValueError: the file is truncated, holds code, or does not fit the configuration.
    """
    path = Path(path)
    payload = _read_payload(path)
    config = _reconcile(path, config)
    loaded_statistics = DatasetStatistics.load(find_statistics(path, statistics))
    _check_widths(config, loaded_statistics)
    declared = _declared_dtype(path, payload)
    state = _flatten(path, payload)
    if "mot" not in payload:
        warnings.warn(
            f"{path} is a legacy checkpoint with the video expert alone: the action expert is "
            "initialised from it and must be trained",
            stacklevel=2,
        )
        state |= missing_parts(state, config, generator, path)
    model = wam_from_state(config, state, path, device=device, dtype=dtype or declared)
    return LoadedWAM(model, loaded_statistics, payload.get("step"))


def save_fastwam(
    model: WAM,
    path: str | Path,
    *,
    step: int | None = None,
    statistics: DatasetStatistics | None = None,
) -> None:
    """Write the official format, atomically; loading it gives the same model bit for bit.

    Args:
        model: the model, without adapters (merge them first).
        path: the ``.pt`` file to write.
        step: optimiser step to note in it.
        statistics: also written, as ``<name>_dataset_stats.json`` beside the file.

    Raises:
        ValueError: the model has other keys than its configuration says.
    """
    path = Path(path)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    check_fit(parameter_shapes(model.config), state, "the model to save")
    payload: dict[str, Any] = {
        "mot": strip_prefix(state, "mot."),
        "step": step,
        "torch_dtype": str(model.dtype),
    }
    if model.proprio_encoder is not None:
        payload["proprio_encoder"] = strip_prefix(state, "proprio_encoder.")
    if statistics is not None:
        statistics.save(path.with_name(f"{path.stem}_dataset_stats.json"))
    with atomic_path(path) as temporary:
        torch.save(payload, temporary)


def _read_payload(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is no complete torch.save file: the download was cut short, or it is "
            "something else"
        )
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds Python objects besides tensors and plain values; it was refused, "
            "nothing in it was run"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(payload, dict) or not {"mot", "dit"} & payload.keys():
        found = list(payload)[:8] if isinstance(payload, dict) else type(payload).__name__
        raise ValueError(f"{path} is no FastWAM checkpoint: it has no 'mot' section but {found}")
    unknown = sorted(map(str, payload.keys() - _SECTIONS))
    if unknown:
        raise ValueError(
            f"{path} has sections that a FastWAM checkpoint does not have: {', '.join(unknown)}"
        )
    return payload


def _flatten(path: Path, payload: Mapping[str, Any]) -> dict[str, Tensor]:
    sections = {"mot": "mot.", "proprio_encoder": "proprio_encoder."}
    if "mot" not in payload:
        sections["dit"] = VIDEO_PREFIX
    state = {}
    for section, prefix in sections.items():
        for key, value in payload.get(section, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{path}: {section}.{key} is no tensor but {type(value).__name__}")
            state[prefix + key] = value
    return state


def _declared_dtype(path: Path, payload: Mapping[str, Any]) -> torch.dtype:
    name = payload.get("torch_dtype")
    if name not in _FLOAT_DTYPES:
        raise ValueError(
            f"{path} names the dtype {name!r}; one of {', '.join(_FLOAT_DTYPES)} is expected"
        )
    return _FLOAT_DTYPES[name]


def _reconcile(path: Path, config: WAMConfig | None) -> WAMConfig:
    known = KNOWN_RELEASES.get(path.name)
    if config is None:
        if known is None:
            raise ValueError(
                f"{path.name} is no released checkpoint that is known here "
                f"({', '.join(KNOWN_RELEASES)}): give its configuration, with its sigma shift"
            )
        return fastwam_5b(**known)
    differences = contradictions(path.name, config)
    if differences:
        warnings.warn(
            f"{path.name} was released with {', '.join(differences)}: as configured, expect a "
            "lower success rate",
            stacklevel=3,
        )
    return config


def _check_widths(config: WAMConfig, statistics: DatasetStatistics) -> None:
    for name, ours, theirs in (
        ("action", config.action_dit_config.action_dim, statistics.action.width),
        ("proprio", config.proprio_dim, statistics.proprio.width),
    ):
        if ours is not None and ours != theirs:
            raise ValueError(
                f"the model has {ours} {name} dimensions, the dataset statistics have {theirs}: "
                "they belong to different data"
            )
