"""How nested messages travel on RLinf's channels: as flat dicts of tensors, never pickled.

RLinf sends a dict of tensors as raw buffers; a dataclass nested in another would be pickled with
its images.
"""

from __future__ import annotations

from typing import Any

from rlinf.scheduler import merge_batches, split_batch

from rlinf_wamrl.data.interface import PolicyInput
from rlinf_wamrl.data.wire import pack_message, unpack_message

__all__ = [
    "merge_observations",
    "merge_requests",
    "observation_rows",
    "pack_observation_shards",
    "pack_request_shards",
    "request_rows",
    "unpack_request",
]


def pack_request_shards(request: PolicyInput, sizes: list[int]) -> list[dict[str, Any]]:
    """Split a request for several receivers and pack each shard."""
    return [pack_message(shard) for shard in request.split(sizes)]


def pack_observation_shards(observation: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Split an observation dict for several receivers and pack each shard."""
    return [pack_message(shard) for shard in split_batch(observation, sizes)]


def request_rows(packed: dict[str, Any]) -> int:
    """Return the batch size of a packed request."""
    return sum(unpack_message(packed).request_sizes)


def merge_requests(packed: list[dict[str, Any]]) -> PolicyInput:
    """Join the shards that several senders made."""
    return PolicyInput.merge([unpack_message(shard) for shard in packed])


def observation_rows(packed: dict[str, Any]) -> int:
    """Return the batch size of a packed observation."""
    return unpack_message(packed)["states"].shape[0]


def merge_observations(packed: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the observation shards that several senders made."""
    return merge_batches([unpack_message(shard) for shard in packed])


def unpack_request(received: Any) -> Any:
    """Unpack what arrived from one sender; what :func:`merge_requests` joined is ready."""
    return received if isinstance(received, PolicyInput) else unpack_message(received)
