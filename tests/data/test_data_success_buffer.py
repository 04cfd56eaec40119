"""The success buffer is bounded, survives crashes, and goes on after a resume as if unbroken."""

import copy
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.success_buffer import SuccessBuffer
from rlinf_wamrl.data.success_episode import SuccessEpisode

STEPS, HEIGHT, WIDTH = 10, 4, 6
REPOSITORY = Path(__file__).resolve().parents[2]


def episode(mark: int = 0, steps: int = STEPS, stride: int = 1) -> SuccessEpisode:
    """An episode whose image and action at step t carry 16 * mark + t."""
    clock = torch.arange(steps)
    values = 16 * mark + clock
    frames = values[::stride].to(torch.uint8)[:, None, None, None].expand(-1, 3, HEIGHT, WIDTH)
    return SuccessEpisode(
        frames=frames.contiguous(),
        executed_actions=values[:, None].float().expand(-1, 7).contiguous(),
        proprio=values[:, None].float().expand(-1, 2).contiguous(),
        task_id=mark % 3,
        instruction=f"task {mark}",
        initial_state_id=mark,
        frame_stride=stride,
    )


EPISODE_BYTES = episode().info.nbytes


def buffer(directory=None, *, capacity=4, memory=None):
    memory = (1 if directory else capacity) if memory is None else memory
    return SuccessBuffer(
        capacity_bytes=capacity * EPISODE_BYTES,
        memory_bytes=memory * EPISODE_BYTES,
        directory=directory,
    )


def states(success_buffer):
    return [info.initial_state_id for info in success_buffer.infos]


def draw(success_buffer, seed=0, batch=16, horizon=8, ratio=4):
    return success_buffer.sample(
        batch,
        action_horizon=horizon,
        ratio=ratio,
        generator=torch.Generator().manual_seed(seed),
    )


def files(directory):
    return sorted(path.name for path in Path(directory).iterdir())


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_oldest_episodes_are_evicted(tmp_path, on_disk):
    kept = buffer(tmp_path if on_disk else None)
    for mark in range(7):
        kept.add(episode(mark))
        assert kept.nbytes <= 4 * EPISODE_BYTES
    assert states(kept) == [3, 4, 5, 6] and len(kept) == 4


def test_older_episodes_move_to_disk_beyond_the_memory_limit(tmp_path):
    kept = buffer(tmp_path, capacity=8, memory=2)
    for mark in range(5):
        kept.add(episode(mark))
    assert kept.memory_nbytes == 2 * EPISODE_BYTES and len(kept) == 5
    assert files(tmp_path) == [f"episode_{index:08d}.safetensors" for index in range(3)]


def test_episodes_of_different_length_count_by_their_bytes():
    kept = SuccessBuffer(capacity_bytes=2 * EPISODE_BYTES, memory_bytes=2 * EPISODE_BYTES)
    kept.add(episode(0))
    kept.add(episode(1, steps=2))
    kept.add(episode(2))
    assert states(kept) == [1, 2]
    with pytest.raises(ValueError, match="exceeds the buffer's capacity_bytes"):
        kept.add(episode(3, steps=5 * STEPS))


def test_slices_of_a_longer_recording_do_not_keep_it_in_memory(tmp_path):
    recording = torch.zeros(100, 7)
    values = {
        **vars(episode()),
        "executed_actions": recording[:STEPS],
        "proprio": recording[:STEPS],
    }
    whole = episode()
    assert batch_values_equal(whole.with_own_storage().frames, whole.frames)
    for tensor in SuccessEpisode(**values).with_own_storage().to_tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    kept = buffer(tmp_path, capacity=8)
    kept.add(SuccessEpisode(**values))
    kept.state_dict()  # two tensors of one storage can be written
    assert batch_values_equal(buffer(tmp_path, capacity=8).infos, kept.infos)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"capacity_bytes": 0, "memory_bytes": 0}, "must be positive"),
        ({"capacity_bytes": 2, "memory_bytes": 1}, "needs a directory"),
    ],
)
def test_contradicting_limits_are_named(limits, words):
    with pytest.raises(ValueError, match=words):
        SuccessBuffer(**limits)


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("on_disk", [False, True])
def test_windows_are_rows_of_their_episode(tmp_path, stride, on_disk):
    kept = buffer(tmp_path if on_disk else None, memory=0 if on_disk else None)
    for mark in range(3):
        kept.add(episode(mark, stride=stride))
    windows = draw(kept, batch=64)
    assert windows.video.shape == (64, 3, 3, HEIGHT, WIDTH) and windows.video.dtype == torch.uint8
    assert windows.action.shape == (64, 8, 7) and windows.proprio.shape == (64, 8, 2)
    last_frame = (STEPS - 1) // stride * stride
    starts = set()
    for row in range(64):
        mark, start = divmod(int(windows.action[row, 0, 0]), 16)
        starts.add((mark, start))
        assert start % stride == 0
        assert windows.task_id[row] == mark % 3 and windows.instruction[row] == f"task {mark}"
        steps = start + torch.arange(8)
        images = start + 4 * torch.arange(3)
        assert torch.equal(windows.action_is_pad[row], steps >= STEPS)
        assert torch.equal(windows.image_is_pad[row], images > last_frame)
        assert torch.equal(
            windows.action[row, :, 0], 16 * mark + steps.clamp(max=STEPS - 1).float()
        )
        assert torch.equal(windows.proprio[row], windows.action[row, :, :2])
        expected = (16 * mark + images.clamp(max=last_frame)).to(torch.uint8)
        assert torch.equal(windows.video[row, 0, :, 0, 0], expected)
        assert (windows.video[row] == expected[None, :, None, None]).all()
    assert {mark for mark, _ in starts} == {0, 1, 2}


def test_sampling_depends_on_the_generator_alone(tmp_path):
    in_memory, on_disk = buffer(), buffer(tmp_path, memory=0)
    for mark in range(3):
        in_memory.add(episode(mark))
        on_disk.add(episode(mark))
    assert batch_values_equal(draw(in_memory, seed=3), draw(on_disk, seed=3))
    assert not batch_values_equal(draw(in_memory, seed=3), draw(in_memory, seed=4))


def test_every_start_is_drawn_equally_often():
    kept = buffer(capacity=4)
    kept.add(episode(0, steps=4))
    kept.add(episode(1, steps=8))
    windows = draw(kept, batch=12000, horizon=4)
    counts = torch.bincount(windows.action[:, 0, 0].long())
    starts = counts[counts > 0].float()
    assert len(starts) == 12
    # Binomial(12000, 1/12): mean 1000, standard deviation 30.3; five of them.
    assert ((starts - 1000).abs() < 152).all()


def test_a_single_step_episode_gives_a_padded_window():
    kept = buffer()
    kept.add(episode(1, steps=1))
    windows = draw(kept, batch=1)
    assert windows.action_is_pad.tolist() == [[False] + [True] * 7]
    assert windows.image_is_pad.tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizon": 6}, r"action_horizon \(6\) must be a multiple of ratio \(4\)"),
        ({"horizon": 3, "ratio": 3}, r"ratio \(3\) must be a multiple of the stride .* \(2\)"),
    ],
)
def test_windows_that_cannot_be_cut_are_named(options, words):
    kept = buffer()
    kept.add(episode(stride=2))
    with pytest.raises(ValueError, match=words):
        draw(kept, **options)
    with pytest.raises(ValueError, match="without any episode"):
        draw(buffer())


# ---------------------------------------------------------------- crashes and checkpoints


def test_a_new_buffer_takes_over_complete_episodes_and_clears_unfinished_ones(tmp_path, caplog):
    kept = buffer(tmp_path, memory=0)
    for mark in range(3):
        kept.add(episode(mark))
    (tmp_path / ".episode_00000003.safetensors.1-ab.tmp").write_bytes(b"half")
    damaged = tmp_path / "episode_00000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    (tmp_path / "notes.txt").write_text("not an episode")
    with caplog.at_level(logging.WARNING):
        again = buffer(tmp_path, memory=0)
    assert states(again) == [0, 2] and str(damaged) in caplog.text
    assert not any(name.endswith(".tmp") for name in files(tmp_path))
    again.add(episode(9))
    assert states(again) == [0, 2, 9] and batch_values_equal(draw(again), draw(again))


WRITER = """
    import sys
    import torch
    from rlinf_wamrl.data.success_buffer import SuccessBuffer
    from rlinf_wamrl.data.success_episode import SuccessEpisode

    buffer = SuccessBuffer(capacity_bytes=10**9, memory_bytes=0, directory=sys.argv[1])
    for mark in range(10**6):
        frames = torch.full((400, 3, 64, 64), mark % 256, dtype=torch.uint8)
        actions = torch.full((400, 7), float(mark))
        buffer.add(SuccessEpisode(frames=frames, executed_actions=actions, proprio=actions,
                                  task_id=mark, instruction="x", initial_state_id=mark))
        print(mark, flush=True)
"""


def test_a_killed_writer_leaves_only_complete_episodes(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
    )
    for line in process.stdout:
        if int(line) >= 3:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    kept = SuccessBuffer(capacity_bytes=10**9, memory_bytes=0, directory=tmp_path)
    assert len(kept) >= 4
    assert [info.task_id for info in kept.infos] == list(range(len(kept)))
    windows = draw(kept, batch=32)
    marks = windows.task_id
    assert torch.equal(windows.action[:, 0, 0], marks.float())
    assert torch.equal(windows.video[:, 0, 0, 0, 0].long(), marks % 256)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_resumed_buffer_goes_on_as_the_unbroken_one(tmp_path, on_disk):
    unbroken = buffer(tmp_path / "a" if on_disk else None)
    broken = buffer(tmp_path / "b" if on_disk else None)
    for mark in range(5):
        unbroken.add(episode(mark))
        broken.add(episode(mark))
    unbroken.state_dict()
    state = broken.state_dict()
    if on_disk:
        json.dumps(state)  # the index alone, no tensors
    # What happens after the checkpoint is lost in the crash, evictions included.
    for mark in range(20, 26):
        broken.add(episode(mark % 8))
    resumed = buffer(tmp_path / "b" if on_disk else None)
    resumed.load_state_dict(copy.deepcopy(state))
    for mark in range(5, 8):
        assert batch_values_equal(draw(resumed, seed=mark), draw(unbroken, seed=mark))
        unbroken.add(episode(mark))
        resumed.add(episode(mark))
    assert batch_values_equal(draw(resumed), draw(unbroken)) and states(resumed) == [4, 5, 6, 7]
    assert resumed.state_dict()["episodes"] == unbroken.state_dict()["episodes"]


def test_the_checkpoint_before_the_last_can_be_resumed_too(tmp_path):
    kept = buffer(tmp_path, capacity=2)
    state_dicts = []
    for mark in range(6):
        kept.add(episode(mark))
        state_dicts.append(kept.state_dict())
    before_last = buffer(tmp_path, capacity=2)
    before_last.load_state_dict(state_dicts[-2])
    assert states(before_last) == [3, 4]
    too_old = buffer(tmp_path, capacity=2)
    with pytest.raises(ValueError, match=r"episodes \[0, 1\] .* resume from a newer checkpoint"):
        too_old.load_state_dict(state_dicts[1])
    # Files don't pile up: the two episodes, and one evicted since each of the last checkpoints.
    assert len(files(tmp_path)) <= 4


def test_lost_episodes_may_be_left_out_on_request(tmp_path, caplog):
    kept = buffer(tmp_path)
    kept.add(episode(0))
    kept.add(episode(1))
    state = kept.state_dict()
    (tmp_path / "episode_00000000.safetensors").unlink()
    resumed = buffer(tmp_path)
    with pytest.raises(ValueError, match="the other 1"):
        resumed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state, strict=False)
    assert states(resumed) == [1] and "[0]" in caplog.text


def test_a_state_fits_only_its_kind_of_buffer(tmp_path):
    with pytest.raises(
        ValueError, match="saved without a directory, this buffer has been made with"
    ):
        buffer(tmp_path).load_state_dict(buffer().state_dict())


# ---------------------------------------------------------------- episodes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frames": torch.zeros(STEPS, 3, 4, 4)}, "frames of a successful episode must be"),
        ({"frames": torch.zeros(STEPS, 4, 4, 3, dtype=torch.uint8)}, r"must be \[T, 3, height"),
        ({"frames": torch.zeros(9, 3, 4, 4, dtype=torch.uint8)}, "need 10 rows of frames, got 9"),
        ({"proprio": torch.zeros(9, 2)}, "need 10 rows of proprio, got 9"),
        ({"executed_actions": torch.zeros(STEPS)}, "with 2 dimensions"),
        ({"frame_stride": 0}, "positive frame_stride"),
    ],
)
def test_impossible_episodes_are_named(changes, words):
    values = {**vars(episode()), **changes}
    with pytest.raises(ValueError, match=words):
        SuccessEpisode(**values)
