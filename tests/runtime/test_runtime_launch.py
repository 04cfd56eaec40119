"""What happens to a run folder that is used twice."""

import io

import pytest

from rlinf_wamrl.report.console import Console
from rlinf_wamrl.runtime.launch import make_room


@pytest.mark.parametrize(
    "file", ["iterations.jsonl", "success_buffer/rank_0/episode_00000000.safetensors"]
)
def test_a_run_that_begins_anew_finds_nothing_of_an_earlier_one(tmp_path, file):
    folder = tmp_path / "run"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text("{}")
    said = io.StringIO()
    make_room(folder, Console(said))
    assert not folder.exists()
    assert (tmp_path / "run.1" / file).read_text() == "{}"
    assert f"the earlier run in {folder} is now {tmp_path / 'run.1'}" in said.getvalue()


def test_a_folder_without_an_iteration_is_used_again(tmp_path):
    (tmp_path / "run" / "success_buffer" / "rank_0").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("a: 1")
    make_room(tmp_path / "run", Console(io.StringIO()))
    assert (tmp_path / "run" / "config.yaml").exists()
