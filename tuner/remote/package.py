"""The working directory and this project as one archive, which Ray unpacks on every node.

What a study makes (studies, checkpoints), what can be made again (environments, caches) and what is nobody's business
there (.git) stay behind.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tuner import text
from tuner.errors import InputError

# Of the archive; what the dashboard takes in one request (DASHBOARD_CLIENT_MAX_SIZE in Ray).
LIMIT_BYTES = 100 * 2**20
_NUM_NAMED = 5
_LEFT_OUT = (
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".*_cache", ".cache", ".hypothesis", ".tox",
    ".ipynb_checkpoints", "*.egg-info", "studies", "mlruns", "mlartifacts", "mlflow.db*", ".env", ".DS_Store",
)  # fmt: skip
_PROJECT = Path(__file__).resolve().parents[2]


def pack(directory: Path | None, limit: int = LIMIT_BYTES) -> bytes:
    """The files of a folder, and with them this project, as a zip archive that is the same for the same files.

    Args:
        directory: The working directory; None: this project alone.
        limit: Most bytes.

    Raises:
        InputError: It gets too large; the message names what is big.
    """
    files = {f"{name}/{path}": _PROJECT / name / path for name in ("tuner", "trainables") for path in _code(name)}
    if directory is not None:
        files |= {path.as_posix(): directory / path for path in _files(directory)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    # What does not get small enough even at the best is not compressed for minutes first.
    content = _archive(files) if sum(sizes.values()) <= 4 * limit else b""
    if not content or len(content) > limit:
        raise _too_large(directory or _PROJECT, sizes, limit)
    return content


def name_of(content: bytes) -> str:
    """The name under which Ray keeps an archive."""
    return f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:32]}.zip"


def _code(name: str) -> Iterator[Path]:
    return (path for path in _files(_PROJECT / name))


def _files(directory: Path) -> Iterator[Path]:
    """Paths of what goes along, relative to the folder."""
    for place, folders, names in os.walk(directory):
        here = Path(place)
        folders[:] = sorted(name for name in folders if not _stays(here / name))
        yield from ((here / name).relative_to(directory) for name in sorted(names) if _goes(here / name))


def _goes(path: Path) -> bool:
    return path.is_file() and not any(fnmatch(path.name, pattern) for pattern in _LEFT_OUT)


def _stays(folder: Path) -> bool:
    """Whether a folder is one of those that are left out, by its name or by what is in it."""
    if any(fnmatch(folder.name, pattern) for pattern in _LEFT_OUT):
        return True
    is_study = (folder / "spec.json").exists() and (folder / "study.lock").exists()
    is_checkpoint = folder.name.startswith("step_") and (folder / "manifest.json").exists()
    return is_study or is_checkpoint or (folder / "pyvenv.cfg").exists()


def _archive(files: dict[str, Path]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sorted(files.items()):
            # Without the time of the file: the same content has the same name on the cluster.
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (path.stat().st_mode & 0xFFFF) << 16
            archive.writestr(entry, path.read_bytes())
    return stream.getvalue()


def _too_large(directory: Path, sizes: dict[str, int], limit: int) -> InputError:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_NUM_NAMED]
    named = "\n".join(f"  {name}  {text.num_bytes(size)}" for name, size in largest)
    total = text.num_bytes(sum(sizes.values()))
    return InputError(
        f"{directory} has {total}, more than the {text.num_bytes(limit)} that Ray takes along; the largest:\n{named}",
        "Put data where every node sees it and name that path in the study, or submit from a folder of its own.",
    )
