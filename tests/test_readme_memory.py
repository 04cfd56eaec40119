"""The memory table in the README is what the function says of the examples it is about."""

import re
from pathlib import Path

import pytest
from tiny_run import compose_5b

from rlinf_wamrl.config.checkpoints import resolve_checkpoint
from rlinf_wamrl.config.placement import world_size
from rlinf_wamrl.wam.memory import memory_table, run_setup

README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"<!-- memory-table -->\n(.*?)<!-- /memory-table -->", re.DOTALL)
EXAMPLES = {"1 × 80 GB": "libero_wamrl_5b_1gpu", "8 × 80 GB": "libero_wamrl_5b"}


def table_of_examples(folder: Path) -> str:
    runs = {heading: compose_5b(example, folder) for heading, example in EXAMPLES.items()}
    setups = {heading: run_setup(run, world_size(run, "actor")) for heading, run in runs.items()}
    config = resolve_checkpoint(runs["1 × 80 GB"].actor.model).config
    return memory_table(config, setups)


def test_both_examples_fit(tmp_path):
    assert table_of_examples(tmp_path).count("fits") == 2


def test_the_readme_shows_the_table(tmp_path):
    found = MARKED.search(README.read_text(encoding="utf-8"))
    if found is None:
        pytest.fail("README.md has no <!-- memory-table --> ... <!-- /memory-table -->")
    assert found[1].strip() == table_of_examples(tmp_path).strip()
