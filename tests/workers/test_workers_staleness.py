"""How old the weights are that collected a batch: recorded, and bounded."""

import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.workers.learner import WAMLearner


def learner(version, threshold, interval=1):
    made = WAMLearner.__new__(WAMLearner)
    made.version = version
    made.cfg = OmegaConf.create(
        {
            "algorithm": {"staleness_threshold": threshold},
            "runner": {"weight_sync_interval": interval},
        }
    )
    return made


def rows(*versions):
    return {"versions": torch.tensor(versions, dtype=torch.float32).view(-1, 1, 1)}


def test_mean_and_largest_staleness_are_recorded():
    metrics = {}
    assert learner(7, 1)._staleness(rows(7, 6, 6, 7), metrics) == 1
    assert metrics == {"actor/staleness": [0.5], "actor/staleness_max": [1.0]}


@pytest.mark.parametrize(("threshold", "interval", "allowed"), [(0, 1, 0), (1, 1, 1), (1, 3, 3)])
def test_older_weights_than_the_bound_end_the_run_in_words(threshold, interval, allowed):
    made = learner(9, threshold, interval)
    assert made._staleness(rows(9 - allowed), {}) == allowed
    with pytest.raises(RuntimeError, match=f"{allowed + 1} updates ago, more than the {allowed} "):
        made._staleness(rows(9 - allowed - 1), {})
