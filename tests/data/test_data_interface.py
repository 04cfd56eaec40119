"""Every documented name is there with its signature, from RLinf itself where RLinf has it."""

import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
from enum import Enum
from pathlib import Path

import pytest

from rlinf_wamrl.data.interface import NATIVE_INTERFACE

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTED = json.loads((Path(__file__).parent / "seed_interface.json").read_text())
CLASSES = [
    (module, name)
    for module in ("embodied_types", "embodied_trajectory")
    for name in DOCUMENTED[module]
]


def signature_of(function, *, skip: int) -> str:
    """Parameters in the notation of the committed list."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    words, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        default = parameter.default
        words.append(
            parameter.name if default is parameter.empty else f"{parameter.name}={default!r}"
        )
    return ", ".join(words)


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_documented_names_have_their_signatures(module, name):
    documented = DOCUMENTED[module][name]
    cls = getattr(importlib.import_module(f"rlinf_wamrl.data.{module}"), name)
    if documented.get("enum"):
        assert issubclass(cls, Enum) and cls("rollout") is cls.ROLLOUT
        return
    if "init" in documented:
        assert dataclasses.is_dataclass(cls)
        assert signature_of(cls.__init__, skip=1) == documented["init"]
    for prop in documented.get("properties", []):
        assert isinstance(inspect.getattr_static(cls, prop), property)
    kinds = {
        "methods": (None, 1),
        "classmethods": (classmethod, 0),
        "staticmethods": (staticmethod, 0),
    }
    for group, (kind, skip) in kinds.items():
        for method, expected in documented.get(group, {}).items():
            found = inspect.getattr_static(cls, method)
            assert isinstance(found, kind) if kind else inspect.isfunction(found)
            assert signature_of(getattr(cls, method), skip=skip) == expected


def test_every_documented_thing_has_a_docstring():
    for module, name in CLASSES:
        cls = getattr(importlib.import_module(f"rlinf_wamrl.data.{module}"), name)
        assert inspect.getdoc(cls)
        documented = DOCUMENTED[module][name]
        for group in ("properties", "methods", "classmethods", "staticmethods"):
            for method in documented.get(group, []):
                assert inspect.getattr_static(cls, method) and inspect.getdoc(getattr(cls, method))


# ---------------------------------------------------------------- which implementation


def run_python(code: str, *paths: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, REPOSITORY)))}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def make_fake_rlinf(root: Path, *, capable: bool, with_trajectory: bool = True) -> None:
    """A package that looks like an RLinf with the interface, or almost."""
    schema = root / "rlinf" / "data" / "schema"
    hooks = root / "rlinf" / "scheduler" / "channel"
    for folder in (schema, hooks):
        folder.mkdir(parents=True)
        for package in (folder, *folder.relative_to(root).parents):
            path = package if package.is_absolute() else root / package
            if path != root:
                (path / "__init__.py").touch()
    names = [name for name in DOCUMENTED["embodied_types"] if name != "EnvTransition"]
    types = "\n".join(f"class {name}: pass" for name in names)
    body = "def with_trajectory_data(self): pass" if capable else "pass"
    (schema / "embodied_types.py").write_text(
        f"{types}\nclass EnvTransition:\n    {body}\ndef split_batch_value(): pass\n"
    )
    if with_trajectory:
        collection = "\n".join(f"class {name}: pass" for name in DOCUMENTED["embodied_trajectory"])
        (schema / "embodied_trajectory.py").write_text(
            f"{collection}\nclass RolloutGeometry: pass\n"
        )
    (hooks / "hooks.py").write_text("class ChannelContext: pass\n")


REPORT = """
    from rlinf_wamrl.data import embodied_trajectory, embodied_types, interface
    names = [*embodied_types.__all__, *embodied_trajectory.__all__]
    native = [n for n in names if getattr(interface, n).__module__.startswith("rlinf.")]
    print(interface.NATIVE_INTERFACE, *sorted(native))
"""


def test_rlinfs_own_classes_are_used_where_it_has_them(tmp_path):
    make_fake_rlinf(tmp_path, capable=True)
    answer = run_python(REPORT, tmp_path).split()
    assert answer[0] == "True"
    documented = {*DOCUMENTED["embodied_types"], *DOCUMENTED["embodied_trajectory"]}
    assert set(answer[1:]) == documented | {
        "ChannelContext",
        "RolloutGeometry",
        "split_batch_value",
    }


@pytest.mark.parametrize(
    "lacking", [{"capable": False}, {"capable": True, "with_trajectory": False}]
)
def test_half_an_interface_is_none(tmp_path, lacking):
    make_fake_rlinf(tmp_path, **lacking)
    assert run_python(REPORT, tmp_path) == "False"


@pytest.mark.skipif(NATIVE_INTERFACE, reason="the installed RLinf has the interface itself")
def test_an_rlinf_without_the_interface_is_not_loaded():
    code = """
        import sys
        import rlinf_wamrl.data.interface as interface
        assert not interface.NATIVE_INTERFACE
        assert "ray" not in sys.modules and "rlinf.scheduler" not in sys.modules
    """
    run_python(code)


def test_an_rlinf_that_fails_to_import_is_not_hidden(tmp_path):
    make_fake_rlinf(tmp_path, capable=True)
    (tmp_path / "rlinf" / "data" / "schema" / "embodied_types.py").write_text("import not_there\n")
    with pytest.raises(AssertionError, match="not_there"):
        run_python(REPORT, tmp_path)
