"""Messages of the embodied data interface to test with."""

import torch

from rlinf_wamrl.data.embodied_types import (
    EnvPart,
    EnvTransition,
    PolicyOutput,
    TrajectoryKey,
    TrajectorySource,
)

KEY = TrajectoryKey(1, 0, 0, 0, 0)
OTHER_KEY = TrajectoryKey(1, 0, 1, 0, 0)


def transition(rows: int = 4, chunk: int = 2, **fields) -> EnvTransition:
    values = {
        "rewards": torch.arange(rows * chunk, dtype=torch.float32).reshape(rows, chunk),
        "dones": torch.zeros(rows, chunk, dtype=torch.bool),
        "terminations": torch.zeros(rows, chunk, dtype=torch.bool),
        "truncations": torch.zeros(rows, chunk, dtype=torch.bool),
    }
    return EnvTransition(**{**values, **fields})


def policy_output(rows: int = 4, **fields) -> PolicyOutput:
    forward_inputs = {
        "action": torch.arange(rows * 4.0).reshape(rows, 4),
        "hidden": torch.arange(rows * 2.0).reshape(rows, 2).bfloat16(),
        "nested": {"ids": torch.arange(rows)},
    }
    values = {
        "prev_logprobs": torch.arange(rows * 2.0).reshape(rows, 2),
        "prev_values": torch.arange(rows * 1.0).reshape(rows, 1),
        "versions": torch.zeros(rows, 2),
    }
    return PolicyOutput(forward_inputs=forward_inputs, **{**values, **fields})


def env_part(rows: int = 4, **fields) -> EnvPart:
    values = {
        "sources": [TrajectorySource(KEY, rows)],
        "transition": transition(rows),
        "next_obs": {"states": torch.arange(rows * 3.0).reshape(rows, 3)},
        "requires_inference": True,
        "bootstrap_values": torch.arange(rows * 1.0).reshape(rows, 1),
        "initial_transition": transition(rows),
    }
    return EnvPart(**{**values, **fields})
