"""The record of a macro-step is checked, in words, where it changes hands."""

import dataclasses

import pytest
import torch

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_types import EnvTransition
from rlinf_wamrl.data.macro_step import MacroStep, RecordSpec

SPEC = RecordSpec(
    image_size=(4, 8),
    proprio_dim=3,
    denoising_steps=5,
    action_horizon=6,
    action_dim=2,
    executed_actions=3,
)


def record(*batch: int, steps: int = 1) -> dict[str, torch.Tensor]:
    single = () if steps == 1 else (steps,)
    return {
        "image": torch.randint(0, 256, (*batch, 3, 4, 8), dtype=torch.uint8),
        "proprio": torch.zeros(*batch, 3),
        "task_id": torch.zeros(batch, dtype=torch.int64),
        "seed": torch.ones(batch, dtype=torch.int32),
        "group_id": torch.zeros(batch, dtype=torch.int64),
        "chain": torch.zeros(*batch, 6, 6, 2),
        "k_star": torch.full((*batch, *single), 4),
        "logp_old": torch.zeros(*batch, steps),
        "future_frames": torch.zeros(*batch, 2, 3, 4, 8, dtype=torch.uint8),
        "future_frames_exist": torch.ones(*batch, 2, dtype=torch.bool),
        "action": torch.zeros(*batch, 6),
    }


def outcome(*batch: int) -> dict[str, torch.Tensor]:
    rewards = torch.zeros(*batch, 3)
    dones = torch.zeros(*batch, 3, dtype=torch.bool)
    rewards[..., 1], dones[..., 1] = 1.0, True
    return {"rewards": rewards, "dones": dones}


@pytest.mark.parametrize("batch", [(1,), (4,), (2, 3)])
def test_a_record_is_viewed_with_any_batch(batch):
    inputs = record(*batch)
    step = MacroStep.from_record(inputs, **outcome(*batch), spec=SPEC)
    assert step.batch_shape == batch
    assert step.image is inputs["image"] and step.chain is inputs["chain"]
    assert (step.r_task == 1).all() and step.done.all() and step.r_task.dtype == torch.float32
    assert step.executed_mask is None and step.A_hat is None


def test_the_fields_are_those_of_the_record():
    names = {field.name for field in dataclasses.fields(MacroStep)}
    documented = "image proprio task_id seed group_id chain k_star logp_old future_frames"
    assert names >= {*documented.split(), "r_task", "done", "r_rec", "R", "A_hat"}


def test_a_record_goes_through_the_wire_format_and_back():
    step = MacroStep.from_record(record(2), **outcome(2), spec=SPEC)
    inputs = step.to_forward_inputs()
    assert all(isinstance(value, torch.Tensor) for value in inputs.values())
    assert "action" not in inputs and "r_task" not in inputs
    again = MacroStep.from_record(inputs, **outcome(2), spec=SPEC)
    assert batch_values_equal(again, step)


def test_the_two_halves_of_a_chunk_make_a_record():
    mask = torch.tensor([[True, True, False]])
    transition = EnvTransition(**outcome(1), executed_mask=mask)
    step = MacroStep.from_transition(record(1), transition, SPEC)
    assert step.executed_mask is mask
    with pytest.raises(ValueError, match="needs rewards and dones"):
        MacroStep.from_transition(record(1), EnvTransition(), SPEC)


def test_several_stochastic_steps():
    spec = dataclasses.replace(SPEC, stochastic_steps=2)
    step = MacroStep.from_record(record(3, steps=2), **outcome(3), spec=spec)
    assert step.k_star.shape == step.logp_old.shape == (3, 2)
    with pytest.raises(ValueError, match=r"k_star must be \[3, 2\]"):
        MacroStep.from_record(record(3), **outcome(3), spec=spec)


def test_a_single_stochastic_step_may_come_with_its_dimension():
    inputs = record(3)
    inputs["k_star"] = inputs["k_star"].unsqueeze(-1)
    assert MacroStep.from_record(inputs, **outcome(3), spec=SPEC).k_star.shape == (3,)


def test_the_learner_adds_its_targets():
    step = MacroStep.from_record(record(2), **outcome(2), spec=SPEC)
    done = step.with_learning_targets(SPEC, r_rec=torch.zeros(2), R=torch.ones(2))
    done = done.with_learning_targets(SPEC, A_hat=torch.ones(2))
    assert done.R is not None and done.A_hat is not None and step.R is None
    with pytest.raises(ValueError, match=r"A_hat must be \[2\]"):
        step.with_learning_targets(SPEC, A_hat=torch.ones(2, 1))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("image", torch.zeros(2, 3, 4, 8), "image must be torch.uint8, got torch.float32"),
        (
            "image",
            torch.zeros(2, 4, 8, 3, dtype=torch.uint8),
            r"image must be \[2, 3, 4, 8\] \(batch \[2\], then \[3, 4, 8\]\), got \[2, 4, 8, 3\]",
        ),
        ("chain", torch.zeros(2, 5, 6, 2), r"chain must be \[2, 6, 6, 2\]"),
        ("chain", torch.zeros(2, 6, 6, 2).bfloat16(), "chain must be torch.float32"),
        ("logp_old", torch.zeros(2), r"logp_old must be \[2, 1\]"),
        ("logp_old", torch.full((2, 1), float("nan")), "logp_old holds values that are not finite"),
        ("k_star", torch.tensor([0, 5]), r"k_star must be in 0 .. 4, got 0 .. 5"),
        ("k_star", torch.zeros(2), "k_star must be torch.int64 or torch.int32"),
        ("proprio", [0.0], "proprio must be torch.float32, got list"),
        ("task_id", torch.zeros(3, dtype=torch.int64), r"image must be \[3, 3, 4, 8\]"),
        ("video_latents", torch.zeros(2, 1).half(), "RecordSpec has no size for it"),
    ],
)
def test_a_wrong_field_is_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        MacroStep.from_record({**record(2), field: value}, **outcome(2), spec=SPEC)


def test_missing_fields_are_listed():
    inputs = record(2)
    del inputs["chain"], inputs["group_id"]
    with pytest.raises(ValueError, match=r"lacks \['group_id', 'chain'\]"):
        MacroStep.from_record(inputs, **outcome(2), spec=SPEC)


def test_imagined_video_travels_in_half_precision():
    spec = dataclasses.replace(SPEC, video_latents_shape=(4, 3, 2, 2))
    inputs = {**record(2), "video_latents": torch.zeros(2, 4, 3, 2, 2).half()}
    step = MacroStep.from_record(inputs, **outcome(2), spec=spec)
    assert "video_latents" in step.to_forward_inputs()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proprio_dim": 0}, "proprio_dim must be positive"),
        ({"executed_actions": 7}, r"executed_actions \(7\) is longer than the horizon \(6\)"),
        ({"stochastic_steps": 6}, r"stochastic_steps \(6\) exceeds the denoising_steps \(5\)"),
        ({"future_frames": -1}, "must be >= 0"),
    ],
)
def test_impossible_sizes_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SPEC, **options)


def test_the_default_sizes_are_fastwams_on_libero():
    layout = RecordSpec().layout()
    assert layout["image"] == ((torch.uint8,), (3, 224, 448))
    assert layout["chain"][1] == (11, 32, 7) and layout["future_frames"][1] == (2, 3, 224, 448)
