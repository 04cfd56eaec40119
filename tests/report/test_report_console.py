"""Console, pictures and films of a run."""

import io

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from PIL import Image

from rlinf_wamrl.report.console import Console, duration, wilson_interval
from rlinf_wamrl.report.pictures import Film, save_imagination


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (49, 120, 0.3248, 0.4976),
    ],
)
def test_wilson_interval_matches_tabulated_values(successes, trials, low, high):
    measured = wilson_interval(successes, trials)
    assert measured == pytest.approx((low, high), abs=1e-3)


def test_no_trials_say_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("seconds", "text"), [(42, "42s"), (190, "3m10s"), (7500, "2h05m")])
def test_durations_read_naturally(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_phases_are_lines_and_updates_are_silent():
    stream = io.StringIO()
    console = Console(stream)
    console.phase("rollouts")
    console.update("episodes 3/8")
    console.line("iteration 1")
    assert stream.getvalue() == "  \u2026 rollouts\niteration 1\n"


def test_imagined_and_executed_frames_stand_side_by_side(tmp_path):
    def plain(value, count):
        return torch.full((2, count, 3, 4, 6), value, dtype=torch.uint8)

    save_imagination(
        tmp_path / "a.png",
        current=plain(10, 1)[:, 0],
        imagined=plain(100, 2),
        executed=plain(200, 2),
        rewards=torch.tensor([-0.1, -0.2]),
    )
    pixels = np.asarray(Image.open(tmp_path / "a.png"))
    row = pixels[12 + 1, ::8, 0]  # pictures are 6 wide and 2 apart
    assert row.tolist() == [10, 100, 200, 100, 200]


def test_a_film_holds_the_first_picture_and_those_of_each_chunk(tmp_path):
    film = Film()
    image = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    film.start({"main_images": image, "wrist_images": image + 255})
    frames = torch.zeros(2, 2, 3, 16, 32, dtype=torch.uint8)
    mask = torch.tensor([[True, False], [True, True]])
    film.add({"future_frames": frames, "future_frames_mask": mask})
    film.save(tmp_path / "film.mp4")
    written = imageio.mimread(tmp_path / "film.mp4")
    assert len(written) == 2 and written[0].shape == (64, 128, 3)
    assert written[0][:, 80:].mean() > 200 > 50 > written[0][:, :48].mean()
