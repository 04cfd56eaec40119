"""Sub-processes: results, failures, replacement, clean ends."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import load_suite
from rlinf_wamrl.envs.vector import EnvironmentProcessError, VectorEnv, VectorSettings, spread
from rlinf_wamrl.envs.worker_process import EpisodeSpec, ResetCommand, _Worker

SETTINGS = EnvSettings(image_size=16, render_quality="light")
TASKS = {task.task_id: task for task in load_suite("wamrl_demo").tasks}


def make_vector(num_envs=4, num_processes=2, **changes):
    values = {
        "frame_offsets": (4, 8),
        "max_built_tasks": 2,
        "timeout_seconds": 120.0,
        "restarts": 3,
        **changes,
    }
    settings = VectorSettings(num_envs=num_envs, num_processes=num_processes, **values)
    return VectorEnv(TASKS, SETTINGS, settings)


def episode(task_id=0, state=0, max_steps=60):
    return EpisodeSpec(task_id=task_id, init_state_id=state, scene_seed=0, max_steps=max_steps)


def chunk(seed, n=4, length=8):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (n, length, 7))


def snapshot(vector):
    names = ("main", "wrist", "proprio", "frames", "frame_proprio", "frame_mask", "success")
    return {name: vector.arrays[name].copy() for name in names}


def assert_equal_snapshots(a, b):
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture
def vector():
    env = make_vector()
    yield env
    env.close()


def test_slots_give_what_a_lone_environment_gives(vector):
    """Episodes that share a process, and a built environment, do not touch each other."""
    specs = {0: episode(0, 3), 1: episode(1, 4), 2: episode(0, 5), 3: episode(0, 6)}
    vector.reset(specs)
    starts = vector.arrays["main"].copy()
    chunks = [chunk(0), chunk(1)]
    frames = []
    for actions in chunks:
        vector.step(actions, [0, 1, 2, 3])
        frames.append(vector.arrays["frames"].copy())
    assert vector.arrays["frame_mask"].all()
    for slot, spec in specs.items():
        env = LiberoEnv(TASKS[spec.task_id], SETTINGS)
        start = env.reset(spec.init_state_id, spec.scene_seed)
        np.testing.assert_array_equal(starts[slot], start.main)
        for actions, pictures in zip(chunks, frames, strict=True):
            seen = [env.step(action, observe=True)[1] for action in actions[slot]]
            for position, step in enumerate((4, 8)):
                both = np.concatenate([seen[step - 1].main, seen[step - 1].wrist], axis=1)
                np.testing.assert_array_equal(pictures[slot, position], both.transpose(2, 0, 1))
        np.testing.assert_array_equal(vector.arrays["main"][slot], seen[-1].main)
        np.testing.assert_array_equal(vector.arrays["proprio"][slot], seen[-1].proprio)
        env.close()


@pytest.mark.parametrize(
    ("candidates", "shares"),
    [
        ({}, {}),
        ({"a": {0, 1}, "b": {0, 1}, "c": {0, 1}, "d": {0, 1}}, {0: ["a", "c"], 1: ["b", "d"]}),
        ({"a": {0, 1}, "b": {0, 1}, "c": {0}, "d": {0}}, {0: ["c", "d"], 1: ["a", "b"]}),
        ({"a": {0, 2}, "b": {2}, "c": {0, 2}}, {0: ["a", "c"], 2: ["b"]}),
        ({"a": {1}, "b": {1}}, {1: ["a", "b"]}),
    ],
)
def test_items_are_shared_evenly_among_those_who_can_take_them(candidates, shares):
    assert spread(candidates) == shares


def record_commands(vector, monkeypatch):
    sent, execute = [], vector._execute
    monkeypatch.setattr(vector, "_execute", lambda c: sent.append(c) or execute(c))
    return sent


def test_episodes_move_between_processes_unchanged(vector, monkeypatch):
    sent = record_commands(vector, monkeypatch)
    # Both episodes of the first process end, so it takes one of the other's.
    specs = {slot: episode(0, slot, max_steps=8 if slot in (0, 2) else 60) for slot in range(4)}
    alone = make_vector(num_processes=1)
    for env in (vector, alone):
        env.reset(specs)
    for seed, slots in ((0, [0, 1, 2, 3]), (1, [1, 3]), (2, [1, 3])):
        for env in (vector, alone):
            env.step(chunk(seed), slots)
        assert_equal_snapshots(snapshot(alone), snapshot(vector))
    alone.close()
    places = [{p: list(command.episodes) for p, command in step.items()} for step in sent[1:]]
    assert places == [{0: [0, 2], 1: [1, 3]}, {0: [1], 1: [3]}, {0: [1], 1: [3]}]


def test_episodes_that_start_alike_are_started_once(vector, monkeypatch):
    sent = record_commands(vector, monkeypatch)
    vector.reset({0: episode(0, 5), 1: episode(0, 5), 2: episode(0, 5), 3: episode(1, 5)})
    assert [list(command.episodes) for command in sent[0].values()] == [[0], [3]]
    assert [set(command.task_ids) for command in sent[0].values()] == [{0}, {0, 1}]
    for name in ("main", "wrist", "proprio"):
        for slot in (1, 2):
            np.testing.assert_array_equal(vector.arrays[name][slot], vector.arrays[name][0])
    # Equal starts, different actions: they part.
    vector.step(chunk(0), [0, 1, 2, 3])
    assert len({vector.arrays["proprio"][slot].tobytes() for slot in range(3)}) == 3


def test_building_anew_gives_the_same_episode_as_keeping(vector):
    other = make_vector(num_envs=1, num_processes=1, max_built_tasks=1)
    for task_id in (0, 1, 0):
        for env in (vector, other):
            env.reset({0: episode(task_id, 1)})
            env.step(chunk(3, n=env.settings.num_envs), [0])
        for name, value in snapshot(other).items():
            np.testing.assert_array_equal(value[0], snapshot(vector)[name][0], err_msg=name)
    other.close()


def test_bound_on_built_tasks_spares_those_that_run():
    vector = make_vector(num_envs=2, num_processes=1, max_built_tasks=1)
    worker = _Worker(vector._setup, vector.arrays)
    answer = worker.reset(ResetCommand(episodes={}, task_ids=frozenset({0, 1})))
    assert answer.built == {0, 1}
    answer = worker.reset(ResetCommand(episodes={0: episode(1, 1)}, task_ids=frozenset({1})))
    assert answer.built == {1}


def test_limit_ends_an_episode_inside_a_chunk(vector):
    vector.reset({0: episode(max_steps=5), 1: episode(max_steps=60)})
    vector.step(chunk(0), [0, 1])
    executed = vector.arrays["executed"][:2, :8]
    assert executed.sum(axis=1).tolist() == [5, 8]
    assert vector.arrays["frame_mask"][:2].tolist() == [[True, False], [True, True]]
    assert not vector.arrays["frames"][0, 1].any()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSEGV])
def test_dead_process_is_replaced_and_its_episodes_go_on_unchanged(vector, blow):
    specs = {slot: episode(slot % 2, slot) for slot in range(4)}
    slots = list(range(4))
    reference = make_vector()
    for env in (reference, vector):
        env.reset(specs)
        env.step(chunk(0), slots)
        if env is vector:
            victim = env.process_ids()[1]
            os.kill(victim, blow)
        env.step(chunk(1), slots)
    assert victim not in vector.process_ids()
    assert_equal_snapshots(snapshot(reference), snapshot(vector))
    reference.close()


def test_process_that_dies_again_and_again_is_given_up(vector):
    vector.reset({0: episode()})
    vector._setup = dataclasses.replace(vector._setup, settings=None)  # crashes what is new
    os.kill(vector.process_ids()[0], signal.SIGKILL)
    with pytest.raises(EnvironmentProcessError, match="'NoneType' object has no attribute"):
        vector.step(chunk(0), [0])


def test_process_that_cannot_start_is_told_at_once():
    env = make_vector(num_envs=1, num_processes=1)
    env._setup = "no setup"
    started = time.monotonic()
    with pytest.raises(EnvironmentProcessError, match=r"(?s)exited with 1.*AttributeError"):
        env.reset({0: episode()})
    assert time.monotonic() - started < 10.0


def test_death_without_replacement_names_the_signal():
    env = make_vector(restarts=0)
    env.reset({0: episode()})
    os.kill(env.process_ids()[0], signal.SIGKILL)
    with pytest.raises(
        EnvironmentProcessError, match=r"process 0 \(pid \d+\) was killed by SIGKILL"
    ):
        env.step(chunk(0), [0])
    assert env.process_ids() == []


def test_hanging_process_is_told_with_the_place_where_it_hangs():
    env = make_vector(restarts=0)
    env.reset({0: episode(max_steps=1000)})
    # Steps that take longer than they may look like a hang.
    env.settings = dataclasses.replace(env.settings, timeout_seconds=0.02)
    with pytest.raises(EnvironmentProcessError, match="does not answer") as error:
        env.step(chunk(0, length=128), [0])
    assert "in _run_chunk" in str(error.value)
    assert env.process_ids() == []


def test_stopped_process_is_replaced():
    env = make_vector(num_envs=1, num_processes=1)
    env.reset({0: episode()})
    stopped = env.process_ids()[0]
    os.kill(stopped, signal.SIGSTOP)
    env.settings = dataclasses.replace(env.settings, timeout_seconds=5.0)
    env.step(chunk(0, n=1), [0])
    assert gone(stopped)
    env.close()


def test_an_exception_arrives_with_its_own_traceback(vector):
    with pytest.raises(
        EnvironmentProcessError, match=r"initial state 999 .* does not exist"
    ) as error:
        vector.reset({0: episode(state=999)})
    assert "Traceback" in str(error.value)
    assert "in _place" in str(error.value)
    # The next use starts afresh.
    vector.reset({0: episode(state=1)})


def test_children_import_no_torch_and_stay_small(vector):
    vector.reset({slot: episode(slot % 2, slot) for slot in range(4)})
    for pid in vector.process_ids():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        assert int(status["VmRSS"].split()[0]) < 600_000  # kB


def gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


PARENT = """
import sys
sys.path.insert(0, {tests!r})
from test_env_vector import chunk, episode, make_vector
env = make_vector()
env.reset({{slot: episode(0, slot) for slot in range(4)}})
print(*env.process_ids(), flush=True)
while True:
    env.reset({{slot: episode(0, slot, max_steps=1000) for slot in range(4)}})
    env.step(chunk(0, length=64), [0, 1, 2, 3])
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives_its_parent(blow):
    program = PARENT.format(tests=str(Path(__file__).parent))
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    if blow == signal.SIGINT:
        os.killpg(parent.pid, blow)  # Ctrl-C goes to the whole group
    else:
        os.kill(parent.pid, blow)
    _, errors = parent.communicate(timeout=20)
    assert all(gone(pid) for pid in children)
    if blow == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert "EnvironmentProcessError" not in errors


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_closing_leaves_nothing(vector):
    vector.reset({0: episode()})
    pids = vector.process_ids()
    descriptors = open_descriptors()
    vector.close()
    assert all(gone(pid) for pid in pids)
    assert open_descriptors() < descriptors
    vector.close()
