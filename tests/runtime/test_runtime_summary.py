"""What the terminal says about the course of evaluations."""

import pytest

from rlinf_wamrl.runtime.summary import falling_message


@pytest.mark.parametrize(
    "successes",
    [[], [60], [60, 55], [60, 70, 65], [60, 55, 55], [60, 50, 70, 65]],
)
def test_one_step_back_is_no_fall(successes):
    assert falling_message([(count, 120) for count in successes]) is None


def test_falling_twice_in_a_row_is_said_with_what_to_do():
    text = falling_message([(50, 120), (66, 120), (63, 120), (60, 120)])
    assert "55% -> 52% -> 50%" in text and "lower RL.action_lr" in text


def test_a_fall_beyond_chance_is_said_at_once():
    # 95 % intervals: 88 of 120 from 65 % on, 53 of 120 up to 53 %
    assert "73% -> 44%" in falling_message([(60, 120), (88, 120), (53, 120)])
