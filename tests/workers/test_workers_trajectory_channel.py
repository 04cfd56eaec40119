"""What the collecting channel does when a part cannot be joined."""

import asyncio
from types import SimpleNamespace

import pytest

from rlinf_wamrl.data.trajectory_join import UnjoinedPart
from rlinf_wamrl.data.wire import pack_message
from rlinf_wamrl.workers.trajectory_channel import CollectingChannelWorker


class RefusingCollector:
    def collect(self, item, key):
        raise ValueError(f"a second, different copy of {item!r} for {key}")


class LosingCollector:
    def finish_step(self, step_id):
        return [UnjoinedPart(f"chunk 3 of step {step_id}", "policy part is missing")]


def test_a_part_that_cannot_be_joined_is_told_to_whoever_asks_for_progress():
    channel = CollectingChannelWorker.__new__(CollectingChannelWorker)
    channel._collector = RefusingCollector()
    channel._progress = {}
    channel._error = None
    sender = SimpleNamespace(root_group_name="env", rank_path="0")

    channel.recv = lambda *_: ((0, 3, 1), ("progress", 0))
    asyncio.run(channel.put(sender))
    assert channel.progress() == (3, 1)

    channel.recv = lambda *_: (pack_message("part"), ("actor_0", 0))
    with pytest.raises(ValueError, match="second, different copy"):
        asyncio.run(channel.put(sender))
    with pytest.raises(ValueError, match="'part' for actor_0"):
        channel.progress()


def test_what_joined_nothing_in_a_step_is_told_and_a_collector_without_account_tells_nothing():
    channel = CollectingChannelWorker.__new__(CollectingChannelWorker)
    channel._collector = LosingCollector()
    assert channel.finish_step(7) == ["chunk 3 of step 7: policy part is missing"]
    channel._collector = RefusingCollector()
    assert channel.finish_step(7) == []
