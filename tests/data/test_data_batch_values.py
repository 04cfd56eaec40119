"""Splitting and merging lose nothing under any partition of a batch."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_wamrl.data.batch_values import (
    batch_values_equal,
    merge_batch_values,
    merge_episode_data,
    move_to_cpu,
    split_batch_value,
    split_episode_data,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@st.composite
def partitions(draw, max_rows: int = 7):
    """Sizes of consecutive shards, empty ones included, and their total."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return sizes if sum(sizes) <= max_rows else sizes[:2]


@st.composite
def batches(draw, rows: int, depth: int = 2):
    """A nested batch value with the given rows."""
    kinds = ["tensor", "array", "list", "scalar", "none"] + (["dict"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "tensor":
        dtype = draw(st.sampled_from(DTYPES))
        trailing = draw(st.lists(st.integers(1, 3), max_size=2))
        values = torch.arange(rows * int(np.prod(trailing, dtype=int))).reshape(rows, *trailing)
        return (values % 2 if dtype is torch.bool else values).to(dtype)
    if kind == "array":
        return np.arange(rows * 2, dtype=draw(st.sampled_from(["f4", "i8", "u1"]))).reshape(rows, 2)
    if kind == "list":
        return [f"task {index}" for index in range(rows)]
    if kind == "scalar":
        return draw(st.sampled_from([True, 3, 0.5, "text"]))
    if kind == "none":
        return None
    keys = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
    return {key: draw(batches(rows, depth - 1)) for key in keys}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_merge_inverts_split_for_every_partition(data):
    sizes = data.draw(partitions())
    value = data.draw(batches(sum(sizes)))
    shards = split_batch_value(value, sizes)
    assert len(shards) == len(sizes)
    assert batch_values_equal(merge_batch_values(shards), value)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_shards_survive_pickling(data):
    sizes = data.draw(partitions())
    value = data.draw(batches(sum(sizes)))
    for shard in split_batch_value(value, sizes):
        assert batch_values_equal(pickle.loads(pickle.dumps(shard)), shard)


@given(sizes=partitions(), steps=st.integers(0, 3), with_mask=st.booleans())
@settings(max_examples=60, deadline=None)
def test_episode_payloads_split_rows_and_keep_steps(sizes, steps, with_mask):
    rows = sum(sizes)
    payload = {
        "chunk_actions": torch.arange(rows * 4.0).reshape(rows, 2, 2),
        "obs_list": [
            {"states": torch.full((rows, 1), float(step)), "task_descriptions": ["t"] * rows}
            for step in range(steps)
        ],
        "terminations": torch.zeros(rows, 2, dtype=torch.bool),
        "truncations": torch.ones(rows, 2, dtype=torch.bool),
        "infos_list": [{"episode": {"success": torch.ones(rows)}} for _ in range(steps)],
        "valid_action_mask": torch.ones(rows, 2, dtype=torch.bool) if with_mask else None,
    }
    shards = split_episode_data(payload, sizes)
    assert [len(shard["chunk_actions"]) for shard in shards] == sizes
    assert all(len(shard["obs_list"]) == steps for shard in shards)
    assert batch_values_equal(merge_episode_data(shards), payload)


def test_absent_mask_of_a_payload_counts_as_none():
    payload = {
        "chunk_actions": torch.zeros(2, 1),
        "obs_list": [],
        "terminations": torch.zeros(2),
        "truncations": torch.zeros(2),
        "infos_list": [],
    }
    assert split_episode_data(payload, [1, 1])[0]["valid_action_mask"] is None
    assert split_episode_data(None, [1, 1]) == [None, None]


def test_payloads_of_different_lengths_do_not_merge():
    shards = [
        {
            "chunk_actions": torch.zeros(1, 1),
            "obs_list": [{}] * steps,
            "terminations": torch.zeros(1),
            "truncations": torch.zeros(1),
            "infos_list": [{}] * steps,
        }
        for steps in (1, 2)
    ]
    with pytest.raises(ValueError, match="obs_list has different lengths"):
        merge_episode_data(shards)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_episode_data([])


@pytest.mark.parametrize(
    ("value", "sizes", "error", "words"),
    [
        (torch.zeros(3), [1, 1], ValueError, r"3 rows into \[1, 1\]"),
        ({"a": {"b": torch.zeros(3)}}, [4], ValueError, r"value\['a'\]\['b'\]"),
        ([1, 2], [1], ValueError, "2 rows"),
        (torch.tensor(1.0), [1], ValueError, "None rows"),
        (torch.zeros(2), [3, -1], ValueError, "negative"),
        (object(), [1], TypeError, "object has no rows"),
        ({"a": {1, 2}}, [2], TypeError, "set has no rows"),
    ],
)
def test_impossible_splits_are_named(value, sizes, error, words):
    with pytest.raises(error, match=words):
        split_batch_value(value, sizes)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ([], ValueError, "nothing to merge"),
        ([None, torch.zeros(1)], ValueError, "1 of 2 shards are None"),
        ([{"a": 1}, {"b": 1}], ValueError, r"keys \['a', 'b'\]"),
        ([{"a": 1}, {"a": 2}], ValueError, "conflicting scalar"),
        ([torch.zeros(1), torch.zeros(1).bfloat16()], ValueError, "different dtypes"),
        ([torch.zeros(1), [1]], TypeError, "Tensor and list"),
        ([object(), object()], TypeError, "object has no rows"),
    ],
)
def test_impossible_merges_are_named(values, error, words):
    with pytest.raises(error, match=words):
        merge_batch_values(values)


def test_all_none_merges_to_none():
    assert merge_batch_values([None, None]) is None


def test_moving_to_the_cpu_keeps_containers_and_tensor_identity():
    tensor = torch.arange(6.0).reshape(2, 3)
    value = {"a": tensor, "b": {"c": tensor.T, "d": [tensor, "text"]}, "e": (tensor, 1)}
    moved = move_to_cpu(value)
    assert moved is value
    assert moved["a"] is tensor and moved["b"]["d"][0] is tensor and moved["e"][0] is tensor
    assert moved["b"]["c"].is_contiguous()
    assert torch.equal(moved["b"]["c"], tensor.T)


def test_equality_is_of_bits():
    nan = torch.tensor([float("nan")])
    assert batch_values_equal(nan, nan.clone())
    assert not batch_values_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not batch_values_equal(torch.zeros(1), torch.zeros(1).double())
    assert not batch_values_equal({"a": 1}, {"a": 1, "b": None})
