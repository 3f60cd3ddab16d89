"""A file system of a few megabytes, in memory."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A file system in memory; it fills up by `fill` and gets room again by `grow`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all the room there is, but for some."""
        with contextlib.suppress(OSError), open(self._filler, "ab", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        size = self._filler.stat().st_size
        with open(self._filler, "ab") as filler:
            filler.truncate(max(0, size - leave_bytes))

    def grow(self) -> None:
        """Make room."""
        mount("-o", "remount,size=200m", str(self.path))
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Disk]:
    """A disk of this size (`24m`) at a new folder, while the block runs; skips the test where none can be mounted."""
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)):
        pytest.skip("a file system of a few megabytes can only be mounted by root")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
