"""Which checkpoint folders are complete, and which may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainables.checkpoint_dir import (
    MANIFEST,
    clean,
    complete_checkpoints,
    delete,
    is_complete,
    keep_last,
    newest_complete,
    read_manifest,
    step_dir,
    step_of,
    write_manifest,
)


def make_checkpoint(root: Path, step: int) -> Path:
    path = step_dir(root, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"weights")
    (path / ".metadata").write_bytes(b"index")
    write_manifest(path, step, {"eval_loss": 1.5})
    return path


def test_the_folder_is_named_after_the_step() -> None:
    assert step_dir(Path("root"), 27) == Path("root/step_00000027")
    assert step_of(step_dir(Path("root"), 123_456_789)) == 123_456_789
    with pytest.raises(ValueError, match="not a checkpoint folder"):
        step_of(Path("root/step_27"))


def test_the_manifest_names_every_file_and_the_metrics(tmp_path: Path) -> None:
    manifest = read_manifest(make_checkpoint(tmp_path, 3))
    assert manifest == {
        "step": 3,
        "metrics": {"eval_loss": 1.5},
        "files": {".metadata": 5, "__0_0.distcp": 7},
        "crc32": {".metadata": 2155046657},
        "notes": {},
    }


@pytest.mark.parametrize(
    "damage", ["missing shard", "truncated shard", "no manifest", "torn manifest", "empty manifest"]
)
def test_a_damaged_checkpoint_is_not_complete_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    older, newer = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    assert newest_complete(tmp_path) == newer
    if damage == "missing shard":
        (newer / "__0_0.distcp").unlink()
    elif damage == "truncated shard":
        (newer / "__0_0.distcp").write_bytes(b"wei")
    elif damage == "no manifest":
        (newer / MANIFEST).unlink()
    else:
        (newer / MANIFEST).write_text('{"step": 10, "fi' if damage == "torn manifest" else "")
    assert not is_complete(newer)
    assert newest_complete(tmp_path) == older
    assert complete_checkpoints(tmp_path) == [older]


def test_keep_last_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    keep_last(tmp_path, 2, protected=[paths[0]])
    assert complete_checkpoints(tmp_path) == [paths[0], paths[2], paths[3]]


def test_the_last_complete_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    complete, torn = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 3)
    (torn / "__0_0.distcp").unlink()
    keep_last(tmp_path, 0)
    assert complete_checkpoints(tmp_path) == [complete]


def test_clean_removes_leftovers_only(tmp_path: Path) -> None:
    complete, torn = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    (torn / MANIFEST).unlink()
    (tmp_path / "step_00000003.partial").mkdir()
    (tmp_path / "notes").mkdir()
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", complete.name]


def test_a_root_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    clean(tmp_path / "none")
    assert newest_complete(tmp_path / "none") is None
    delete(tmp_path / "none")
