"""Finding LIBERO's files, and reading its initial states safely."""

import dataclasses
import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rlinf_wamrl.envs import assets
from rlinf_wamrl.envs.assets import resolve_libero_root, verify_libero_assets
from rlinf_wamrl.envs.suites import load_init_states, load_suite


@pytest.fixture
def needed(monkeypatch):
    """Nothing installed, nothing configured, and a suite that needs two files."""
    files = {"scenes/table.xml": b"<mujoco/>", "cup/cup.msh": b"mesh"}
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    monkeypatch.setattr(assets, "_PACKAGE", "no_such_package")
    monkeypatch.setattr(assets, "libero_package_root", lambda: Path("/nonexistent"))
    import hashlib

    manifest = {
        "source": "upstream",
        "suites": {"libero_spatial": sorted(files)},
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    monkeypatch.setattr(assets, "_manifest", lambda: manifest)
    return files


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_folder_is_found_in_every_documented_layout(needed, tmp_path):
    write(tmp_path / "a" / "assets", needed)
    write(tmp_path / "b" / "spatial" / "assets", needed)
    for given, root in (("a", "a"), ("a/assets", "a"), ("b", "b/spatial")):
        assert resolve_libero_root("libero_spatial", tmp_path / given) == tmp_path / root


def test_order_is_configuration_then_variable_then_packages(needed, tmp_path, monkeypatch):
    for name in ("configured", "variable", "package"):
        write(tmp_path / name / "assets", needed)
    monkeypatch.setattr(assets, "libero_package_root", lambda: tmp_path / "package")
    assert resolve_libero_root("libero_spatial") == tmp_path / "package"
    monkeypatch.setenv("LIBERO_ASSETS", str(tmp_path / "variable"))
    assert resolve_libero_root("libero_spatial") == tmp_path / "variable"
    configured = resolve_libero_root("libero_spatial", tmp_path / "configured")
    assert configured == tmp_path / "configured"


def test_nothing_found_says_how_to_get_it(needed):
    with pytest.raises(FileNotFoundError, match=r"pip install 'rlinf-wamrl\[libero-assets\]'"):
        resolve_libero_root("libero_spatial")


def test_wrong_folder_is_named(needed, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="assets_dir=.*nowhere"):
        resolve_libero_root("libero_spatial", tmp_path / "nowhere")
    monkeypatch.setenv("LIBERO_ASSETS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="LIBERO_ASSETS="):
        resolve_libero_root("libero_spatial")


def test_missing_file_is_named(needed, tmp_path):
    write(tmp_path / "assets", needed)
    (tmp_path / "assets" / "cup" / "cup.msh").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 1 of the 2 files .* cup/cup\.msh"):
        resolve_libero_root("libero_spatial", tmp_path)


def test_verification_names_what_differs(needed, tmp_path):
    write(tmp_path / "assets", needed)
    assert verify_libero_assets(tmp_path, "libero_spatial") == 2
    (tmp_path / "assets" / "cup" / "cup.msh").write_bytes(b"other mesh")
    (tmp_path / "assets" / "scenes" / "table.xml").unlink()
    with pytest.raises(
        ValueError, match=r"cup/cup\.msh \(differs\), scenes/table\.xml \(missing\)"
    ):
        verify_libero_assets(tmp_path, "libero_spatial")


def test_shipped_manifest_covers_the_four_suites():
    manifest = json.loads(Path(assets.__file__).with_name("libero_files.json").read_text())
    assert set(manifest["suites"]) == {
        "libero_spatial",
        "libero_object",
        "libero_goal",
        "libero_10",
    }
    assert set(manifest["sha256"]) == set().union(*manifest["suites"].values())


def stored(tmp_path, payload):
    file = tmp_path / "task.pruned_init"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
    task = load_suite("wamrl_demo").tasks[0]
    return dataclasses.replace(task, suite="libero_spatial", init_states_file=file)


def test_stored_array_is_read_without_torch(tmp_path):
    states = np.arange(12.0).reshape(3, 4)
    task = stored(tmp_path, pickle.dumps(states, protocol=2))
    np.testing.assert_array_equal(load_init_states(task), states)


class Attack:
    def __reduce__(self):
        return (open, ("stolen", "w"))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (pickle.dumps(Attack(), protocol=2), "not to a numpy array"),
        (pickle.dumps([1, 2], protocol=2), "does not hold a table"),
        (pickle.dumps(np.arange(3.0), protocol=2), "does not hold a table"),
    ],
)
def test_anything_but_one_table_is_refused(tmp_path, payload, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_init_states(stored(tmp_path, payload))
    assert not (tmp_path / "stolen").exists()


def test_torch_tensors_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(torch.zeros(3, 4), buffer)
    task = stored(tmp_path, b"")
    task.init_states_file.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="torch"):
        load_init_states(task)


def test_unknown_suite_lists_the_known():
    with pytest.raises(ValueError, match="choose one of wamrl_demo, libero_spatial"):
        load_suite("libero_kitchen")
