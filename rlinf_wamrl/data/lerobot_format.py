"""The LeRobot v3.0 dataset layout: names, features, tables and statistics.

Written from huggingface/lerobot's dataset modules (codebase version v3.0)::

    meta/info.json       sizes, path patterns and features
    meta/stats.json      statistics per feature
    meta/tasks.parquet   instruction (the pandas index) -> task_index
    meta/episodes/chunk-000/file-000.parquet   one row per episode
    data/chunk-000/file-000.parquet            one row per frame, pictures as PNG

A frame row is what was observed before an action. The observation after the last action has no row
there; it is kept in the episode's row, as are the ids that LeRobot has no place for.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from rlinf_wamrl.data.recorded_episode import Episode

__all__ = [
    "CHUNKS_SIZE",
    "CODEBASE_VERSION",
    "FINAL_IMAGES",
    "FINAL_STATE",
    "IMAGE_COLUMNS",
    "aggregate_statistics",
    "data_path",
    "decode_images",
    "episode_row",
    "episode_statistics",
    "episodes_path",
    "features_of",
    "frame_columns",
    "frame_table",
    "info_of",
    "tasks_table",
]

CODEBASE_VERSION = "v3.0"
CHUNKS_SIZE = 1000
"""Files of a chunk folder."""
DATA_FILE_MIB = 100
VIDEO_FILE_MIB = 500
IMAGE_COLUMNS = {"observation.images.main": "main", "observation.images.wrist": "wrist"}
"""Feature -> field of :class:`Episode`."""
FINAL_IMAGES = {f"final/{name}": field for name, field in IMAGE_COLUMNS.items()}
"""Column of an episode's row -> field of :class:`Episode` whose last picture it holds."""
FINAL_STATE = "final/observation.state"
"""Column of an episode's row with the last proprioception."""

_PATTERN = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_DATA_PATTERN = f"data/{_PATTERN}"
_EPISODES_PATTERN = f"meta/episodes/{_PATTERN}"
_STATE_NAMES = ["x", "y", "z", "axis_x", "axis_y", "axis_z", "finger_left", "finger_right"]
_ACTION_NAMES = ["x", "y", "z", "axis_x", "axis_y", "axis_z", "gripper"]
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_SCALARS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
_STATISTICS = ("min", "max", "mean", "std")


def data_path(file: int) -> str:
    """Path of the ``file``-th data file in a dataset's folder."""
    return _numbered(_DATA_PATTERN, file)


def episodes_path(file: int) -> str:
    """Path of the ``file``-th file of episode rows in a dataset's folder."""
    return _numbered(_EPISODES_PATTERN, file)


def _numbered(pattern: str, file: int) -> str:
    chunk, index = divmod(file, CHUNKS_SIZE)
    return pattern.format(chunk_index=chunk, file_index=index)


def features_of(episode: Episode) -> dict[str, dict[str, Any]]:
    """Features of a dataset of episodes like this one, as ``info.json`` has them."""
    height, width = episode.main.shape[1:3]
    image = {"shape": [height, width, 3], "names": ["height", "width", "channels"]}

    def vector(names: Sequence[str], value: np.ndarray) -> dict[str, Any]:
        size = value.shape[1]
        fitting = list(names) if size == len(names) else None
        return {"dtype": "float32", "shape": [size], "names": fitting}

    return {
        **{name: {"dtype": "image", **image} for name in IMAGE_COLUMNS},
        "observation.state": vector(_STATE_NAMES, episode.proprio),
        "action": vector(_ACTION_NAMES, episode.actions),
        "executed_action": vector(_ACTION_NAMES, episode.executed_actions),
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        **{name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _SCALARS.items()},
    }


def info_of(
    features: Mapping[str, Any], *, fps: int, episodes: int, frames: int, tasks: int
) -> dict[str, Any]:
    """Content of ``meta/info.json``."""
    return {
        "codebase_version": CODEBASE_VERSION,
        "robot_type": "panda",
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": CHUNKS_SIZE,
        "data_files_size_in_mb": DATA_FILE_MIB,
        "video_files_size_in_mb": VIDEO_FILE_MIB,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": _DATA_PATTERN,
        "video_path": None,
        "features": dict(features),
    }


def frame_columns(
    episode: Episode, *, episode_index: int, task_index: int, first: int, fps: int
) -> dict[str, np.ndarray]:
    """Per-frame values of the features; pictures uint8 [T, H, W, 3].

    Success and end are those after the frame's action, so true in the last row at most.

    Args:
        episode: the episode, of T steps.
        episode_index: its place in the dataset.
        task_index: of its instruction.
        first: frames in the dataset before it.
        fps: frames per second.
    """
    steps = len(episode.actions)
    frame = np.arange(steps, dtype=np.int64)
    last = frame == steps - 1
    return {
        **{name: getattr(episode, field)[:steps] for name, field in IMAGE_COLUMNS.items()},
        "observation.state": episode.proprio[:steps],
        "action": episode.actions,
        "executed_action": episode.executed_actions,
        "next.success": last & episode.success,
        "next.done": last,
        "timestamp": (frame / fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.full(steps, episode_index, dtype=np.int64),
        "index": first + frame,
        "task_index": np.full(steps, task_index, dtype=np.int64),
    }


def frame_table(columns: Mapping[str, np.ndarray]) -> pa.Table:
    """Rows of the data file, typed as Hugging Face ``datasets`` expects."""
    arrays, described = {}, {}
    for name, values in columns.items():
        if name in IMAGE_COLUMNS:
            arrays[name] = _encode_images(values)
            described[name] = {"_type": "Image"}
            continue
        scalar = {"dtype": str(values.dtype), "_type": "Value"}
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        if values.ndim == 1:
            arrays[name], described[name] = flat, scalar
        else:
            width = values.shape[1]
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, width)
            described[name] = {"feature": scalar, "length": width, "_type": "Sequence"}
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    return pa.table(arrays).replace_schema_metadata(metadata)


def episode_row(
    episode: Episode,
    statistics: Mapping[str, Mapping[str, np.ndarray]],
    *,
    episode_index: int,
    first: int,
    file: int,
) -> dict[str, Any]:
    """The episode's row of ``meta/episodes``.

    Args:
        episode: the episode.
        statistics: of its frames, see :func:`episode_statistics`.
        episode_index: its place in the dataset.
        first: frames in the dataset before it.
        file: number of the files that hold its row and its frames.
    """
    chunk, index = divmod(file, CHUNKS_SIZE)
    steps = len(episode.actions)
    return {
        "episode_index": episode_index,
        "tasks": [episode.instruction],
        "length": steps,
        "data/chunk_index": chunk,
        "data/file_index": index,
        "dataset_from_index": first,
        "dataset_to_index": first + steps,
        "meta/episodes/chunk_index": chunk,
        "meta/episodes/file_index": index,
        "success": episode.success,
        "task_id": episode.task_id,
        "init_state_id": episode.init_state_id,
        "number": episode.number,
        "seed": episode.seed,
        **{
            name: {"bytes": _png(getattr(episode, field)[-1]), "path": None}
            for name, field in FINAL_IMAGES.items()
        },
        FINAL_STATE: episode.proprio[-1].tolist(),
        **{
            f"stats/{feature}/{name}": value.tolist()
            for feature, values in statistics.items()
            for name, value in values.items()
        },
    }


def tasks_table(instructions: Sequence[str]) -> pa.Table:
    """Content of ``meta/tasks.parquet``: instructions as the index of a pandas frame."""

    def column(name: str, pandas: str, numpy: str) -> dict[str, Any]:
        described = {"name": name, "field_name": name, "metadata": None}
        return {**described, "pandas_type": pandas, "numpy_type": numpy}

    described = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    indices = pa.array(range(len(instructions)), pa.int64())
    table = pa.table({"task_index": indices, "task": pa.array(list(instructions), pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(described)})


def episode_statistics(columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Minimum, maximum, mean, population deviation and count of each feature.

    Pictures: per channel over all pixels in [0, 1], [3, 1, 1]; other features per dimension.
    """
    result = {}
    for name, values in columns.items():
        if name in IMAGE_COLUMNS:
            described = _describe_pixels(values)
        else:
            rows = values.reshape(len(values), -1).astype(np.float64)
            described = {kind: getattr(rows, kind)(axis=0) for kind in _STATISTICS}
        result[name] = {**described, "count": np.array([len(values)])}
    return result


def _describe_pixels(images: np.ndarray) -> dict[str, np.ndarray]:
    # by histogram: exact, and no copy of the pictures in floating point
    level = np.arange(256) / 255.0
    per_channel = []
    for channel in range(3):
        share = np.bincount(images[..., channel].reshape(-1), minlength=256)
        present = level[share > 0]
        mean = (share * level).sum() / share.sum()
        variance = (share * (level - mean) ** 2).sum() / share.sum()
        per_channel.append((present[0], present[-1], mean, np.sqrt(variance)))
    values = zip(_STATISTICS, zip(*per_channel, strict=True), strict=True)
    return {name: np.array(column).reshape(3, 1, 1) for name, column in values}


def aggregate_statistics(
    parts: Sequence[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, list]]:
    """Join statistics of several episodes into those of all their frames.

    Args:
        parts: per episode, as :func:`episode_statistics` gives them; lists serve too.
    """
    joined = {}
    for feature in parts[0]:
        column = {
            name: np.stack([np.asarray(part[feature][name], np.float64) for part in parts])
            for name in _STATISTICS
        }
        counts = np.array([int(part[feature]["count"][0]) for part in parts])
        weight = (counts / counts.sum()).reshape(-1, *[1] * (column["mean"].ndim - 1))
        mean = (weight * column["mean"]).sum(axis=0)
        variance = (weight * (column["std"] ** 2 + (column["mean"] - mean) ** 2)).sum(axis=0)
        joined[feature] = {
            "min": column["min"].min(axis=0).tolist(),
            "max": column["max"].max(axis=0).tolist(),
            "mean": mean.tolist(),
            "std": np.sqrt(variance).tolist(),
            "count": [int(counts.sum())],
        }
    return joined


def decode_images(cells: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Pictures uint8 [n, H, W, 3] of an image column's cells."""
    return np.stack([np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in cells])


def _encode_images(images: np.ndarray) -> pa.Array:
    return pa.array([{"bytes": _png(image), "path": None} for image in images], _IMAGE_TYPE)


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
