"""Trajectory collection of the embodied data interface, under RLinf's module name.

Whether the names are RLinf's or this package's is decided in :mod:`rlinf_wamrl.data.interface`.
"""

from rlinf_wamrl.data.interface import (
    ChannelContext,
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryMode,
    TrajectoryPlan,
    select_trajectory_collector,
    select_trajectory_dispatcher,
)

__all__ = [
    "ChannelContext",
    "RolloutGeometry",
    "TrajectoryCollector",
    "TrajectoryMode",
    "TrajectoryPlan",
    "select_trajectory_collector",
    "select_trajectory_dispatcher",
]
