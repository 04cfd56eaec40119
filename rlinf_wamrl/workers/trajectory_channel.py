"""A channel whose queue side joins trajectory parts, for RLinf releases without such a channel.

Producers put ``PolicyPart`` and ``EnvPart``; consumers get what the collector emits: trajectories,
micro-batches or episodes. So each tensor travels twice (producer to channel, channel to consumer),
as in any RLinf channel.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker
from rlinf.scheduler.channel.channel_worker import ChannelWorker, WeightedItem

from rlinf_wamrl.data.interface import ChannelContext, select_trajectory_collector
from rlinf_wamrl.data.wire import unpack_message

__all__ = ["PROGRESS_KEY", "CollectingChannelWorker", "create_trajectory_channel"]

PROGRESS_KEY = "progress"
"""Items under this key are ``(rank, episodes ended, successes)`` of the current phase."""


class CollectingChannelWorker(ChannelWorker):
    """RLinf's channel worker with a trajectory collector between put and queue."""

    def __init__(self, maxsize: int = 0, cfg: DictConfig | None = None) -> None:
        """Create the queues and set the collector up for the run ``cfg``."""
        super().__init__(maxsize)
        self._collector = select_trajectory_collector(cfg)()
        self._collector.setup(ChannelContext(name=self._group_name, cfg=cfg))
        self._progress: dict[int, list[int]] = {}
        self._error: Exception | None = None

    async def put(self, src_addr: Any, nowait: bool = False) -> None:
        """Receive one part and queue whatever it completes."""
        item, (key, _) = self.recv(src_addr.root_group_name, src_addr.rank_path)
        if key == PROGRESS_KEY:
            rank, *counts = item
            self._progress[rank] = counts
            return
        try:
            outputs = list(self._collector.collect(unpack_message(item), key))
        except Exception as error:
            self._error = error  # nobody awaits a put: whoever asks for progress learns of it
            raise
        for out_key, output in outputs:
            self.create_queue(out_key, self.maxsize())
            await self._queue_map[out_key].put(WeightedItem(weight=0, item=output))

    def progress(self) -> tuple[int, int]:
        """Return the episodes that ended and the successes among them, over all env ranks.

        Raises:
            Exception: what the collector raised about a part that was put.
        """
        if self._error is not None:
            raise self._error
        episodes = sum(counts[0] for counts in self._progress.values())
        return episodes, sum(counts[1] for counts in self._progress.values())

    def finish_step(self, step_id: int) -> list[str]:
        """Drop what was put for a step that is over and joined nothing; returns it in words.

        RLinf's own collector, where it has one, keeps no account of that.
        """
        if not hasattr(self._collector, "finish_step"):
            return []
        return [f"{part.key}: {part.reason}" for part in self._collector.finish_step(step_id)]


def create_trajectory_channel(name: str, cfg: DictConfig) -> Channel:
    """Launch a collecting channel on node 0 and return a handle like ``Channel.create`` does."""
    group = CollectingChannelWorker.create_group(0, cfg).launch(
        cluster=Cluster(),
        name=name,
        placement_strategy=NodePlacementStrategy(node_ranks=[0]),
        max_concurrency=2**31 - 1,
        disable_distributed_log=True,
    )
    actors = {info.rank: info.worker for info in group.worker_info_list}
    channel = Channel()
    channel._initialize(
        channel_name=name,
        channel_worker_group=group,
        channel_worker_actor=actors[0],
        current_worker=Worker.current_worker,
        channel_actors=actors,
    )
    return channel
