"""A root of studies that is a URL, and the folder in which this machine works on it.

Object stores can neither append nor lock, so the studies of `s3://bucket/studies` are worked on in a folder of the
cache, the working copy, which a mark names as such. Whoever has the folder can find the URL.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from tuner.errors import InputError

CACHE_VARIABLE = "TUNE_CACHE_DIR"
MARK = ".origin"
# `Path` makes one slash of two.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)", re.IGNORECASE)


def as_root(root: str | Path) -> Path:
    """Where studies live on this machine: the folder itself, or the working copy of a URL, which is made.

    Raises:
        InputError: The URL holds a secret, or no folder can be made for it.
    """
    found = _URL.fullmatch(str(root))
    if found is None:
        return Path(root)
    url = f"{found[1].lower()}://{'/' if found[1].lower() == 'file' else ''}{found[2].rstrip('/')}"
    _refuse_secrets(url)
    folder = cache_folder() / _folder_name(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MARK).exists():
            (folder / MARK).write_text(url, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror}", f"Name another place for working copies: {CACHE_VARIABLE}"
        ) from error
    return folder


def url_of(folder: Path) -> str | None:
    """The URL of a folder in a working copy; None for every other folder."""
    path = folder.absolute()
    for root in (path, *path.parents):
        if (root / MARK).is_file():
            url, inside = (root / MARK).read_text(encoding="utf-8"), path.relative_to(root).as_posix()
            return url if inside == "." else f"{url}/{inside}"
    return None


def shown(folder: Path) -> str:
    """A folder as its user knows it: by its URL where it has one."""
    return url_of(folder) or str(folder)


def without_secrets(text: str) -> str:
    """A message in which no URL has a user or password any more."""
    return re.sub(r"//[^/@\s]*:[^/@\s]*@", "//***@", text)


def cache_folder() -> Path:
    """What this machine keeps for all studies of a user; it need not exist."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tune")


def _folder_name(url: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url)[-60:].strip("-")
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _refuse_secrets(url: str) -> None:
    if urlsplit(url).password is not None or "?" in url:
        raise InputError(
            "--root: the URL holds a password or a query, which would be kept and shown",
            "Leave it out, and give credentials as the provider's own tools take them: AWS_..., a profile, a role.",
        )
