"""Packed messages carry every tensor once and come back the same."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rollout import Rollouts

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_types import PolicyInput, PolicyOutput, TrajectoryKey
from rlinf_wamrl.data.wire import pack_message, packed_nbytes, unpack_message

KEY = TrajectoryKey(0, 0, 0, 0, 0)


@given(rows=st.integers(1, 5), image=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_messages_come_back_equal(rows, image, seed):
    pair = Rollouts(seed=seed, rows=rows, image=image).pair(KEY)
    request = PolicyInput(
        obs={"states": torch.ones(rows, 2).bfloat16(), "task_descriptions": ["t"] * rows},
        sources=pair.env.sources,
        env_parts=[pair.env],
        request_sizes=[rows],
    )
    for message in (pair.policy, pair.env, request):
        packed = pack_message(message)
        assert all(isinstance(tensor, torch.Tensor) for tensor in packed.values())
        assert all(tensor.is_contiguous() for tensor in packed.values())
        assert batch_values_equal(unpack_message(packed), message)


def test_tensors_are_not_copied_and_travel_once():
    action = torch.zeros(4, 100)
    output = PolicyOutput(forward_inputs={"action": action, "model_action": action})
    packed = pack_message(output)
    tensors = [tensor for name, tensor in packed.items() if name != "skeleton"]
    assert len(tensors) == 1 and tensors[0] is action
    again = unpack_message(packed)
    assert again.forward_inputs["action"] is again.forward_inputs["model_action"] is action


def test_a_shard_travels_as_its_rows():
    part = Rollouts(rows=8, image=32).pair(KEY).policy.output
    whole = packed_nbytes(pack_message(part))
    shards = [packed_nbytes(pack_message(shard)) for shard in part.split([4, 4])]
    skeletons = sum(len(pack_message(s)["skeleton"]) for s in part.split([4, 4]))
    assert sum(shards) - skeletons == whole - len(pack_message(part)["skeleton"])


@pytest.mark.parametrize("message", [{"a": [1, "x", None]}, (), torch.zeros(0, 3), torch.tensor(1)])
def test_anything_picklable_can_be_packed(message):
    assert batch_values_equal(unpack_message(pack_message(message)), message)


def test_the_skeleton_is_small():
    pair = Rollouts(rows=8, image=64).pair(KEY)
    packed = pack_message(pair.policy)
    assert len(packed["skeleton"]) < 1500
    assert packed_nbytes(packed) < len(pickle.dumps(pair.policy))
