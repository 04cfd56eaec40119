"""Recorded episodes on disk as a LeRobot v3.0 dataset: writer and reader.

Each append adds one data file and one file of episode rows, both written whole or not at all; the
rows are what counts. After a crash the next writer removes data that no row speaks of, and writes
the summaries (``info.json``, ``stats.json``) again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlinf_wamrl.data.lerobot_format import (
    CHUNKS_SIZE,
    CODEBASE_VERSION,
    FINAL_IMAGES,
    FINAL_STATE,
    IMAGE_COLUMNS,
    aggregate_statistics,
    data_path,
    decode_images,
    episode_row,
    episode_statistics,
    episodes_path,
    features_of,
    frame_columns,
    frame_table,
    info_of,
    tasks_table,
)
from rlinf_wamrl.data.recorded_episode import Episode
from rlinf_wamrl.files import atomic_path, write_text_atomic
from rlinf_wamrl.normalisation import DatasetStatistics, compute_statistics

__all__ = ["STATISTICS_FILE", "LeRobotDataset", "LeRobotWriter"]

STATISTICS_FILE = "dataset_stats.json"
"""Statistics of labels and proprioception in FastWAM's format, in the dataset's folder."""

_INFO = "meta/info.json"
_STATS = "meta/stats.json"
_TASKS = "meta/tasks.parquet"


class LeRobotDataset:
    """Reads a dataset that :class:`LeRobotWriter` wrote.

    Attributes:
        rows: one dict per episode in order, without pictures: ``episode_index``, ``length``,
            ``tasks``, ``success``, ``task_id``, ``init_state_id``, ``number``, ``seed``, …
    """

    def __init__(self, folder: str | Path) -> None:
        """Read what is known of the episodes.

        Raises:
            FileNotFoundError: ``folder`` holds no dataset.
            ValueError: It holds one of another version.
        """
        self.folder = Path(folder)
        info_file = self.folder / _INFO
        if not info_file.is_file():
            raise FileNotFoundError(f"{self.folder} holds no LeRobot dataset: {_INFO} is missing")
        self.info = json.loads(info_file.read_text(encoding="utf-8"))
        version = self.info.get("codebase_version")
        if version != CODEBASE_VERSION:
            raise ValueError(
                f"{info_file} says codebase_version {version!r}; only {CODEBASE_VERSION} is read"
            )
        self.rows = _read_rows(self.folder)

    def __len__(self) -> int:
        return len(self.rows)

    def episodes(self, *, only_success: bool = False) -> Iterator[Episode]:
        """Yield the episodes in their order in the dataset."""
        wanted = (row for row in self.rows if row["success"] or not only_success)
        for file, rows in groupby(wanted, key=_file_of):
            names = ["episode_index", *FINAL_IMAGES, FINAL_STATE]
            final = pq.read_table(self.folder / episodes_path(file), columns=names).to_pylist()
            last = {row["episode_index"]: row for row in final}
            with pq.ParquetFile(self.folder / data_path(file)) as frames:
                for row in rows:
                    table = frames.read_row_group(row["row_group"])
                    yield _decode(table, row, last[row["episode_index"]])

    def statistics(self) -> DatasetStatistics:
        """Statistics of labels and proprioception of the successful episodes.

        Raises:
            ValueError: No episode succeeded.
        """
        return compute_statistics(self._vectors())

    def _vectors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        columns = ["action", "observation.state"]
        for row in self.rows:
            if row["success"]:
                with pq.ParquetFile(self.folder / data_path(_file_of(row))) as frames:
                    table = frames.read_row_group(row["row_group"], columns=columns)
                action, state = (torch.from_numpy(_matrix(table, name)) for name in columns)
                yield action, state


class LeRobotWriter:
    """Appends episodes to a dataset; opens or creates it.

    One writer at a time. Pictures of one dataset have one size.
    """

    def __init__(self, folder: str | Path, *, fps: int = 20) -> None:
        """Open the dataset and clear away what a crash left.

        Args:
            folder: the dataset's folder, created by the first append.
            fps: frames per second, one per control step.
        """
        self.folder = Path(folder)
        self._fps = fps
        self._rows = _read_rows(self.folder)
        self._parts = _read_statistics(self.folder)
        self._instructions = list(dict.fromkeys(row["tasks"][0] for row in self._rows))
        self._features: dict[str, Any] | None = None
        known = {self.folder / data_path(_file_of(row)) for row in self._rows}
        for file in (self.folder / "data").glob("*/*.parquet"):
            if file not in known:
                file.unlink()
        if self._rows:
            self._features = LeRobotDataset(self.folder).info["features"]
            self._write_tasks(self._instructions)
            self._write_summaries()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What is known of the episodes; see :attr:`LeRobotDataset.rows`."""
        return list(self._rows)

    def append(self, episodes: Sequence[Episode]) -> None:
        """Add episodes as one data file; nothing when there are none.

        Raises:
            ValueError: Pictures or vectors of another size than the dataset has.
        """
        if not episodes:
            return
        features = self._features or features_of(episodes[0])
        for episode in episodes:
            self._check(episode, features)
        file = _file_of(self._rows[-1]) + 1 if self._rows else 0
        new = [episode.instruction for episode in episodes]
        instructions = list(dict.fromkeys([*self._instructions, *new]))
        first = self._rows[-1]["dataset_to_index"] if self._rows else 0
        rows, tables, parts = [], [], []
        for position, episode in enumerate(episodes):
            index = len(self._rows) + position
            columns = frame_columns(
                episode,
                episode_index=index,
                task_index=instructions.index(episode.instruction),
                first=first,
                fps=self._fps,
            )
            parts.append(episode_statistics(columns))
            tables.append(frame_table(columns))
            row = episode_row(episode, parts[-1], episode_index=index, first=first, file=file)
            rows.append(row)
            first = row["dataset_to_index"]
        if instructions != self._instructions:
            self._write_tasks(instructions)
        if self._features is None:  # so that a crash after the first rows leaves a known layout
            self._write_info(features, [], instructions)
        _write_table(self.folder / data_path(file), tables)
        _write_table(self.folder / episodes_path(file), [pa.Table.from_pylist(rows)])
        self._features, self._instructions = features, instructions
        self._rows += _plain_rows(rows)
        self._parts += parts
        self._write_summaries()

    def write_statistics(self) -> DatasetStatistics:
        """Write ``dataset_stats.json`` and return its content.

        Raises:
            ValueError: No episode succeeded.
        """
        statistics = LeRobotDataset(self.folder).statistics()
        statistics.save(self.folder / STATISTICS_FILE)
        return statistics

    def _check(self, episode: Episode, features: Mapping[str, Any]) -> None:
        for name, feature in features_of(episode).items():
            if feature["shape"] != features[name]["shape"]:
                raise ValueError(
                    f"the dataset {self.folder} has {name} of shape {features[name]['shape']}, the "
                    f"new episode {feature['shape']}: record it into another folder"
                )

    def _write_tasks(self, instructions: Sequence[str]) -> None:
        _write_table(self.folder / _TASKS, [tasks_table(instructions)])

    def _write_summaries(self) -> None:
        self._write_info(self._features, self._rows, self._instructions)
        text = json.dumps(aggregate_statistics(self._parts), indent=4)
        write_text_atomic(self.folder / _STATS, text + "\n")

    def _write_info(
        self, features: Mapping[str, Any], rows: Sequence[Any], instructions: Sequence[str]
    ) -> None:
        info = info_of(
            features,
            fps=self._fps,
            episodes=len(rows),
            frames=rows[-1]["dataset_to_index"] if rows else 0,
            tasks=len(instructions),
        )
        write_text_atomic(self.folder / _INFO, json.dumps(info, indent=4) + "\n")


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in _row_files(folder):
        names = [
            name for name in pq.read_schema(path).names if not name.startswith(("stats/", "final/"))
        ]
        rows += _plain_rows(pq.read_table(path, columns=names).to_pylist())
    return rows


def _plain_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one file without pictures and statistics, with the row group of their frames."""
    return [
        {
            **{k: v for k, v in row.items() if not k.startswith(("stats/", "final/"))},
            "row_group": group,
        }
        for group, row in enumerate(rows)
    ]


def _read_statistics(folder: Path) -> list[dict[str, dict[str, Any]]]:
    parts = []
    for path in _row_files(folder):
        names = [name for name in pq.read_schema(path).names if name.startswith("stats/")]
        for row in pq.read_table(path, columns=names).to_pylist():
            part: dict[str, dict[str, Any]] = {}
            for name, value in row.items():
                _, feature, kind = name.split("/")
                part.setdefault(feature, {})[kind] = value
            parts.append(part)
    return parts


def _row_files(folder: Path) -> list[Path]:
    return sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet"))


def _file_of(row: Mapping[str, Any]) -> int:
    return row["data/chunk_index"] * CHUNKS_SIZE + row["data/file_index"]


def _write_table(path: Path, tables: Sequence[pa.Table]) -> None:
    """Write a parquet file, one row group per table."""
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def _decode(table: pa.Table, row: Mapping[str, Any], final: Mapping[str, Any]) -> Episode:
    pictures = {
        field: np.concatenate(
            [
                decode_images(table.column(name).to_pylist()),
                decode_images([final[f"final/{name}"]]),
            ]
        )
        for name, field in IMAGE_COLUMNS.items()
    }
    last = np.asarray(final[FINAL_STATE], dtype=np.float32)[None]
    return Episode(
        **pictures,
        proprio=np.concatenate([_matrix(table, "observation.state"), last]),
        actions=_matrix(table, "action"),
        executed_actions=_matrix(table, "executed_action"),
        instruction=row["tasks"][0],
        **{name: row[name] for name in ("task_id", "init_state_id", "success", "number", "seed")},
    )


def _matrix(table: pa.Table, name: str) -> np.ndarray:
    """A fixed-size-list column as [rows, width]."""
    column = table.column(name).combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1).copy()
