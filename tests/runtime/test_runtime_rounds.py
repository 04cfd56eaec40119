"""Shares of time in which a component does not work."""

import pytest

from rlinf_wamrl.runtime.rounds import idle_shares, mean_timers


def test_timers_are_averaged_over_ranks_and_named_once():
    ranks = [{"env/reset": 1.0, "env_interact_step": 4.0}, {"env/reset": 3.0}]
    assert mean_timers("env", ranks) == {"env/reset": 2.0, "env/env_interact_step": 2.0}


def test_work_is_what_is_not_idle_and_waits_inside_it_are():
    timers = {
        "env/reset": 1.0,
        "env/env_interact_step": 5.0,
        "env/interact": 9.0,  # with its waits: does not count
        "actor/run_training": 8.0,
        "actor/waiting": 6.0,
        "rollout/predict": 1.0,
    }
    shares = idle_shares(timers, 10.0)
    assert shares == pytest.approx({"idle/env": 0.4, "idle/rollout": 0.9, "idle/actor": 0.8})
