"""Methods are told apart by their configurations; figures and tables show the logs' numbers."""

import csv
import io

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from run_folders import write_run

from rlinf_wamrl.cli import main
from rlinf_wamrl.report.ablation import ablation_csv, ablation_markdown
from rlinf_wamrl.report.console import wilson_interval
from rlinf_wamrl.report.methods import read_methods
from rlinf_wamrl.report.plot import success_figure, training_figure


@pytest.fixture
def runs(tmp_path):
    """Two seeds of the whole method, which another machine ran, and one of the action expert."""
    whole = {"train/video/feature_kl": [0.1, 0.2, 0.3, 0.4]}
    return [
        write_run(tmp_path / "w1", evaluations={0: {0: (4, 10)}, 4: {0: (6, 10)}}, metrics=whole),
        write_run(
            tmp_path / "w2",
            "actor.seed=7",
            "env.train.num_processes=3",
            "runner.max_steps=5",
            evaluations={0: {0: (2, 10)}, 4: {0: (10, 10)}},
            resampled={1: 1},
            metrics=whole,
        ),
        write_run(
            tmp_path / "a",
            "+ablation=actor_only",
            evaluations={0: {0: (4, 10), 2: (1, 10)}, 4: {0: (5, 10), 2: (0, 10)}},
        ),
    ]


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 10), (49, 120), (360, 360)])
def test_the_wilson_interval_is_where_the_rate_is_196_standard_errors_away(successes, trials):
    rate = successes / trials
    for bound in wilson_interval(successes, trials):
        error = np.sqrt(bound * (1 - bound) / trials)
        assert abs(rate - bound) == pytest.approx(1.96 * error, abs=1e-12)


def test_runs_that_differ_in_seed_and_machine_alone_are_one_method(runs):
    whole, actor = read_methods([str(run) for run in runs])
    assert [run.folder.name for run in whole.runs] == ["w1", "w2"]
    assert whole.seeds() == "2 (1234/0, 7/0)"
    assert whole.name == "lambda_rec=0.1, video_sft.enabled=true"
    assert actor.name == "lambda_rec=0.0, video_sft.enabled=false"


def test_a_key_that_came_later_had_its_default(runs):
    config = OmegaConf.load(runs[1] / "config.yaml")
    del config.RL.video_sft.kl_decay
    OmegaConf.save(config, runs[1] / "config.yaml")
    assert len(read_methods([str(run) for run in runs])) == 2
    del config.RL.video_sft.lr  # the example's is not the default
    OmegaConf.save(config, runs[1] / "config.yaml")
    assert len(read_methods([str(run) for run in runs])) == 3


def test_a_name_is_given_on_the_command_line(runs):
    whole, actor = read_methods([f"WAM-RL={runs[0]},{runs[1]}", str(runs[2])])
    assert (whole.name, actor.name) == ("WAM-RL", "a")
    with pytest.raises(ValueError, match="two methods are called 'x'"):
        read_methods([f"x={runs[0]}", f"x={runs[1]}"])


def test_seeds_never_evaluated_together_are_an_error(runs, tmp_path):
    other = write_run(tmp_path / "late", evaluations={3: {0: (1, 2)}})
    with pytest.raises(ValueError, match="no iteration after which all were evaluated"):
        read_methods([f"x={runs[0]},{other}"])


def test_the_curve_is_all_seeds_episodes_with_their_interval(runs):
    axes = success_figure(read_methods([str(run) for run in runs])).axes
    assert len(axes) == 4  # two tasks, against episodes and minutes
    pooled = axes[0].containers[0]
    assert pooled.lines[0].get_xydata().tolist() == [[0, 0.3], [36, 0.8]]  # 32 and 40 episodes
    drawn = [segment[:, 1].tolist() for segment in pooled.lines[2][0].get_segments()]
    assert drawn == [
        pytest.approx(wilson_interval(6, 20)),
        pytest.approx(wilson_interval(16, 20)),
    ]
    seeds = [line.get_xydata().tolist() for line in axes[0].lines if line.get_alpha()]
    assert seeds == [[[0, 0.4], [32, 0.6]], [[0, 0.2], [40, 1.0]]]
    assert axes[1].containers[0].lines[0].get_xdata().tolist() == [0, 2.0]
    assert len(axes[2].containers) == 1  # task 2 was evaluated by one method alone


def test_training_curves_are_drawn_where_they_were_logged(runs):
    panels = training_figure(read_methods([str(run) for run in runs])).axes
    shown = {panel.get_title(): panel for panel in panels if panel.get_visible()}
    assert list(shown) == ["success while training", "feature KL"]
    mean, *others = shown["feature KL"].lines
    assert mean.get_ydata().tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert mean.get_xdata().tolist() == [12, 20, 28, 36]
    assert [line.get_alpha() is not None for line in others] == [True, True, False]
    assert not len(others[2].get_xdata())  # the other method has no such metric


def test_the_table_has_each_methods_counts_before_and_after(runs):
    methods = read_methods([f"whole={runs[0]},{runs[1]}", f"actor={runs[2]}"])
    lines = ablation_markdown(methods).splitlines()
    assert "task 2 after" in lines[0]
    assert lines[2] == (
        "| whole | 2 (1234/0, 7/0) | 32/40 | 6/20 = 30% [15%, 52%] (40%, 20%) | "
        "16/20 = 80% [58%, 92%] (60%, 100%) | – | – |"
    )
    assert "| 5/10 = 50% [24%, 76%] |" in lines[3]
    rows = list(csv.DictReader(io.StringIO(ablation_csv(methods))))
    assert [(row["method"], row["seeds"], row["task"]) for row in rows] == [
        ("whole", "2 (1234/0, 7/0)", "0"),
        ("whole", "1 (1234/0)", "0"),
        ("whole", "1 (7/0)", "0"),
        ("actor", "1 (1234/0)", "0"),
        ("actor", "1 (1234/0)", "2"),
    ]
    assert (rows[0]["after_successes"], rows[0]["after_episodes"]) == ("16", "20")
    assert float(rows[0]["after_low"]) == pytest.approx(wilson_interval(16, 20)[0], abs=1e-4)


def test_the_command_writes_figures_and_tables(runs, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["plot", *(str(run) for run in runs), "--output", str(output)]) == 0
    assert sorted(file.name for file in output.iterdir()) == [
        "ablation.csv",
        "ablation.md",
        "success.png",
        "training.png",
    ]
    assert Image.open(output / "success.png").width > 1000
    (runs[0] / "evaluations.jsonl").unlink()
    assert main(["plot", str(runs[0]), "--output", str(output)]) == 1
    assert "w1/evaluations.jsonl does not exist" in capsys.readouterr().err
