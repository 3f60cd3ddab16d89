"""Whether every node sees the studies' root: a folder there in which they meet."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDY = "Choose a --root on a file system that all nodes share, at the same path."


@contextmanager
def meeting_place(root: Path) -> Iterator[tuple[Path | None, str, str]]:
    """A folder in the root where every node leaves a file, its secret, and why it cannot be made; gone afterwards."""
    secret, is_new = secrets.token_hex(8), not root.exists()
    folder = root.absolute() / f".doctor-{secret}"
    try:
        folder.mkdir(parents=True)
        (folder / "driver").write_text(secret, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        yield None, secret, error.strerror or type(error).__name__
        return
    try:
        yield folder, secret, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_new and not os.listdir(root):
            root.rmdir()
