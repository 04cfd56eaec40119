"""Files and folders appear whole or not at all."""

import pytest

from rlinf_wamrl.files import atomic_folder, atomic_path, set_aside, write_text_atomic


def test_a_file_appears_whole_and_replaces_the_old_one(tmp_path):
    target = tmp_path / "new" / "folder" / "a.txt"
    write_text_atomic(target, "one")
    with atomic_path(target) as temporary:
        temporary.write_text("two")
        assert target.read_text() == "one"
        assert temporary.parent == target.parent
    assert target.read_text() == "two"
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_changes_nothing(tmp_path):
    target = tmp_path / "a.txt"
    write_text_atomic(target, "one")
    with pytest.raises(ZeroDivisionError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_appears_whole_and_is_replaced_only_when_asked(tmp_path):
    target = tmp_path / "checkpoint"
    with atomic_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(FileExistsError, match="exists already"), atomic_folder(target):
        raise AssertionError("not reached")
    with atomic_folder(target, overwrite=True) as temporary:
        (temporary / "b").write_text("2")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_folder_leaves_the_old_one(tmp_path):
    target = tmp_path / "checkpoint"
    with atomic_folder(target) as temporary:
        (temporary / "a").write_text("1")
    with pytest.raises(ZeroDivisionError), atomic_folder(target, overwrite=True) as temporary:
        (temporary / "b").write_text("2")
        raise ZeroDivisionError
    assert [path.name for path in target.iterdir()] == ["a"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_set_aside_under_the_first_free_number(tmp_path):
    for number in (1, 2):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "log").write_text(str(number))
        assert set_aside(folder) == tmp_path / f"run.{number}"
        assert not folder.exists()
    assert (tmp_path / "run.1" / "log").read_text() == "1"
