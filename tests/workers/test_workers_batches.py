"""Rows of a training batch: what is kept, how it is cut, and that nothing counts twice."""

import math

import pytest
import torch

from rlinf_wamrl.workers.batches import (
    counting_rows,
    executed_steps,
    flatten_time,
    mini_batches,
    per_step_metrics,
    rows_of,
    select_rows,
)


def rollout(T=3, B=4):
    number = torch.arange(T * B).view(T, B)
    return {
        "prev_logprobs": number.view(T, B, 1, 1).float(),
        "advantages": torch.ones(T, B, 1),
        "loss_mask": torch.ones(T, B, 1, dtype=torch.bool),
        "dones": torch.zeros(T + 1, B, 2, dtype=torch.bool),
        "prev_values": None,
        "forward_inputs": {"number": number, "image": number.view(T, B, 1).to(torch.uint8)},
    }


def test_time_is_flattened_first_and_boundaries_lose_their_last_entry():
    rows = flatten_time(rollout())
    assert rows["forward_inputs"]["number"].tolist() == list(range(12))
    assert rows["dones"].shape == (12, 2)
    assert "prev_values" not in rows


def test_rows_count_when_executed_and_when_their_advantage_is_not_zero():
    batch = rollout()
    batch["loss_mask"][2, 0] = False
    batch["advantages"][:, 1] = 0.0
    kept = counting_rows(flatten_time(batch))
    assert kept.tolist() == [0, 2, 3, 4, 6, 7, 10, 11]


def test_mini_batches_cover_every_row_once_and_fill_up_with_rows_that_do_not_count():
    rows = flatten_time(rollout())
    parts = list(mini_batches(rows, 5, 3, torch.Generator().manual_seed(0)))
    assert [rows_of(part) for part in parts] == [5, 5, 5]
    counted = [
        number
        for part in parts
        for number, counts in zip(
            part["forward_inputs"]["number"].tolist(),
            part["loss_mask"].flatten().tolist(),
            strict=True,
        )
        if counts
    ]
    assert sorted(counted) == list(range(12)) and counted != list(range(12))
    assert executed_steps(parts[2]["loss_mask"]) == 2
    assert rows["loss_mask"].all()  # the source is untouched


def test_the_order_without_a_generator_is_kept():
    rows = flatten_time(rollout())
    (part,) = mini_batches(rows, 12, 1)
    assert part["forward_inputs"]["number"].tolist() == list(range(12))


def test_a_rank_with_less_data_takes_as_many_steps():
    rows = select_rows(flatten_time(rollout()), torch.tensor([3]))
    parts = list(mini_batches(rows, 2, 4))
    assert [executed_steps(part["loss_mask"]) for part in parts] == [1, 0, 0, 0]


def test_batches_that_cannot_be_cut_say_so():
    rows = flatten_time(rollout())
    with pytest.raises(ValueError, match="do not fit"):
        list(mini_batches(rows, 5, 2))
    with pytest.raises(ValueError, match="without rows"):
        list(mini_batches(select_rows(rows, torch.zeros(0, dtype=torch.int64)), 5, 2))
    assert list(mini_batches(rows, 5, 0)) == []


def test_metrics_are_split_by_stochastic_step():
    rows = {
        "forward_inputs": {"k_star": torch.tensor([[0], [0], [2], [2]])},
        "prev_logprobs": torch.zeros(4, 1, 1),
        "loss_mask": torch.tensor([[True], [True], [True], [False]]),
    }
    new = torch.log(torch.tensor([1.0, 1.5, 0.9, 9.0])).view(4, 1, 1)
    metrics = per_step_metrics(rows, new)
    assert metrics["actor/ratio_k0"] == pytest.approx(1.25)
    assert metrics["actor/off_by_a_fifth_k0"] == 0.5
    assert metrics["actor/ratio_k2"] == pytest.approx(0.9)
    assert metrics["actor/approx_kl_k3_k2"] == pytest.approx(0.9 - 1 - math.log(0.9), abs=1e-7)
    rows["forward_inputs"]["k_star"] = torch.zeros(4, 2, dtype=torch.int64)
    assert per_step_metrics(rows, new) == {}
