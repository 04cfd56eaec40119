"""Environment steps per second of `chunk_step` against RLinf 0.3.0's `LiberoEnv`, and resets.

Both execute the same chunks from the same initial states, one environment in each of as many
processes; they take turns, chunk group by chunk group, so that what else the machine does hits
both. Asserted: physics equal to the last bit after every group and, at stock quality, pictures
equal to the last bit at +4, +8 and the chunk's end. RLinf's class draws both cameras at every step.

    python tests/benchmarks/bench_env.py --suite wamrl_demo --size 64 --chunk 8
    python tests/benchmarks/bench_env.py --suite libero_spatial --size 128 --assets FOLDER
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.envs.libero_setup import bootstrap_libero, point_libero_at
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.envs.suites import load_suite
from rlinf_wamrl.envs.worker_process import EpisodeSpec

SETTLE, STATE = 15, 3  # steps that RLinf's class settles, and a stored initial state
FRAMES = (4, 8)
BASELINE = "RLinf 0.3.0 LiberoEnv"


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


def our_config(suite, size, num_envs, quality="light", texture=None, assets=None, **changes):
    """Configuration section of this project's environment: one task, one stored state."""
    values = {
        "task_suite_name": suite,
        "assets_dir": assets,
        "task_ids": [0],
        "init_state_range": [STATE, STATE + 1],
        "image_size": size,
        "render_quality": quality,
        "max_texture_size": texture,
        "num_settle_steps": SETTLE,
        "max_episode_steps": 100_000,
        "num_processes": num_envs,
        "seed": 1,
        "group_size": 1,
        "total_num_envs": num_envs,
    }
    return OmegaConf.create({**values, **changes})


@dataclass
class Contender:
    """One side of the comparison and what was measured of it."""

    name: str
    env: object
    processes: list[psutil.Process]
    rates: list[float] = field(default_factory=list)  # environment steps per second
    cpu: list[float] = field(default_factory=list)  # ms per environment step, in the processes
    known: list[float] = field(default_factory=list)  # s per reset to a state seen before
    new: list[float] = field(default_factory=list)  # s per reset to a state not seen before
    rss: float = 0.0  # MB of the largest process
    pss: float = 0.0  # the same, shared pages counted in part

    def run(self, chunks):
        """Execute chunks [G, N, C, 7]; return the observations of each."""
        busy, started = cpu_seconds(self.processes), time.perf_counter()
        seen = [self.env.chunk_step(chunk)[0] for chunk in chunks]
        wall = time.perf_counter() - started
        steps = chunks.shape[0] * chunks.shape[1] * chunks.shape[2]
        self.rates.append(steps / wall)
        self.cpu.append((cpu_seconds(self.processes) - busy) / steps * 1e3)
        return seen

    def weigh(self):
        """Read the memory of the largest process."""
        self.rss = max(p.memory_info().rss for p in self.processes) / 2**20
        self.pss = max(p.memory_full_info().pss for p in self.processes) / 2**20


def children_made_by(make):
    """Call ``make``; return its result and the processes it started."""
    before = set(psutil.Process().children(recursive=True))
    made = make()
    started = set(psutil.Process().children(recursive=True)) - before
    # Python's own helper of multiprocessing is no environment.
    return made, [p for p in started if "resource_tracker" not in " ".join(p.cmdline())]


def cpu_seconds(processes):
    """CPU time that processes have used, s."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def episodes(state, num_envs):
    """Episodes of the first task, their furniture placed by the seeds that RLinf's class takes."""
    return {
        slot: EpisodeSpec(
            task_id=0, init_state_id=state, scene_seed=num_envs + slot, max_steps=10**5
        )
        for slot in range(num_envs)
    }


def start_ours(name, config, num_envs):
    """Start this project's environment where RLinf's class starts."""
    env = WAMLiberoEnv(config, num_envs, 0, 1, None)

    def start():
        env.reset()
        env.vector.reset(episodes(STATE, num_envs))

    _, processes = children_made_by(start)
    return Contender(name, env, processes)


def our_states(env):
    """Time, positions and velocities of each environment."""
    for slot in range(env.num_envs):
        state = pickle.loads(env.vector._episodes[slot].state)
        yield state.physics


def assert_equal(ours, baseline, seen, expected, length, pictures):
    """Compare a group of chunks, the pictures only where they are to be equal."""
    for state, stock in zip(our_states(ours.env), baseline.env.env.get_sim_state(), strict=True):
        np.testing.assert_array_equal(state[: len(stock)], stock)
    if not pictures:
        return
    for [observation], steps in zip(seen, expected, strict=True):
        for key in ("main_images", "wrist_images"):
            assert torch.equal(observation[key], steps[length - 1][key])
        for position, offset in enumerate(f for f in FRAMES if f <= length):
            both = [steps[offset - 1][key] for key in ("main_images", "wrist_images")]
            frames = torch.cat(both, dim=2).permute(0, 3, 1, 2)
            assert torch.equal(observation["future_frames"][:, position], frames)


def compare(suite, size, num_envs, length, group, repeats, variants, assets=None):
    """Measure RLinf's class and variants (quality, largest texture) of this project's.

    Args:
        suite: From ``load_suite``.
        size: Pixels.
        num_envs: Environments, each in a process of its own.
        length: Actions per chunk.
        group: Chunks per measurement.
        repeats: Measurements.
        variants: (quality, largest texture) of each contender.
        assets: Folder with LIBERO's files.
    """

    def start_baseline():
        env = baseline_env(suite, size, num_envs)
        env.reset()
        return env

    baseline = Contender(BASELINE, *children_made_by(start_baseline))
    contenders = [
        start_ours(
            f"{quality}, textures {texture or 'whole'}",
            our_config(suite.name, size, num_envs, quality, texture, assets),
            num_envs,
        )
        for quality, texture in variants
    ]
    rng = np.random.default_rng(0)
    for _ in range(repeats + 1):  # the first warms up
        chunks = rng.uniform(-0.3, 0.3, (group, num_envs, length, 7))
        chunks[..., 6] = -1.0
        expected = baseline.run(chunks)
        for contender, (quality, texture) in zip(contenders, variants, strict=True):
            seen = contender.run(chunks)
            whole = (quality, texture) == ("stock", None)
            assert_equal(contender, baseline, seen, expected, length, pictures=whole)
    for repeat in range(repeats):
        baseline.env.is_start = True
        baseline.new.append(timed(baseline.env.reset))
        for contender in contenders:
            reset = contender.env.vector.reset
            state = (STATE + 1 + repeat) % 50
            contender.new.append(timed(lambda r=reset, s=state: r(episodes(s, num_envs))))
            contender.known.append(timed(lambda r=reset, s=state: r(episodes(s, num_envs))))
    baseline.known = baseline.new  # it keeps nothing
    for contender in (baseline, *contenders):
        del contender.rates[0], contender.cpu[0]
        contender.weigh()
        for process in contender.processes:
            process.terminate()
    return [baseline, *contenders]


def timed(call):
    """Seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def table(rows):
    """Medians of each contender as lines of a Markdown table; the first is the baseline."""
    yield (
        "| | steps/s | ratio | CPU ms/step | reset, new state: s | ratio | known state: s | ratio "
        "| MB (RSS) | MB (PSS) |"
    )
    yield "|---|" + "---:|" * 9
    median = statistics.median
    first = rows[0]
    for row in rows:
        # Ratios of neighbours in time, so that the machine's mood falls out.
        speed = median(a / b for a, b in zip(row.rates, first.rates, strict=True))
        cells = [
            f"{median(row.rates):.1f}",
            f"{speed:.1f}",
            f"{median(row.cpu):.2f}",
            f"{median(row.new):.3f}",
            f"{median(b / a for a, b in zip(row.new, first.new, strict=True)):.0f}",
            f"{median(row.known):.3f}",
            f"{median(b / a for a, b in zip(row.known, first.known, strict=True)):.0f}",
            f"{row.rss:.0f}",
            f"{row.pss:.0f}",
        ]
        yield f"| {row.name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="wamrl_demo")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=10)
    parser.add_argument("--group", type=int, default=2, help="chunks per measurement")
    parser.add_argument("--assets", default=os.environ.get("LIBERO_ASSETS"))
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    variants = [("stock", None), ("stock", 512), ("fast", 512)]
    if args.suite == "wamrl_demo":  # it has no texture files
        variants = [("stock", None), ("fast", None), ("light", None)]
    rows = compare(
        load_suite(args.suite, args.assets),
        args.size,
        args.envs,
        args.chunk,
        args.group,
        args.repeats,
        variants,
        args.assets,
    )
    print(
        f"\n{args.suite} at {args.size}, {args.envs} environments in as many processes, chunks of "
    )
    print(f"{args.chunk} actions, medians of {args.repeats}:\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
