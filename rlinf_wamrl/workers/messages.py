"""How nested messages travel on RLinf's channels: as flat dicts of tensors, never pickled.

RLinf sends a dict of tensors as raw buffers; a dataclass nested in another would be pickled with
its images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf.scheduler import Channel, Worker, merge_batches, split_batch

from rlinf_wamrl.data.interface import PolicyInput
from rlinf_wamrl.data.wire import pack_message, unpack_message

__all__ = [
    "pack_observation_shards",
    "pack_request_shards",
    "receive_observation",
    "receive_request",
]


def pack_request_shards(request: PolicyInput, sizes: list[int]) -> list[dict[str, Any]]:
    """Split a request for several receivers and pack each shard."""
    return [pack_message(shard) for shard in request.split(sizes)]


def pack_observation_shards(observation: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Split an observation dict for several receivers and pack each shard."""
    return [pack_message(shard) for shard in split_batch(observation, sizes)]


async def receive_request(
    worker: Worker, channel: Channel, tag: str, stage: int, batch_size: int
) -> PolicyInput:
    """Wait for the ``batch_size`` rows of a pipeline stage's next request."""
    received = await _receive(
        worker, channel, tag, stage, batch_size, merge=_merge_requests, rows=_request_rows
    )
    return received if isinstance(received, PolicyInput) else unpack_message(received)


async def receive_observation(
    worker: Worker, channel: Channel, tag: str, stage: int, batch_size: int
) -> dict[str, Any]:
    """Wait for the ``batch_size`` rows of a pipeline stage's next observation dict."""
    received = await _receive(
        worker, channel, tag, stage, batch_size, merge=_merge_observations, rows=_observation_rows
    )
    return received if "states" in received else unpack_message(received)


async def _receive(
    worker: Worker,
    channel: Channel,
    tag: str,
    stage: int,
    batch_size: int,
    *,
    merge: Callable[[list[dict[str, Any]]], Any],
    rows: Callable[[dict[str, Any]], int],
) -> Any:
    """Return what one env worker sent, still packed, or what several sent, merged."""
    return await worker.recv_from(
        group_name=worker.cfg.env.group_name,
        channel=channel,
        tag=tag,
        route_key=stage,
        async_op=True,
        batch_size=batch_size,
        merge_fn=merge,
        infer_batch_size_fn=rows,
    ).async_wait()


def _request_rows(packed: dict[str, Any]) -> int:
    return sum(unpack_message(packed).request_sizes)


def _merge_requests(packed: list[dict[str, Any]]) -> PolicyInput:
    return PolicyInput.merge([unpack_message(shard) for shard in packed])


def _observation_rows(packed: dict[str, Any]) -> int:
    return unpack_message(packed)["states"].shape[0]


def _merge_observations(packed: list[dict[str, Any]]) -> dict[str, Any]:
    return merge_batches([unpack_message(shard) for shard in packed])
