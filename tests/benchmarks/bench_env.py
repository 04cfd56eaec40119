"""Environment steps per second of `chunk_step` against RLinf 0.3.0's `LiberoEnv`.

Both execute the same chunks from the same initial states in the same number of processes; equal
physics and, at stock quality, equal pictures at the end of each chunk are asserted. RLinf's class
renders both cameras at every step; this project's renders at the frame offsets +4 and +8.

    python tests/benchmarks/bench_env.py --suite wamrl_demo --size 64
    python tests/benchmarks/bench_env.py --suite libero_spatial --size 128 --assets FOLDER
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import psutil
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.envs.libero_setup import bootstrap_libero, point_libero_at
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.envs.suites import load_suite
from rlinf_wamrl.envs.vector import VectorEnv
from rlinf_wamrl.envs.worker_process import EpisodeSpec

CHUNK, CHUNKS, SETTLE, STATE = 8, 6, 15, 3


def baseline_env(suite, size, num_envs):
    """RLinf's environment, on one task and one stored state."""
    bootstrap_libero(with_benchmark=True)
    from rlinf.envs.libero.libero_env import LiberoEnv

    root = suite.tasks[0].assets_root

    class Baseline(LiberoEnv):
        def get_env_fns(self):
            def prepared(make):
                def build():
                    bootstrap_libero()
                    if root is not None:
                        point_libero_at(root)
                    return make()

                return build

            return [prepared(make) for make in super().get_env_fns()]

    cfg = OmegaConf.create(
        {
            "task_suite_name": suite.name,
            "seed": 1,
            "group_size": 1,
            "use_fixed_reset_state_ids": True,
            "specific_reset_id": STATE,
            "use_ordered_reset_state_ids": False,
            "ignore_terminations": False,
            "auto_reset": False,
            "use_rel_reward": True,
            "reward_coef": 1.0,
            "reset_gripper_open": True,
            "max_episode_steps": 1000,
            "video_cfg": {"save_video": False},
            "init_params": {"camera_heights": size, "camera_widths": size},
        }
    )
    return Baseline(cfg, num_envs, 0, 1, None)


def our_config(suite, size, num_envs, quality, texture, assets):
    return OmegaConf.create(
        {
            "task_suite_name": suite.name,
            "assets_dir": assets,
            "task_ids": [0],
            "init_state_range": [STATE, STATE + 1],
            "image_size": size,
            "render_quality": quality,
            "max_texture_size": texture,
            "num_settle_steps": SETTLE,
            "max_episode_steps": 1000,
            "num_processes": num_envs,
            "seed": 1,
            "group_size": 1,
            "total_num_envs": num_envs,
        }
    )


def measure(env, actions, repeats):
    """Medians over repeats of: steps per second (wall), CPU ms per step; and what was seen."""
    seen, rates, cpu = [], [], []
    for _ in range(repeats):
        env.is_start = True
        env.reset()
        seen = []
        started, busy = time.perf_counter(), cpu_seconds()
        for chunk in actions:
            observation = env.chunk_step(chunk)[0][-1]
            seen.append(
                {key: observation[key] for key in ("main_images", "wrist_images", "states")}
            )
        steps = actions.shape[0] * actions.shape[1] * actions.shape[2]
        rates.append(steps / (time.perf_counter() - started))
        cpu.append((cpu_seconds() - busy) / steps * 1e3)
    started = time.perf_counter()
    env.is_start = True
    env.reset()
    reset = time.perf_counter() - started
    memory = max(child.memory_info().rss for child in children()) / 2**20
    return statistics.median(rates), statistics.median(cpu), reset, memory, seen


def children():
    return psutil.Process().children(recursive=True)


def cpu_seconds():
    return sum(sum(child.cpu_times()[:2]) for child in children())


def seed_scenes_as_rlinf(env, seed):
    """Seed LIBERO's placement as RLinf's class does, so that furniture stands alike."""
    vector: VectorEnv = env.vector
    start = vector.reset
    vector.reset = lambda episodes: start(
        {
            slot: EpisodeSpec(**{**vars(spec), "scene_seed": seed + slot})
            for slot, spec in episodes.items()
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="wamrl_demo")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--assets", default=os.environ.get("LIBERO_ASSETS"))
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    suite = load_suite(args.suite, args.assets)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-0.3, 0.3, (CHUNKS, args.envs, CHUNK, 7))
    actions[..., 6] = -1.0
    env = baseline_env(suite, args.size, args.envs)
    rows = [("RLinf LiberoEnv", *measure(env, actions, args.repeats))]
    for worker in env.env.workers:
        worker.close()
    for quality, texture in (("stock", None), ("fast", None), ("fast", 512), ("light", 512)):
        config = our_config(suite, args.size, args.envs, quality, texture, args.assets)
        env = WAMLiberoEnv(config, args.envs, 0, 1, None)
        seed_scenes_as_rlinf(env, args.envs)  # seed times number of environments
        rows.append((f"{quality}, textures {texture}", *measure(env, actions, args.repeats)))
        env.close()
        for ours, theirs in zip(rows[-1][-1], rows[0][-1], strict=True):
            np.testing.assert_allclose(ours["states"], theirs["states"], atol=1e-6)
            if (quality, texture) == ("stock", None):
                assert torch.equal(ours["main_images"], theirs["main_images"])
                assert torch.equal(ours["wrist_images"], theirs["wrist_images"])
    print(f"{args.suite} at {args.size}: {args.envs} environments, chunks of {CHUNK}")
    print(f"{'':26s}{'steps/s':>9s}{'ratio':>7s}{'CPU ms/step':>13s}{'reset s':>9s}{'MB':>7s}")
    for name, rate, cpu, reset, memory, _ in rows:
        ratio = rate / rows[0][1]
        print(f"{name:26s}{rate:9.1f}{ratio:7.1f}{cpu:13.2f}{reset:9.3f}{memory:7.0f}")


if __name__ == "__main__":
    main()
