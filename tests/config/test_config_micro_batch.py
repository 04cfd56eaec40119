"""``actor.micro_batch_size: auto`` against the memory plan, and in words where it cannot be."""

from dataclasses import replace

import pytest
from tiny_run import EXAMPLES, compose_5b

from rlinf_wamrl.config.checkpoints import resolve_checkpoint
from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.wam.memory import GIB, plan_memory, run_setup

AUTO = "actor.micro_batch_size=auto"


def compose(*overrides):
    return compose_run(EXAMPLES / "libero_wamrl.yaml", [AUTO, *overrides])


def test_with_room_for_it_a_mini_batch_is_one_micro_batch():
    run = compose("actor.memory_gib=20")
    assert run.actor.micro_batch_size == run.actor.global_batch_size == 128


def test_without_a_given_amount_the_machine_is_asked():
    assert 128 % compose().actor.micro_batch_size == 0


@pytest.mark.parametrize("gib", [58, 60, 70])
def test_the_largest_divisor_that_fits_is_taken(tmp_path, gib):
    run = compose_5b("libero_wamrl_5b_1gpu", tmp_path, AUTO, f"actor.memory_gib={gib}")
    config, chosen = resolve_checkpoint(run.actor.model).config, run.actor.micro_batch_size
    setup = run_setup(run, 1)

    def total(size):
        return plan_memory(config, replace(setup, micro_batch=size)).total("PPO step")

    divisors = [size for size in range(1, 257) if 256 % size == 0]
    fitting = [size for size in divisors if total(size) <= gib * GIB]
    assert chosen == (fitting[-1] if fitting else None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.memory_gib=0.5"], r"a single macro-step needs [\d.]+ GiB .* there are 0.5"),
        (["runner.use_training_pipeline=true"], "travel in micro-batches: give a number"),
        (["actor.micro_batch_size=most"], "must be a number or 'auto', got 'most'"),
        (["actor.global_batch_size=0"], "actor.global_batch_size = 0 must be a positive multiple"),
    ],
)
def test_what_cannot_be_is_said(overrides, words):
    with pytest.raises(ConfigError, match=words):
        compose(*overrides)
