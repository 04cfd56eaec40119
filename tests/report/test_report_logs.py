"""Logs of runs, read back: resumed runs are joined, what is missing is said."""

import pytest
from run_folders import append, write_run

from rlinf_wamrl.report.logs import read_run


def test_a_run_is_measured_in_episodes_and_in_minutes_of_training(tmp_path):
    run = read_run(write_run(tmp_path / "a", resampled={2: 1}))
    assert [run.episodes(iteration) for iteration in range(5)] == [0, 8, 24, 32, 40]
    assert [run.minutes(iteration) for iteration in range(5)] == [0, 0.5, 1.0, 1.5, 2.0]
    assert run.evaluation(4).per_task == {0: (77, 120)}
    assert run.evaluation(3) is None


def test_iterations_done_again_in_the_same_folder_count_once(tmp_path):
    folder = write_run(tmp_path / "a", iterations=range(1, 5), metrics={"x": [1, 2, 3, 4]})
    again = {4: {0: (10, 120)}, 6: {0: (11, 120)}}
    write_run(folder, iterations=range(3, 7), evaluations=again, metrics={"x": [30, 40, 50, 60]})
    run = read_run(folder)
    assert [row["x"] for row in run.iterations] == [1, 2, 30, 40, 50, 60]
    found = [(one.iteration, one.per_task[0][0]) for one in run.evaluations]
    assert found == [(0, 46), (4, 10), (6, 11)]


def test_a_run_goes_on_from_another_folder(tmp_path):
    first = write_run(tmp_path / "a", metrics={"x": [1, 2, 3, 4]})
    (first / "checkpoints/global_step_2").mkdir(parents=True)
    second = write_run(
        tmp_path / "b",
        f"runner.resume_dir={first}/checkpoints/global_step_2",
        iterations=range(3, 6),
        evaluations={5: {0: (90, 120)}},
        metrics={"x": [30, 40, 50]},
    )
    run = read_run(second)
    assert [row["x"] for row in run.iterations] == [1, 2, 30, 40, 50]
    assert [one.iteration for one in run.evaluations] == [0, 5]  # not the first run's after 4
    moved = tmp_path / "moved"
    moved.mkdir()
    first.rename(moved / "a")
    with pytest.raises(FileNotFoundError, match="begins at iteration 3 and goes on from .*/a"):
        read_run(second)
    second.rename(moved / "b")
    assert len(read_run(moved / "b").iterations) == 5


def test_an_evaluation_alone_in_the_same_folder_is_no_part_of_training(tmp_path):
    folder = write_run(tmp_path / "a")
    alone = {"iteration": 0, "title": "evaluation", "per_task": {"0": [1, 120]}}
    append(folder / "evaluations.jsonl", [alone])
    assert [one.iteration for one in read_run(folder).evaluations] == [0, 4]


@pytest.mark.parametrize("name", ["config.yaml", "iterations.jsonl", "evaluations.jsonl"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_run(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{folder / name} does not exist"):
        read_run(folder)


def test_damaged_logs_are_named(tmp_path):
    folder = write_run(tmp_path / "a")
    whole = (folder / "iterations.jsonl").read_text()
    (folder / "iterations.jsonl").write_text(whole[:-20])
    with pytest.raises(ValueError, match="iterations.jsonl, line 4 is no whole record"):
        read_run(folder)
    (folder / "iterations.jsonl").write_text("")
    with pytest.raises(ValueError, match="iterations.jsonl is empty"):
        read_run(folder)
    (folder / "iterations.jsonl").write_text('{"iteration": 1, "rollout/episodes": 8}\n')
    with pytest.raises(ValueError, match="line 1 lacks rollout/resampled, time/episodes_per_hour"):
        read_run(folder)
    lines = whole.splitlines(keepends=True)
    (folder / "iterations.jsonl").write_text(lines[0] + "".join(lines[2:]))
    with pytest.raises(ValueError, match="lacks iteration 2"):
        read_run(folder)
    (folder / "iterations.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match="begins at iteration 2, but its config.yaml resumes noth"):
        read_run(folder)
    (folder / "iterations.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(ValueError, match="evaluation after iteration 4, but .* ends at 2"):
        read_run(folder)
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml is not valid YAML"):
        read_run(folder)
    (folder / "config.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match="config.yaml is no configuration of a run"):
        read_run(folder)
