"""Recording and pretraining at the smallest size, on the real demo suite."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.config.compose import compose_typed, shipped_config
from rlinf_wamrl.data.lerobot_dataset import STATISTICS_FILE, LeRobotDataset, LeRobotWriter
from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.pretrain import train
from rlinf_wamrl.pretrain.config import PretrainConfig
from rlinf_wamrl.pretrain.dataset import (
    Windows,
    load_successes,
    statistics_of,
    window_indices,
)
from rlinf_wamrl.pretrain.demos import record_demos
from rlinf_wamrl.pretrain.train import pretrain
from rlinf_wamrl.wam.pretrained import load_pretrained

TINY = [
    "demos.task_ids=[0]",
    "train.task_weights=null",
    "demos.episodes_per_task=3",
    "demos.num_processes=2",
    "demos.init_state_range=[0,3]",
    "train.steps=3",
    "evaluation.init_state_range=[80,82]",
    "model.video_dit_config.num_layers=1",
    "model.action_dit_config.num_layers=1",
]


def config(folder):
    overrides = [*TINY, f"demos_dir={folder}/demos", f"output_dir={folder}/model"]
    return compose_typed(shipped_config("pretrain/small"), overrides, PretrainConfig)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrain")
    cfg = config(folder)
    return folder, cfg, record_demos(cfg.demos, cfg.demos_dir)


def test_episodes_show_clean_labels_beside_noisy_executions(recorded):
    folder, _, (successes, total) = recorded
    assert total == 3 and successes >= 2
    episodes = list(LeRobotDataset(folder / "demos").episodes())
    assert [episode.number for episode in episodes] == [0, 1, 2]
    for episode in episodes:
        steps = len(episode.actions)
        assert episode.main.shape == episode.wrist.shape == (steps + 1, 64, 64, 3)
        assert episode.proprio.shape == (steps + 1, 8)
        assert np.abs(episode.actions).max() <= 1.0 and np.abs(episode.executed_actions).max() <= 1
        assert episode.instruction == "lift the red cube"
    assert any((e.actions != e.executed_actions).any() for e in episodes)


def test_recording_resumes_and_is_a_function_of_seed_task_and_number(recorded, tmp_path):
    folder, cfg, _ = recorded
    first = folder / "demos/data/chunk-000/file-000.parquet"
    before = first.stat().st_mtime_ns
    record_demos(cfg.demos, cfg.demos_dir)
    assert first.stat().st_mtime_ns == before
    one = OmegaConf.merge(cfg.demos, {"episodes_per_task": 1, "num_processes": 1})
    record_demos(one, tmp_path)
    two = OmegaConf.merge(one, {"episodes_per_task": 2})
    seen = []
    record_demos(two, tmp_path, lambda *counts: seen.append(counts))
    assert seen[0][:2] == (1, 2)
    again = LeRobotDataset(tmp_path).episodes()
    original = LeRobotDataset(folder / "demos").episodes()
    for ours, theirs in zip(again, original, strict=False):
        assert np.array_equal(ours.executed_actions, theirs.executed_actions)
        assert np.array_equal(ours.main, theirs.main)
    with pytest.raises(ValueError, match="another demos_dir"):
        record_demos(OmegaConf.merge(two, {"seed": 1}), tmp_path)


def test_the_dataset_carries_the_statistics_that_training_uses(recorded):
    folder, cfg, _ = recorded
    written = DatasetStatistics.load(folder / "demos" / STATISTICS_FILE)
    assert written == statistics_of(load_successes(cfg.demos_dir))


def test_the_order_of_recording_does_not_reach_training(recorded, tmp_path):
    folder, cfg, _ = recorded
    episodes = list(LeRobotDataset(folder / "demos").episodes())
    LeRobotWriter(tmp_path).append(episodes[::-1])
    numbers = [episode.number for episode in load_successes(tmp_path)]
    assert numbers == [episode.number for episode in load_successes(cfg.demos_dir)]


def test_a_pretrained_model_is_saved_whole_with_its_measured_success(recorded):
    folder, cfg, _ = recorded
    lines = []
    pretrain(cfg, lines.append)
    loaded = load_pretrained(folder / "model")
    assert loaded.model.config.action_horizon == 16
    assert loaded.training["held_out_success"]["first_frame"]["task_0"].endswith("/2")
    assert "demos_dir" not in loaded.training["recipe"]
    assert loaded.processor.statistics.num_episodes == len(load_successes(cfg.demos_dir))
    assert any("step 3/3" in line for line in lines)
    assert loaded.training["imagination"]["task_0"]["plus_8"].startswith("PSNR ")
    written = {file.name for file in (folder / "model_imagination").iterdir()}
    assert written == {"imagination.md", "imagination.json", "task_0_live.png"}


def test_a_checkpoint_is_trained_further_with_its_own_normalisation(recorded, tmp_path):
    folder, cfg, _ = recorded
    cfg = OmegaConf.merge(cfg, {"train": {"steps": 0}})
    pretrain(OmegaConf.merge(cfg, {"output_dir": f"{tmp_path}/first"}), lambda _: None)
    few = load_pretrained(tmp_path / "first")
    LeRobotWriter(tmp_path / "demos").append(load_successes(cfg.demos_dir)[:1])
    further = {
        "demos_dir": f"{tmp_path}/demos",
        "output_dir": f"{tmp_path}/second",
        "start_from": f"{tmp_path}/first",
        "train": {"seed": 9},
    }
    pretrain(OmegaConf.merge(cfg, further), lambda _: None)
    again = load_pretrained(tmp_path / "second")
    assert again.processor.statistics == few.processor.statistics
    for name, value in few.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert again.training["recipe"]["start_from"] == f"{tmp_path}/first"
    pretrain(OmegaConf.merge(cfg, further, {"train": {"steps": 2}}), lambda _: None)
    moved = load_pretrained(tmp_path / "second").model.state_dict()
    assert not torch.equal(
        moved["mot.mixtures.video.head.head.weight"],
        few.model.state_dict()["mot.mixtures.video.head.head.weight"],
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"start_from": "nowhere"}, FileNotFoundError, "start_from = 'nowhere'.*small"),
        ({"latent_channels": 48}, ValueError, "patch_embedding.*keep model and latent_channels"),
        ({"text_length": 16}, ValueError, "length = 32, but text_length makes it 16"),
        ({"latent_scale": "channel"}, ValueError, "'global', but latent_scale makes it 'channel'"),
    ],
)
def test_a_checkpoint_that_is_not_the_recipe_s_cannot_be_trained_further(
    recorded, tmp_path, change, error, message
):
    _, cfg, _ = recorded
    shipped = compose_typed(shipped_config("pretrain/small"), [], PretrainConfig)
    further = {"start_from": "small", "output_dir": f"{tmp_path}/model", "model": shipped.model}
    with pytest.raises(error, match=message):
        pretrain(OmegaConf.merge(cfg, further, change), lambda _: None)
    assert not (tmp_path / "model").exists()


def test_what_was_trained_survives_a_measurement_that_fails(recorded, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no renderer")

    _, cfg, _ = recorded
    monkeypatch.setattr(train, "evaluate_pretrained", fail)
    with pytest.raises(RuntimeError, match="no renderer"):
        pretrain(OmegaConf.merge(cfg, {"output_dir": f"{tmp_path}/model"}), lambda _: None)
    assert load_pretrained(tmp_path / "model").training["recipe"]["train"]["steps"] == 3


def test_windows_repeat_the_end_and_mark_it():
    frames, frame_pad, actions, action_pad = window_indices(steps=6, horizon=8, num_frames=3)
    assert frames[0].tolist() == [0, 4, 6] and frame_pad[0].tolist() == [False, False, True]
    assert frames[2].tolist() == [2, 6, 6] and frame_pad[2].tolist() == [False, False, True]
    assert actions[4].tolist() == [4, 5, 5, 5, 5, 5, 5, 5]
    assert action_pad[4].tolist() == [False, False, True, True, True, True, True, True]
    with pytest.raises(ValueError, match="cannot be spread"):
        window_indices(steps=6, horizon=7, num_frames=3)


def test_no_episodes_is_said_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="run 'rlinf demos' first"):
        load_successes(tmp_path)


def test_the_shipped_model_is_within_its_promised_range():
    from rlinf_wamrl.config.checkpoints import shipped_checkpoints

    assert "small" in shipped_checkpoints()
    root = train.__file__.rsplit("/", 2)[0]
    success = load_pretrained(f"{root}/pretrained/small").training["held_out_success"]
    assert set(success) == {"first_frame", "idm"}
    for mode, tasks in success.items():
        counts = [tuple(map(int, tasks[f"task_{task}"].split("/"))) for task in range(4)]
        assert all(episodes >= 120 for _, episodes in counts)
        *short, long = [solved / episodes for solved, episodes in counts]
        assert long < min(short), mode
        if mode == "first_frame":  # what training starts from
            assert all(0.25 <= rate <= 0.6 for rate in short) and long > 0


def windows_of(counts):
    """One-step windows of instructions named by letters, ``counts`` of each."""
    names = tuple("abc"[: len(counts)])
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    empty = torch.zeros(len(rows), 1)
    return Windows(
        latents=empty,
        actions=empty,
        action_is_pad=empty.bool(),
        image_is_pad=empty.bool(),
        proprio=empty,
        instruction=rows,
        instructions=names,
        context=torch.zeros(len(names), 1, 1),
        context_mask=torch.ones(len(names), 1, dtype=torch.bool),
    )


def test_task_weights_are_the_shares_of_what_is_drawn():
    windows = windows_of([10, 1, 50])
    weights = windows.weights({"a": 1, "b": 4, "c": 0})
    shares = torch.zeros(3, dtype=torch.float64).index_add_(0, windows.instruction, weights)
    torch.testing.assert_close(shares / shares.sum(), torch.tensor([0.2, 0.8, 0.0]).double())
    assert windows.weights(None).unique().tolist() == [1.0]
    with pytest.raises(ValueError, match=r"names \['a'\], but the data shows \['a', 'b', 'c'\]"):
        windows.weights({"a": 1})
    with pytest.raises(ValueError, match="must not be negative, nor all 0"):
        windows.weights({"a": 0, "b": 0, "c": 0})
