"""Official checkpoints in and out: FastWAM's ``.pt`` payload and the Wan2.2 base model.

A payload is ``torch.save`` of ``{"mot": ..., "proprio_encoder": ..., "step": ..., "torch_dtype":
"torch.bfloat16"}``; a legacy one has ``dit`` (the video expert alone) in place of ``mot``. Reading
is strict: what is missing, unexpected or of another shape is an error that lists it. Nothing but
tensors and plain values is ever unpickled.
"""

from __future__ import annotations

import math
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlinf_wamrl.files import atomic_path
from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.wam.config import WAMConfig, fastwam_5b
from rlinf_wamrl.wam.wam import WAM

__all__ = [
    "KNOWN_RELEASES",
    "LoadedWAM",
    "from_fastwam",
    "from_wan22",
    "initial_action_expert",
    "parameter_shapes",
    "save_fastwam",
    "wam_from_state",
]

VIDEO_PREFIX = "mot.mixtures.video."
ACTION_PREFIX = "mot.mixtures.action."

KNOWN_RELEASES: dict[str, dict[str, Any]] = {
    "libero_uncond_2cam224.pt": {
        "variant": "uncond",
        "action_train_shift": 5.0,
        "action_infer_shift": 5.0,
    },
    "libero_optional_idm_2cam224.pt": {
        "variant": "optional_idm",
        "action_train_shift": 1.0,
        "action_infer_shift": 1.0,
        "video_infer_shift": 1.0,
    },
}
"""Released file -> what its configuration must say; the wrong shift only lowers success, silently.

The optional-IDM results were published with shift 1 for the imagined video, too.
"""

_SECTIONS = {"mot", "dit", "proprio_encoder", "step", "torch_dtype", "optimizer"}
_FLOAT_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_LISTED = 8


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
    loaded_statistics = DatasetStatistics.load(_find_statistics(path, statistics))
    _check_widths(config, loaded_statistics)
    declared = _declared_dtype(path, payload)
    state = _flatten(path, payload)
    if "mot" not in payload:
        warnings.warn(
            f"{path} is a legacy checkpoint with the video expert alone: the action expert is "
            "initialised from it and must be trained",
            stacklevel=2,
        )
        state |= _missing_experts(state, config, generator, path)
    model = wam_from_state(config, state, path, device=device, dtype=dtype or declared)
    return LoadedWAM(model, loaded_statistics, payload.get("step"))


def from_wan22(
    folder: str | Path,
    config: WAMConfig,
    *,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> WAM:
    """Start a new model from the Wan2.2 base model.

    The video expert gets the base model's weights; the action expert gets them resized (see
    :func:`initial_action_expert`); what has no counterpart is drawn as a fresh linear layer.

    Args:
        folder: where ``diffusion_pytorch_model*.safetensors`` of ``Wan2.2-TI2V-5B`` lie (the
            official names, not those of the diffusers conversion).
        config: the model.
        generator: of the fresh layers.
        device: where the weights go.
        dtype: dtype of the weights.

    Raises:
        FileNotFoundError: no such files.
        ValueError: the files do not fit the configuration.
    """
    folder = Path(folder)
    shards = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no diffusion_pytorch_model*.safetensors in {folder}")
    state = {VIDEO_PREFIX + key: value for key, value in _read_shards(shards).items()}
    state |= _missing_experts(state, config, generator, folder)
    return wam_from_state(config, state, folder, device=device, dtype=dtype)


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
    _check_fit(parameter_shapes(model.config), state, "the model to save")
    payload: dict[str, Any] = {
        "mot": _strip(state, "mot."),
        "step": step,
        "torch_dtype": str(model.dtype),
    }
    if model.proprio_encoder is not None:
        payload["proprio_encoder"] = _strip(state, "proprio_encoder.")
    if statistics is not None:
        statistics.save(path.with_name(f"{path.stem}_dataset_stats.json"))
    with atomic_path(path) as temporary:
        torch.save(payload, temporary)


def wam_from_state(
    config: WAMConfig,
    state: Mapping[str, Tensor],
    source: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> WAM:
    """Build a model around given weights, without ever allocating it twice.

    Args:
        config: the model.
        state: all its weights, under its own names.
        source: where they come from, for error messages.
        device: where the weights go.
        dtype: dtype of the weights.

    Raises:
        ValueError: keys are missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        model = WAM(config)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    _check_fit(expected, state, str(source))
    weights = {key: state[key].to(device=device, dtype=dtype, copy=True) for key in expected}
    model.load_state_dict(weights, assign=True)
    return model.to(device)


def parameter_shapes(config: WAMConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a model, without allocating it."""
    with torch.device("meta"):
        model = WAM(config)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def initial_action_expert(
    video: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Derive an action expert from a video expert, as FastWAM does.

    Every weight but those of ``action_encoder`` and ``head`` is the video expert's weight of the
    same name, resized one dimension after the other by linear interpolation (end points aligned).
    A weight of two or more dimensions whose last dimension changed is scaled by
    ``sqrt(old / new)``, which keeps the variance of what it computes.

    Args:
        video: weights of the video expert, names relative to it.
        shapes: shapes of the action expert's weights, names relative to it.

    Returns:
        The derived weights in float32.

    Raises:
        ValueError: the video expert lacks one of them.
    """
    derived = {}
    for key, shape in shapes.items():
        if key.startswith(("action_encoder.", "head.")):
            continue
        if key not in video:
            raise ValueError(
                f"the video expert has no {key!r} to initialise the action expert from"
            )
        source = video[key]
        if source.dim() != len(shape):
            raise ValueError(
                f"{key} has shape {list(source.shape)} in the video expert and {list(shape)} in "
                "the action expert: another number of dimensions"
            )
        value = source.float()
        for dimension, size in enumerate(shape):
            value = _resize(value, dimension, size)
        if len(shape) >= 2 and source.shape[-1] != shape[-1]:
            value = value * math.sqrt(source.shape[-1] / shape[-1])
        derived[key] = value
    return derived


def _resize(value: Tensor, dimension: int, size: int) -> Tensor:
    if value.shape[dimension] == size:
        return value
    rows = value.movedim(dimension, -1)
    flat = rows.reshape(-1, 1, rows.shape[-1])
    resized = F.interpolate(flat, size=size, mode="linear", align_corners=True)
    return resized.reshape(*rows.shape[:-1], size).movedim(-1, dimension)


def _missing_experts(
    state: Mapping[str, Tensor],
    config: WAMConfig,
    generator: torch.Generator | None,
    source: Path,
) -> dict[str, Tensor]:
    """What a base model lacks: the action expert and the layers of actions and proprio."""
    if generator is None:
        raise ValueError(f"{source} has no action expert: starting one needs a generator")
    shapes = parameter_shapes(config)
    fresh = (
        VIDEO_PREFIX + "action_embedding.",
        ACTION_PREFIX + "action_encoder.",
        ACTION_PREFIX + "head.",
        "proprio_encoder.",
    )
    base = {k: v for k, v in shapes.items() if k.startswith(VIDEO_PREFIX)}
    given = {k: v for k, v in state.items() if k.startswith(VIDEO_PREFIX)}
    _check_fit({k: v for k, v in base.items() if not k.startswith(fresh)}, given, str(source))
    derived = initial_action_expert(_strip(state, VIDEO_PREFIX), _strip(shapes, ACTION_PREFIX))
    new = {ACTION_PREFIX + key: value for key, value in derived.items()}
    for key, shape in shapes.items():
        if key.startswith(fresh) and key not in state:
            inputs = shapes[key.rpartition(".")[0] + ".weight"][1]
            uniform = torch.rand(shape, generator=generator) * 2 - 1
            new[key] = uniform / math.sqrt(inputs)
    return new


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
        found = list(payload)[:_LISTED] if isinstance(payload, dict) else type(payload).__name__
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
    differences = [
        f"{name}={value!r} (not {getattr(config, name)!r})"
        for name, value in (known or {}).items()
        if getattr(config, name) != value
    ]
    if differences:
        warnings.warn(
            f"{path.name} was released with {', '.join(differences)}: as configured, expect a "
            "lower success rate",
            stacklevel=3,
        )
    return config


def _find_statistics(path: Path, statistics: str | Path | None) -> Path:
    if statistics is not None:
        return Path(statistics)
    candidates = [path.with_name(f"{path.stem}_dataset_stats.json")]
    candidates += [parent / "dataset_stats.json" for parent in list(path.absolute().parents)[:4]]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"no dataset statistics for {path}; looked for {', '.join(map(str, candidates))}. "
        "A checkpoint works only with the statistics it was trained with: name their file"
    )


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


def _read_shards(shards: Iterable[Path]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                state.update((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{shard} is no complete safetensors file: {error}") from error
    return state


def _strip(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _check_fit(
    expected: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], source: str
) -> None:
    problems = [
        (sorted(expected.keys() - state.keys()), "missing"),
        (sorted(state.keys() - expected.keys()), "unexpected"),
        (
            [
                f"{key} ({list(state[key].shape)} there, {list(shape)} in the model)"
                for key, shape in expected.items()
                if key in state and tuple(state[key].shape) != shape
            ],
            "of another shape",
        ),
    ]
    found = [
        f"{len(names)} {kind}: {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for names, kind in problems
        if names
    ]
    if found:
        raise ValueError(f"{source} does not fit the model; {'; '.join(found)}")
