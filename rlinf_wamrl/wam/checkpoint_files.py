"""What lies where in checkpoints, and what released ones must be run with; read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf_wamrl.wam.config import WAMConfig

__all__ = [
    "FOLDER_FILES",
    "FORMAT_VERSION",
    "KNOWN_RELEASES",
    "WAN22_WEIGHTS",
    "contradictions",
    "find_statistics",
    "read_folder_config",
]

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

WAN22_WEIGHTS = "diffusion_pytorch_model*.safetensors"
"""The files of the Wan2.2 base model with its official names."""

FORMAT_VERSION = 1
FOLDER_FILES = ("model.safetensors", "vae.safetensors", "dataset_stats.json", "config.json")
"""What a checkpoint folder holds (see :mod:`rlinf_wamrl.wam.pretrained`)."""

_PARENTS = 4


def contradictions(name: str, config: WAMConfig) -> list[str]:
    """Return in words where ``config`` differs from what a released file was made with.

    Args:
        name: file name; one that is not in :data:`KNOWN_RELEASES` contradicts nothing.
        config: the model as it is to be run.
    """
    return [
        f"{key}={value!r} (not {getattr(config, key)!r})"
        for key, value in KNOWN_RELEASES.get(name, {}).items()
        if getattr(config, key) != value
    ]


def find_statistics(checkpoint: Path, given: str | Path | None = None) -> Path:
    """Return the file with the statistics of a checkpoint's training data.

    Args:
        checkpoint: the ``.pt`` file. ``<name>_dataset_stats.json`` beside it is looked for first,
            then ``dataset_stats.json`` there and in up to three folders above.
        given: this file instead.

    Raises:
        FileNotFoundError: there is none.
    """
    if given is not None:
        if not Path(given).is_file():
            raise FileNotFoundError(f"no dataset statistics at {given}")
        return Path(given)
    candidates = [checkpoint.with_name(f"{checkpoint.stem}_dataset_stats.json")]
    folders = list(checkpoint.absolute().parents)[:_PARENTS]
    candidates += [folder / "dataset_stats.json" for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"no dataset statistics for {checkpoint}; looked for "
        f"{', '.join(map(str, candidates))}. A checkpoint works only with the statistics it was "
        "trained with: name their file"
    )


def read_folder_config(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a checkpoint folder.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: ``config.json`` is damaged, of another version or incomplete.
    """
    missing = [name for name in FOLDER_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} is no checkpoint folder: it lacks {', '.join(missing)}")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    version = config.get("format_version") if isinstance(config, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version!r}, this version reads {FORMAT_VERSION}"
        )
    lacking = {"model", "processor", "text_encoder", "vae", "training"} - config.keys()
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}")
    return config
