"""Whether every node sees the studies' root: a folder there in which they meet, and an object where it is a URL."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tuner.errors import StorageError
from tuner.storage.place import url_of

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
        with _object_at(url_of(root), secret):
            yield folder, secret, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_new and not os.listdir(root):
            root.rmdir()


def meeting_object(secret: str) -> str:
    """The name of the object at the root's URL that holds a secret."""
    return f".doctor-{secret}"


@contextmanager
def _object_at(url: str | None, secret: str) -> Iterator[None]:
    if url is None:
        yield
        return
    from tuner.storage.bucket import Bucket

    # Whether it can be used from here is for others to say.
    with suppress(StorageError):
        Bucket(url).write(meeting_object(secret), secret.encode())
    try:
        yield
    finally:
        with suppress(StorageError):
            Bucket(url).delete(meeting_object(secret))
