"""Types of the embodied data interface, under the module name that RLinf gives them.

Whether they are RLinf's or this package's is decided in :mod:`rlinf_wamrl.data.interface`.
"""

from rlinf_wamrl.data.interface import (
    EnvOutput,
    EnvPart,
    EnvTransition,
    PolicyInput,
    PolicyOutput,
    PolicyPart,
    Trajectory,
    TrajectoryKey,
    TrajectorySource,
    TrajectoryStep,
    merge_batch_values,
    merge_episode_data,
    split_batch_value,
    split_episode_data,
)

__all__ = [
    "EnvOutput",
    "EnvPart",
    "EnvTransition",
    "PolicyInput",
    "PolicyOutput",
    "PolicyPart",
    "Trajectory",
    "TrajectoryKey",
    "TrajectorySource",
    "TrajectoryStep",
    "merge_batch_values",
    "merge_episode_data",
    "split_batch_value",
    "split_episode_data",
]
