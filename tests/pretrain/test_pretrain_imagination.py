"""What is measured of imagination: exact, copied and known errors come out as they are."""

import json
import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from imagining import Imagining
from PIL import Image

from rlinf_wamrl.instructions import pack_instructions, unpack_instructions
from rlinf_wamrl.policy_training import imagination_rewards
from rlinf_wamrl.pretrain.evaluate import Played
from rlinf_wamrl.pretrain.imagination import (
    MOTION_THRESHOLD,
    area_under_curve,
    measure_imagination,
    psnr,
)
from rlinf_wamrl.pretrain.imagine import save_imaginations
from rlinf_wamrl.rl.reward import RewardSettings

SETTINGS = RewardSettings(source="live", num_steps=2, max_batch=3)
FRAMES, SIDE = 2, 16


class Policy:
    """Imagines what it is told to, macro-step by macro-step."""

    dtype = torch.float32
    settings = SimpleNamespace(seed=0)
    instructions_of = staticmethod(lambda records: unpack_instructions(records["instruction"]))

    def __init__(self, future):
        self.wam, self.future = Imagining(num_latent_frames=2), future

    def shared_context(self, instructions):
        rows = torch.zeros(len(instructions), dtype=torch.int64)
        return torch.zeros(1, 2, 4), torch.ones(1, 2, dtype=torch.bool), rows

    def __call__(self, *, forward_type, records, **arguments):
        assert forward_type == "imagination_rewards"
        self.wam.future = self.future(records)
        return imagination_rewards(self, records, **arguments)


def played(episodes=4, chunks=3, *, success=None, seed=0, cut=()):
    """Macro-steps of random pictures; those in ``cut`` ended after their first frame."""
    generator = torch.Generator().manual_seed(seed)
    count = episodes * chunks

    def pixels(*shape):
        shape = (count, *shape, 3, SIDE, 2 * SIDE)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    executed = torch.ones(count, 8, dtype=torch.bool)
    executed[list(cut), 5:] = False
    return Played(
        success=torch.tensor(success or [True, False] * (episodes // 2)),
        episode=torch.arange(episodes).repeat(chunks),
        records={
            "image": pixels(),
            "executed_mask": executed,
            "instruction": pack_instructions(["lift the red cube"] * count),
            "proprio": torch.zeros(count, 8),
            "episode_id": torch.arange(episodes).repeat(chunks),
            "elapsed_steps": torch.arange(count),  # here simply the row
        },
        frames={
            "future_frames": pixels(FRAMES),
            "future_frames_mask": torch.ones(count, FRAMES, dtype=torch.bool),
        },
    )


def unit(pixels):
    """Pixels in [-1, 1], in the arithmetic of the reward: exact means exact."""
    return pixels.float() * (2.0 / 255.0) - 1.0


def told(one, change=lambda frames, current: frames):
    """A policy that imagines the executed frames, or what ``change`` makes of them."""
    frames = unit(one.frames["future_frames"])
    current = unit(one.records["image"]).unsqueeze(1).expand_as(frames)
    future = change(frames, current)
    reachable = one.records["executed_mask"][:, 3]  # the others are never imagined

    def of(records):
        rows = records["elapsed_steps"]
        return future[rows[reachable[rows]]]

    return Policy(of)


def test_exact_imagination_has_no_error_and_copying_has_that_of_the_current_picture():
    one = played(cut=[2])
    measured = measure_imagination(told(one), {0: one}, SETTINGS)[0]
    now, later = (
        value.double() / 255
        for value in (one.records["image"].unsqueeze(1), one.frames["future_frames"])
    )
    reached = np.array([[True, row != 2] for row in range(len(now))])
    for index, frame in enumerate(measured.frames):
        rows = reached[:, index].nonzero()[0]
        change = (later[rows, index] - now[rows, 0]).numpy()
        moving = (np.abs(change) > MOTION_THRESHOLD).any(axis=1)
        assert frame.actions == 4 * (index + 1) and frame.frames == len(rows)
        assert frame.imagined == 0 and psnr(frame.imagined) == math.inf
        assert frame.imagined_moving == 0
        assert frame.moving_share == pytest.approx(moving.mean())
        squared = (change**2).mean(axis=1)
        assert frame.copied == pytest.approx(squared.mean(), rel=1e-5)
        assert frame.copied_moving == pytest.approx(squared[moving].mean(), rel=1e-5)
    assert all(reward.success_reward == 0 for reward in measured.rewards)


def test_imagining_that_nothing_changes_is_as_good_as_copying():
    one = played()
    policy = told(one, lambda frames, current: current)
    for frame in measure_imagination(policy, {0: one}, SETTINGS)[0].frames:
        assert frame.imagined == frame.copied
        assert frame.imagined_moving == frame.copied_moving


def test_where_nothing_moves_there_is_no_moving_error():
    one = played()
    still = one.records["image"].unsqueeze(1).repeat(1, FRAMES, 1, 1, 1)
    one = replace(one, frames={**one.frames, "future_frames": still})
    for frame in measure_imagination(told(one), {0: one}, SETTINGS)[0].frames:
        assert frame.moving_share == 0 and frame.copied == 0
        assert frame.imagined_moving is None and frame.copied_moving is None


def test_the_reward_of_an_episode_is_the_mean_of_its_macro_steps():
    """Imagined pictures are off by a constant per macro-step, so its error is known."""
    one = played(episodes=2, chunks=2, success=[True, False], cut=[1])
    grey = torch.full_like(one.frames["future_frames"], 100)
    one = replace(one, frames={**one.frames, "future_frames": grey})
    offset = torch.tensor([10.0, 20.0, 30.0, 40.0])  # of episodes 0, 1, 0, 1

    def shifted(frames, current):
        return frames + (offset * 2 / 255).view(-1, 1, 1, 1, 1)

    rewards = measure_imagination(told(one, shifted), {3: one}, SETTINGS)[0].rewards
    uniform = rewards[0]
    assert (uniform.similarity, uniform.weight) == ("pixel_mse", "uniform")
    error = (offset / 255) ** 2
    assert uniform.success_reward == pytest.approx(-float(error[[0, 2]].mean()), rel=1e-4)
    assert uniform.failure_reward == pytest.approx(-float(error[[1, 3]].mean()), rel=1e-4)
    assert uniform.auc == 1.0


def test_tasks_together_pool_pixels_and_compare_episodes_of_the_same_task():
    """Each task tells its episodes apart; the better task's failure beats the other's success."""
    offset = torch.tensor([10.0, 20.0, 30.0, 40.0])  # by episode, two of each task
    tasks = {}
    for task in (0, 1):
        one = played(episodes=2, chunks=1, success=[True, False])
        grey = torch.full_like(one.frames["future_frames"], 100)
        episodes = one.records["episode_id"] + 2 * task
        tasks[task] = replace(
            one,
            frames={**one.frames, "future_frames": grey},
            records={**one.records, "episode_id": episodes},
        )

    def future(records):
        off = offset[records["episode_id"]] * 2 / 255
        return unit(grey[:1]) + off.view(-1, 1, 1, 1, 1)

    policy = Policy(future)
    first, second, both = measure_imagination(policy, tasks, SETTINGS, pictures=0)
    assert (first.task, second.task, both.task) == ("0", "1", "all")
    for index in range(FRAMES):
        singles = [first.frames[index], second.frames[index]]
        mean = sum(one.imagined for one in singles) / 2
        assert both.frames[index].imagined == pytest.approx(mean)
        assert both.frames[index].frames == 4
    assert both.rewards[0].successes == 2 and both.rewards[0].auc == 1.0  # over all pairs: 0.75


@pytest.mark.parametrize("seed", range(3))
def test_the_area_under_the_curve_counts_pairs(seed):
    generator = torch.Generator().manual_seed(seed)
    high, low = (torch.randint(5, (count,), generator=generator).double() for count in (6, 9))
    pairs = [(a > b) + 0.5 * (a == b) for a, b in product(high.tolist(), low.tolist())]
    assert area_under_curve(high, low) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(high, low[:0]) is None


def test_decibels():
    assert psnr(0.01) == pytest.approx(20.0)


def test_tables_and_pictures_are_written(tmp_path):
    one = played()
    measured = {"live": measure_imagination(told(one), {2: one}, SETTINGS, pictures=3)}
    lines = []
    save_imaginations(measured, tmp_path, lines.append)
    text = (tmp_path / "imagination.md").read_text()
    assert "| 2 | live | +4 | 12 | inf |" in text and text.strip() == lines[0]
    stored = json.loads((tmp_path / "imagination.json").read_text())
    assert stored["live"][0]["frames"][1]["actions"] == 8
    sheet = np.asarray(Image.open(tmp_path / "task_2_live.png"))
    assert sheet.shape[0] == 3 * (3 * SIDE + 12)
    imagined, executed = (
        sheet[12 : 12 + 3 * SIDE, start : start + 6 * SIDE]
        for start in (6 * SIDE + 2, 2 * (6 * SIDE + 2))
    )
    assert np.array_equal(imagined, executed)  # pictures magnified three times, 2 apart
