"""Recorded episodes as a LeRobot v3.0 dataset: layout, round trip, appending, crashes."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rlinf_wamrl.data.lerobot_dataset import STATISTICS_FILE, LeRobotDataset, LeRobotWriter
from rlinf_wamrl.data.lerobot_format import data_path, episodes_path
from rlinf_wamrl.data.recorded_episode import Episode
from rlinf_wamrl.normalisation import DatasetStatistics, compute_statistics


def episode(number, steps=5, *, instruction="lift", success=True, size=8):
    rng = np.random.default_rng(number)
    return Episode(
        main=rng.integers(0, 256, (steps + 1, size, size, 3), dtype=np.uint8),
        wrist=rng.integers(0, 256, (steps + 1, size, size, 3), dtype=np.uint8),
        proprio=rng.normal(size=(steps + 1, 8)).astype(np.float32),
        actions=rng.normal(size=(steps, 7)).astype(np.float32),
        executed_actions=rng.normal(size=(steps, 7)).astype(np.float32),
        instruction=instruction,
        task_id=number % 2,
        init_state_id=number + 10,
        success=success,
        number=number,
        seed=3,
    )


def same(first, second):
    return all(
        np.array_equal(value, getattr(second, name)) and type(value) is type(getattr(second, name))
        for name, value in vars(first).items()
    )


EPISODES = [
    episode(0),
    episode(1, 3, instruction="push", success=False),
    episode(2, 7),
    episode(3, 1, instruction="push"),
]


@pytest.fixture
def folder(tmp_path):
    writer = LeRobotWriter(tmp_path)
    writer.append(EPISODES[:2])
    writer.append(EPISODES[2:])
    return tmp_path


def test_episodes_come_back_bit_for_bit(folder):
    dataset = LeRobotDataset(folder)
    assert len(dataset) == 4
    for written, read in zip(EPISODES, dataset.episodes(), strict=True):
        assert same(written, read)
    assert [e.number for e in dataset.episodes(only_success=True)] == [0, 2, 3]


def test_info_counts_and_names_the_features(folder):
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (4, 16, 2)
    assert info["splits"] == {"train": "0:4"}
    pattern = info["data_path"].format(chunk_index=0, file_index=1)
    assert pattern == "data/chunk-000/file-001.parquet" and (folder / pattern).is_file()
    assert info["features"]["observation.images.main"] == {
        "dtype": "image",
        "shape": [8, 8, 3],
        "names": ["height", "width", "channels"],
    }
    assert info["features"]["action"]["shape"] == [7]
    assert info["features"]["next.done"]["dtype"] == "bool"


def test_hugging_face_datasets_reads_the_frames(folder):
    datasets = pytest.importorskip("datasets")
    # what LeRobot makes of info.json before it loads the data files
    features = {}
    for name, feature in json.loads((folder / "meta/info.json").read_text())["features"].items():
        if feature["dtype"] == "image":
            features[name] = datasets.Image()
        elif feature["shape"] == [1]:
            features[name] = datasets.Value(feature["dtype"])
        else:
            value = datasets.Value(feature["dtype"])
            features[name] = datasets.Sequence(value, length=feature["shape"][0])
    files = sorted(map(str, folder.glob("data/*/*.parquet")))
    cache = str(folder / "cache")
    for given in (datasets.Features(features), None):
        frames = datasets.Dataset.from_parquet(files, features=given, cache_dir=cache)
        assert set(frames.features) == set(features)
        row = frames[9]  # after 5 + 3 frames: the second of episode 2
        assert np.array_equal(np.asarray(row["observation.images.wrist"]), EPISODES[2].wrist[1])
        assert np.allclose(row["executed_action"], EPISODES[2].executed_actions[1])
        assert (row["index"], row["episode_index"], row["frame_index"]) == (9, 2, 1)
        assert row["timestamp"] == pytest.approx(1 / 20) and row["task_index"] == 0
    assert frames["index"][:] == list(range(16))
    ends = [i for i, done in enumerate(frames["next.done"]) if done]
    assert ends == [4, 7, 14, 15]
    assert [i for i, ok in enumerate(frames["next.success"]) if ok] == [4, 14, 15]
    rows = sorted(map(str, folder.glob("meta/episodes/*/*.parquet")))
    episodes = datasets.Dataset.from_parquet(rows, cache_dir=cache)
    assert episodes["length"][:] == [5, 3, 7, 1]
    assert episodes["dataset_from_index"][:] == [0, 5, 8, 15]
    assert episodes["data/file_index"][:] == [0, 0, 1, 1]
    assert episodes["tasks"][1] == ["push"]


def test_pandas_reads_the_tasks_by_instruction(folder):
    pandas = pytest.importorskip("pandas")
    tasks = pandas.read_parquet(folder / "meta/tasks.parquet")
    assert list(tasks.index) == ["lift", "push"] and tasks.index.name == "task"
    assert int(tasks.loc["push"].task_index) == 1


def test_statistics_are_those_of_all_frames(folder):
    stats = json.loads((folder / "meta/stats.json").read_text())
    actions = np.concatenate([e.actions for e in EPISODES]).astype(np.float64)
    for name in ("min", "max", "mean", "std"):
        assert stats["action"][name] == pytest.approx(getattr(actions, name)(axis=0).tolist())
    pixels = np.concatenate([e.main[:-1] for e in EPISODES]) / 255.0
    mean = np.array(stats["observation.images.main"]["mean"])
    assert mean.shape == (3, 1, 1)
    assert mean[:, 0, 0] == pytest.approx(pixels.mean(axis=(0, 1, 2)))
    deviation = np.array(stats["observation.images.main"]["std"])
    assert deviation[:, 0, 0] == pytest.approx(pixels.std(axis=(0, 1, 2)))
    assert stats["next.done"]["mean"] == pytest.approx([4 / 16])
    assert stats["action"]["count"] == [16]


def test_fastwam_statistics_cover_labels_of_successes(folder):
    LeRobotWriter(folder).write_statistics()
    loaded = DatasetStatistics.load(folder / STATISTICS_FILE)
    expected = compute_statistics(
        (torch.from_numpy(e.actions), torch.from_numpy(e.proprio[:-1]))
        for e in EPISODES
        if e.success
    )
    assert loaded == expected and loaded.num_episodes == 3


def test_a_writer_goes_on_where_another_stopped(folder, tmp_path_factory):
    LeRobotWriter(folder).append([episode(4)])
    at_once = tmp_path_factory.mktemp("at_once")
    LeRobotWriter(at_once).append([*EPISODES, episode(4)])
    for one, other in zip(
        LeRobotDataset(folder).episodes(), LeRobotDataset(at_once).episodes(), strict=True
    ):
        assert same(one, other)
    stats = [json.loads((place / "meta/stats.json").read_text()) for place in (folder, at_once)]
    assert stats[0]["action"]["std"] == pytest.approx(stats[1]["action"]["std"])
    info = [json.loads((place / "meta/info.json").read_text()) for place in (folder, at_once)]
    assert info[0] == info[1]


@pytest.mark.parametrize("lost", ["rows", "summaries"])
def test_a_crash_while_appending_costs_that_append_at_most(folder, lost):
    before = {path: path.read_bytes() for path in folder.glob("meta/*.json")}
    LeRobotWriter(folder).append([episode(4)])
    if lost == "rows":
        (folder / episodes_path(2)).unlink()
    for path, content in before.items():
        path.write_bytes(content)
    writer = LeRobotWriter(folder)
    kept = 4 if lost == "rows" else 5
    assert len(writer.rows) == kept
    assert (folder / data_path(2)).exists() == (kept == 5)
    assert json.loads((folder / "meta/info.json").read_text())["total_episodes"] == kept
    writer.append([episode(5)])
    assert [e.number for e in LeRobotDataset(folder).episodes()][-1] == 5
    total = sum(pq.read_metadata(path).num_rows for path in folder.glob("data/*/*.parquet"))
    assert total == LeRobotDataset(folder).rows[-1]["dataset_to_index"]


def test_wrong_input_is_said_in_words(folder, tmp_path_factory):
    with pytest.raises(ValueError, match=r"shape \[8, 8, 3\].*another folder"):
        LeRobotWriter(folder).append([episode(4, size=16)])
    with pytest.raises(FileNotFoundError, match="holds no LeRobot dataset"):
        LeRobotDataset(tmp_path_factory.mktemp("empty"))
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(ValueError, match="v2.1"):
        LeRobotDataset(folder)
    with pytest.raises(ValueError, match="executed_actions of an episode of 5 steps"):
        Episode(**{**vars(episode(0)), "executed_actions": np.zeros((4, 7), np.float32)})
