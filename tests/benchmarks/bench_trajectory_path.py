"""Bytes and time per macro-step from the policy's output to the actor's batch, both paths.

RLinf 0.3.0 sends a chunk's training data from the rollout worker to the environment worker and from
there, stacked, to the actor. With the embodied data interface they go to the actor directly, and
only the actions go to the environment worker. Both paths run here in one process on the same
rollouts; a transfer is a copy of every tensor that a channel would copy, plus pickling what it
would pickle. The resulting batches are compared bit by bit.

    python tests/benchmarks/bench_trajectory_path.py [--image HEIGHT WIDTH] [--repeats N] ...
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))

from rlinf.data.embodied_io_struct import convert_trajectories_to_batch
from rlinf.scheduler.cluster.utils import (
    extract_dataclass_tensor_fields,
    unflatten_dataclass_tensor_fields,
)
from rlinf_reference_path import collect_source
from synthetic_rollout import Rollouts, run_config

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_trajectory import (
    ChannelContext,
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryMode,
    TrajectoryPlan,
)
from rlinf_wamrl.data.embodied_types import Trajectory
from rlinf_wamrl.data.wire import pack_message, packed_nbytes, unpack_message


@dataclass
class MacroStepRollouts(Rollouts):
    """Rollouts whose forward inputs have the sizes of a macro-step record."""

    height: int = 224
    width: int = 448
    denoising_steps: int = 10
    horizon: int = 32

    def forward_inputs(self) -> dict[str, torch.Tensor]:
        rows, picture = self.rows, (3, self.height, self.width)
        return {
            "action": self.normal(rows, self.chunk * self.action_dim),
            "chain": self.normal(rows, self.denoising_steps + 1, self.horizon, self.action_dim),
            "k_star": torch.zeros(rows, 1, dtype=torch.int64),
            "logp_old": self.normal(rows, 1),
            "proprio": self.normal(rows, 8),
            "image": torch.randint(0, 256, (rows, *picture), dtype=torch.uint8),
            "future_frames": torch.randint(0, 256, (rows, 2, *picture), dtype=torch.uint8),
        }


class Transport:
    """Counts and copies what a channel would."""

    def __init__(self) -> None:
        self.nbytes = 0

    def dataclass(self, message):
        """As RLinf 0.3.0's channel: top-level tensors as buffers, the rest pickled."""
        tensor_fields, tensors, metadata = extract_dataclass_tensor_fields(message)
        skeleton = pickle.dumps(replace(message, **dict.fromkeys(tensor_fields)))
        self.nbytes += len(skeleton) + sum(tensor.nbytes for tensor in tensors)
        received = unflatten_dataclass_tensor_fields(metadata, [t.clone() for t in tensors])
        return replace(pickle.loads(skeleton), **received)

    def packed(self, message):
        """As a dict of tensors: buffers only."""
        packed = pack_message(message)
        self.nbytes += packed_nbytes(packed)
        return unpack_message({name: tensor.clone() for name, tensor in packed.items()})


def reference_path(pairs, cfg, transport):
    """RLinf 0.3.0: rollout worker, environment worker, actor."""
    collected = collect_source([pairs], cfg, transfer=transport.dataclass)
    trajectories = collected.to_splited_trajectories(1)
    return convert_trajectories_to_batch([transport.dataclass(item) for item in trajectories])


def own_path(pairs, cfg, transport):
    """The interface: policy parts go to the actor, environment parts travel with the requests."""
    geometry = RolloutGeometry.from_world_sizes(cfg, env_world_size=1, actor_world_size=1)
    collector = TrajectoryCollector(TrajectoryPlan(TrajectoryMode.ROLLOUT, geometry))
    collector.setup(ChannelContext(cfg=cfg))
    trajectories = []
    for pair in pairs:
        transport.packed(pair.policy.output.forward_inputs["action"])  # to the environment
        environment_part = transport.packed(pair.env)  # to the rollout worker
        for part in (pair.policy, environment_part):  # to the actor
            outputs = collector.collect(transport.packed(part), "default_queue")
            trajectories += [item for _, item in outputs]
    return Trajectory.to_batch(trajectories)


def measure(path, pairs, cfg, repeats):
    """Batch, bytes and median seconds of a path."""
    seconds = []
    for _ in range(repeats):
        transport = Transport()
        start = time.perf_counter()
        batch = path(pairs, cfg, transport)
        seconds.append(time.perf_counter() - start)
    return batch, transport.nbytes, statistics.median(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", type=int, nargs=2, default=(224, 448), metavar=("H", "W"))
    parser.add_argument("--environments", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    chunk, width = 10, 7
    cfg = run_config(
        env__train__total_num_envs=options.environments,
        env__train__max_steps_per_rollout_epoch=chunk * options.chunks,
        actor__model__num_action_chunks=chunk,
        actor__model__action_dim=width,
    )
    rollouts = MacroStepRollouts(
        rows=options.environments,
        chunk=chunk,
        action_dim=width,
        height=options.image[0],
        width=options.image[1],
        with_values=False,
    )
    pairs = rollouts.epoch(options.chunks)
    paths = {"RLinf 0.3.0": reference_path, "embodied data interface": own_path}
    results = {name: measure(path, pairs, cfg, options.repeats) for name, path in paths.items()}
    batches = [batch for batch, _, _ in results.values()]
    assert batch_values_equal(*[dict(sorted(batch.items())) for batch in batches]), "batches differ"
    macro_steps = options.environments * options.chunks
    print(
        f"{macro_steps} macro-steps, images {options.image[0]}x{options.image[1]}, median of "
        f"{options.repeats}; batches equal bit for bit"
    )
    print(f"{'path':26}{'kB per macro-step':>20}{'ms per macro-step':>20}")
    for name, (_, nbytes, seconds) in results.items():
        print(f"{name:26}{nbytes / macro_steps / 1e3:20.1f}{1e3 * seconds / macro_steps:20.3f}")


if __name__ == "__main__":
    main()
