"""Which checkpoint a configuration names, and what the model in it is run as.

One answer for both sides: the checks ask before any process starts, the policy builder asks in
each worker. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.wam.checkpoint_files import (
    FOLDER_FILES,
    KNOWN_RELEASES,
    WAN22_WEIGHTS,
    contradictions,
    find_statistics,
    read_folder_config,
)
from rlinf_wamrl.wam.config import WAMConfig, fastwam_5b

__all__ = [
    "PATH_KEYS",
    "Checkpoint",
    "checkpoint_path",
    "resolve_checkpoint",
    "shipped_checkpoints",
]

_ROOT = Path(__file__).parent.parent / "pretrained"

PATH_KEYS = (
    "model_path",
    "dataset_stats_path",
    "vae_path",
    "text_encoder_path",
    "tokenizer_path",
    "text_embedding_cache_dir",
)
"""Keys of ``actor.model`` that name files or folders."""

_DIFFUSERS = "huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers"
_WHERE_FROM = {
    "vae_path": "Wan2.2_VAE.pth of huggingface.co/Wan-AI/Wan2.2-TI2V-5B, or the folder vae of "
    f"{_DIFFUSERS}",
    "text_encoder_path": f"the folder text_encoder of {_DIFFUSERS}, with tokenizer beside it",
    "text_embedding_cache_dir": "any folder: each instruction is encoded once and kept there",
}
"""What a model on Wan2.2 needs beside its weights, and where to get it."""

_FASTWAM_ONLY = ("dataset_stats_path", *_WHERE_FROM, "tokenizer_path", "video_size")
_NEW_MODEL_ONLY = ("video_dit_config", "action_dit_config")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found, and the model as the configuration wants it run."""

    kind: Literal["folder", "fastwam", "wan22"]  # ours, an official .pt file, the base model
    path: Path
    config: WAMConfig
    statistics: Path | None  # of the training data; None: inside the folder
    warnings: tuple[str, ...]  # what will work, but not as released


def shipped_checkpoints() -> list[str]:
    """Return the names of the checkpoints that ship with the package."""
    if not _ROOT.is_dir():
        return []
    return sorted(entry.name for entry in _ROOT.iterdir() if (entry / "config.json").is_file())


def checkpoint_path(name: str) -> Path:
    """Return where a checkpoint is, given the name of one that ships or a path."""
    return _ROOT / name if name in shipped_checkpoints() else Path(name)


def resolve_checkpoint(model: Mapping[str, Any]) -> Checkpoint:
    """Find the checkpoint of a configuration and the model it describes.

    ``model_path`` may be the name of a shipped checkpoint, a checkpoint folder, an official
    FastWAM ``.pt`` file, or a folder with the weights of the Wan2.2 base model.

    Args:
        model: RLinf's section ``actor.model``.

    Raises:
        ConfigError: it is none of these, something it needs is missing, or keys contradict each
            other; the message names the key.
    """
    name = str(model["model_path"])
    path = checkpoint_path(name)
    if path.is_file():
        return _fastwam(path, model)
    if all((path / file).is_file() for file in FOLDER_FILES):
        return _folder(path, model)
    if path.is_dir() and any(path.glob(WAN22_WEIGHTS)):
        return _wan22(path, model)
    what = "a folder without a model" if path.is_dir() else "neither a folder nor a checkpoint"
    raise ConfigError(
        f"actor.model.model_path = {name!r} is {what}; give the name of one that ships with the "
        f"package ({', '.join(shipped_checkpoints()) or 'none'}), a folder with "
        f"{', '.join(FOLDER_FILES)}, an official FastWAM file ({', '.join(KNOWN_RELEASES)}, from "
        f"huggingface.co/yuanty/fastwam), or a folder with {WAN22_WEIGHTS} of Wan2.2-TI2V-5B"
    )


def _folder(path: Path, model: Mapping[str, Any]) -> Checkpoint:
    for key in (*_FASTWAM_ONLY, *_NEW_MODEL_ONLY):
        if model[key]:
            raise ConfigError(
                f"actor.model.{key} belongs to an official FastWAM file or the Wan2.2 base model; "
                f"the checkpoint folder {path} brings its own: leave it out"
            )
    try:
        stored = WAMConfig.from_dict(read_folder_config(path)["model"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor.model.model_path: {error}") from error
    for key in ("variant", "action_horizon", "num_video_frames"):
        if model[key] is not None and model[key] != getattr(stored, key):
            raise ConfigError(
                f"actor.model.{key} = {model[key]!r}, but the checkpoint {path} has "
                f"{getattr(stored, key)!r}: leave it out"
            )
    config = _build(lambda: dataclasses.replace(stored, **_inference_changes(model)))
    shift = config.action_infer_shift
    warned = ()
    if shift != stored.action_infer_shift:
        warned = (
            f"RL.sigma_shift = {shift}, but {path.name} was trained for "
            f"{stored.action_infer_shift}: expect a lower success rate",
        )
    return Checkpoint(kind="folder", path=path, config=config, statistics=None, warnings=warned)


def _fastwam(path: Path, model: Mapping[str, Any]) -> Checkpoint:
    if not zipfile.is_zipfile(path):
        raise ConfigError(
            f"actor.model.model_path = {str(path)!r} is no complete FastWAM checkpoint: the "
            "download was cut short, or it is something else"
        )
    known = KNOWN_RELEASES.get(path.name)
    needed = {"actor.model.variant": model["variant"], "RL.sigma_shift": model["sampling"]["shift"]}
    unset = [key for key, value in needed.items() if value is None]
    if known is None and unset:
        raise ConfigError(
            f"actor.model.model_path: {path.name} is no release that is known here "
            f"({', '.join(KNOWN_RELEASES)}), so {' and '.join(unset)} must be set as it was trained"
        )
    values = dict(known or {"action_train_shift": model["sampling"]["shift"]})
    config = _new_model(model, values)
    differences = contradictions(path.name, config)
    warned = ()
    if differences:
        warned = (
            f"{path.name} was released with {', '.join(differences)}: as configured "
            "(actor.model.variant, RL.sigma_shift), expect a lower success rate",
        )
    _check_parts(path, model)
    try:
        statistics = find_statistics(path, model["dataset_stats_path"])
    except FileNotFoundError as error:
        raise ConfigError(f"actor.model.dataset_stats_path: {error}") from error
    return Checkpoint(
        kind="fastwam", path=path, config=config, statistics=statistics, warnings=warned
    )


def _wan22(path: Path, model: Mapping[str, Any]) -> Checkpoint:
    statistics = model["dataset_stats_path"]
    if statistics is None or not Path(statistics).is_file():
        raise ConfigError(
            f"actor.model.dataset_stats_path = {statistics!r} must name the statistics of your "
            f"data (dataset_stats.json): {path} is a base model and has none"
        )
    _check_parts(path, model)
    return Checkpoint(
        kind="wan22",
        path=path,
        config=_new_model(model, {}),
        statistics=Path(statistics),
        warnings=(
            f"{path.name} is a base model: its action expert starts from resized video weights "
            "and has to be trained on demonstrations before RL can improve it",
        ),
    )


def _new_model(model: Mapping[str, Any], values: dict[str, Any]) -> WAMConfig:
    """The released architecture with what the configuration says otherwise."""

    def build() -> WAMConfig:
        defaults = fastwam_5b()
        sizes = {
            key: dataclasses.asdict(getattr(defaults, key)) | dict(model[key])
            for key in _NEW_MODEL_ONLY
        }
        sizes["action_dit_config"]["action_dim"] = model["action_dim"]
        chosen = {
            key: model[key]
            for key in ("variant", "action_horizon", "num_video_frames")
            if model[key] is not None
        }
        return WAMConfig.from_dict(
            {"proprio_dim": defaults.proprio_dim}
            | values
            | chosen
            | sizes
            | _inference_changes(model)
        )

    return _build(build)


def _inference_changes(model: Mapping[str, Any]) -> dict[str, Any]:
    changes = {}
    if model["action_infer_mode"] is not None:
        changes["action_infer_mode"] = model["action_infer_mode"]
    shift = model["sampling"]["shift"]
    if shift is not None:
        changes |= {"action_infer_shift": shift, "video_infer_shift": shift}
    return changes


def _build(build) -> WAMConfig:
    try:
        return build()
    except ValueError as error:
        raise ConfigError(f"actor.model: {error}") from error


def _check_parts(path: Path, model: Mapping[str, Any]) -> None:
    missing = [
        f"actor.model.{key} ({where})" for key, where in _WHERE_FROM.items() if not model[key]
    ]
    if missing:
        raise ConfigError(
            f"actor.model.model_path = {str(path)!r} holds the experts only; set also "
            f"{'; '.join(missing)}"
        )
    vae, encoder = Path(model["vae_path"]), Path(model["text_encoder_path"])
    if not vae.is_file() and not (vae / "config.json").is_file():
        raise ConfigError(
            f"actor.model.vae_path = {str(vae)!r} does not exist; give {_WHERE_FROM['vae_path']}"
        )
    if not (encoder / "config.json").is_file():
        raise ConfigError(
            f"actor.model.text_encoder_path = {str(encoder)!r} has no config.json; give "
            f"{_WHERE_FROM['text_encoder_path']}"
        )
    tokenizer = model["tokenizer_path"]
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise ConfigError(f"actor.model.tokenizer_path = {tokenizer!r} is not a folder")
