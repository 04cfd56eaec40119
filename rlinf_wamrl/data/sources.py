"""Identity of the data that travels: which chunk of which environment source, and which rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["TrajectoryKey", "TrajectorySource"]


@dataclass(frozen=True)
class TrajectoryKey:
    """Identity of one action chunk produced by a logical environment source."""

    step_id: int  # training iteration
    epoch_id: int  # rollout epoch inside the iteration
    env_rank: int  # environment worker
    stage_id: int  # pipeline stage of that worker
    chunk_id: int  # action chunk inside the epoch


@dataclass(frozen=True)
class TrajectorySource:
    """Trajectory key and rows carried by one routed source shard."""

    key: TrajectoryKey
    size: int  # rows in this shard
    offset: int = 0  # first of these rows inside the whole source

    @classmethod
    def split(
        cls, sources: list[TrajectorySource], split_sizes: list[int]
    ) -> list[list[TrajectorySource]]:
        """Split routed source metadata as the batch they describe is split.

        Args:
            sources: Sources in batch order; none at all stands for a batch without identity.
            split_sizes: Rows of each shard.

        Returns:
            The sources of each shard. Offsets count from the start of the whole source, also after
            several splits.

        Raises:
            ValueError: The rows of the sources and of the shards differ.
        """
        if not sources:
            return [[] for _ in split_sizes]
        total = sum(source.size for source in sources)
        if total != sum(split_sizes):
            raise ValueError(f"cannot split sources of {total} rows into {list(split_sizes)}.")
        shards: list[list[TrajectorySource]] = []
        remaining = iter(sources)
        current = next(remaining)
        for size in split_sizes:
            shard = []
            while size > 0:
                if current.size == 0:
                    current = next(remaining)
                    continue
                taken = min(size, current.size)
                shard.append(replace(current, size=taken))
                current = replace(current, size=current.size - taken, offset=current.offset + taken)
                size -= taken
            shards.append(shard)
        return shards

    @classmethod
    def merge(cls, source_groups: list[list[TrajectorySource]]) -> list[TrajectorySource]:
        """Merge adjacent shards in the given order, without sorting.

        Two neighbours become one when they are of one key and the second starts where the first
        ends; other boundaries are kept.
        """
        merged: list[TrajectorySource] = []
        for source in (source for group in source_groups for source in group):
            previous = merged[-1] if merged else None
            if (
                previous is not None
                and previous.key == source.key
                and previous.offset + previous.size == source.offset
            ):
                merged[-1] = replace(previous, size=previous.size + source.size)
            else:
                merged.append(source)
        return merged
