"""Checkpoints as folders on disk: which are complete, which is newest, which may go. Imports no torch.

A checkpoint is complete when its manifest is there and every file the manifest names has the size it names: the
manifest is written last, so a kill at any moment leaves either a complete checkpoint or a recognisable leftover.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# A checksum of each part is inside: to read such a file once more for another would take as long as to write it.
SELF_CHECKING = ".distcp"
PARTIAL_SUFFIX = ".partial"
_STEP_DIR = re.compile(r"step_(\d{8,})")


def step_dir(root: Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step lies: `root/step_00000027`."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The optimizer step of a checkpoint folder, read from its name.

    Raises:
        ValueError: The name is not one that `step_dir` makes.
    """
    match = _STEP_DIR.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: not a checkpoint folder; its name should be step_ and at least eight digits")
    return int(match[1])


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint folder, or None where there is none that can be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def write_manifest(
    path: Path,
    step: int,
    metrics: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
    *,
    are_files_synced: bool = False,
) -> None:
    """Declares everything in the folder part of a complete checkpoint; its files reach the disk first.

    Args:
        path: The folder, with all other files written.
        step: Optimizer steps done.
        metrics: Metric values at that step.
        notes: Whatever else its owner wants to find again, as JSON knows it.
        are_files_synced: Whoever wrote the files has waited until they had reached the disk.
    """
    described = manifest_of(path, sync=not are_files_synced)
    manifest = {"step": step, "metrics": metrics, **described, "notes": notes or {}}
    store_manifest(path, manifest)
    sync_to_disk(path)


def manifest_of(path: Path, *, sync: bool = False) -> dict[str, Any]:
    """What a manifest says of the files of a folder, sizes and checksums; `sync` has them reach the disk."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)
    for file in files if sync else ():
        sync_to_disk(file)
    sizes = {file.relative_to(path).as_posix(): file.stat().st_size for file in files}
    checksums = {file.relative_to(path).as_posix(): crc32(file) for file in files if file.suffix != SELF_CHECKING}
    return {"files": sizes, "crc32": checksums}


def store_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes a manifest that reaches the disk."""
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1, default=str), encoding="utf-8")
    sync_to_disk(path / MANIFEST)


def crc32(file: Path) -> int:
    """The checksum of a file's content."""
    checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def damaged_file(path: Path) -> str | None:
    """The first file of a complete checkpoint that is not as it was written, as far as the manifest knows; or None."""
    checksums = (read_manifest(path) or {}).get("crc32", {})
    return next((name for name, checksum in checksums.items() if crc32(path / name) != checksum), None)


def sync_to_disk(path: Path) -> None:
    """Waits until a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file it names has its size."""
    manifest = read_manifest(path)
    return manifest is not None and all(_has_size(path / name, size) for name, size in manifest["files"].items())


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def incomplete_checkpoints(root: Path) -> list[Path]:
    """What has the name of a checkpoint under root and is none, oldest first."""
    return [path for path in _step_dirs(root) if not is_complete(path)]


def complete_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under root, oldest first; empty where there are none."""
    return [path for path in _step_dirs(root) if is_complete(path)]


def newest_complete(root: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    return next((path for path in reversed(_step_dirs(root)) if is_complete(path)), None)


def is_step_dir(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _STEP_DIR.fullmatch(path.name) is not None


def _step_dirs(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if is_step_dir(path)), key=step_of)


def condemn(path: Path) -> None:
    """Makes a checkpoint an incomplete one, of which `clean` leaves nothing."""
    (path / MANIFEST).unlink(missing_ok=True)


def delete(path: Path) -> None:
    """Removes a checkpoint, the manifest first: half-deleted, it is not complete."""
    condemn(path)
    shutil.rmtree(path, ignore_errors=True)


def keep_last(root: Path, num: int, protected: Collection[Path] = ()) -> None:
    """Deletes all but the newest complete checkpoints.

    Args:
        root: The folder the checkpoints lie in.
        num: How many to keep; one is always kept.
        protected: Checkpoints that stay in any case.
    """
    kept = {path.resolve() for path in protected}
    for path in complete_checkpoints(root)[: -max(num, 1)]:
        if path.resolve() not in kept:
            delete(path)


def restore(root: Path) -> None:
    """Gives whole checkpoints their names where a kill fell between two renamings; no process may be writing there."""
    # What replaces another one comes before what it replaces.
    for leftover in sorted(root.glob(f"*{PARTIAL_SUFFIX}")) if root.is_dir() else ():
        path = leftover.with_name(leftover.name.partition(".")[0])
        if is_complete(leftover) and not path.exists():
            leftover.rename(path)


def clean(root: Path) -> None:
    """Removes what a killed process left half-written; no process may be writing under root."""
    restore(root)
    for leftover in root.glob(f"*{PARTIAL_SUFFIX}") if root.is_dir() else ():
        shutil.rmtree(leftover, ignore_errors=True)
    for path in incomplete_checkpoints(root):
        delete(path)
