"""Rollouts without a learner, whose finished episodes become a dataset."""

from __future__ import annotations

from typing import Any

from rlinf_wamrl.data.interface import RolloutGeometry
from rlinf_wamrl.data.lerobot_dataset import LeRobotWriter
from rlinf_wamrl.data.recorded_episode import Episode
from rlinf_wamrl.runtime.collection import Collection
from rlinf_wamrl.runtime.runner import WAMRunner

__all__ = ["CollectionRunner"]


class CollectionRunner(WAMRunner):
    """Plays rounds of one episode per environment and appends each round to the dataset."""

    def __init__(self, *args: Any, collection: Collection, **kwargs: Any) -> None:
        """Open the dataset.

        Args:
            *args: see :class:`WAMRunner`.
            collection: what to collect.
            **kwargs: see :class:`WAMRunner`.
        """
        super().__init__(*args, **kwargs)
        self._folder = collection.dataset_folder(self.run_folder)
        self._writer = LeRobotWriter(self._folder)
        self._rounds = -(-(collection.episodes or self._episodes) // self._episodes)

    def run(self) -> None:
        """Play the rounds that the dataset does not have yet."""
        geometry = RolloutGeometry.from_cfg(self.cfg)
        shards = geometry.source_count * geometry.shards_per_source
        last = max((row["number"] for row in self._writer.rows), default=-1)
        self.rollout_index = (last + 1 + self._episodes - 1) // self._episodes
        while self.rollout_index < self._rounds:
            self.global_step = self.rollout_index
            with self._phase("rollouts", self._rollout_progress):
                current = self._start_rollouts()
                current.rollout.wait()
                outcome = [
                    ok for part in current.env.wait() for ok in part["success_once"].tolist()
                ]
                received = [self.actor_channel.get() for _ in range(shards)]
            episodes = [Episode.from_frames(frames) for shard in received for frames in shard]
            with self._phase("writing"):
                self._writer.append(sorted(episodes, key=lambda episode: episode.number))
            self.console.line(
                f"round {self.rollout_index}/{self._rounds}  success {sum(outcome)}/{len(outcome)}"
                f"  episodes written {len(episodes)}"
            )
        rows = self._writer.rows
        successes = sum(row["success"] for row in rows)
        if successes:
            self._writer.write_statistics()
        self._close()
        self.console.line(f"{len(rows)} episodes, {successes} successful, in {self._folder}")
