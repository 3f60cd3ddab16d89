"""Which files of a study's folder go to its URL, and in which order they are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from trainables.checkpoint_dir import MANIFEST, is_complete, step_of

CHECKPOINTS, LOGS = "checkpoints", "logs"
# In a folder of a checkpoint that the URL has and this machine has not.
AWAY = ".away"
# What the URL had when both were last alike, and who runs the study elsewhere.
STATE, HOLDER = ".mirror.json", ".holder.json"
# A confirmation is a study of its own; the rest is scratch, or says something of this machine alone.
_NOT_MIRRORED = {"ray", "data", "confirm", "study.lock", "stop"}


def is_mirrored(name: str) -> bool:
    """Whether a file of the folder, named relative to it, belongs to the record or the logs or the checkpoints."""
    first = name.split("/")[0]
    return first not in _NOT_MIRRORED and not first.startswith(".") and not name.endswith(".new")


def record_files(study_dir: Path) -> list[str]:
    """The files of the record that are there, and the logs; what names a study comes first."""
    top = [path.name for path in study_dir.iterdir() if path.is_file() and is_mirrored(path.name)]
    return sorted(top, key=lambda name: (name != "study.yaml", name != "spec.json", name))


def log_files(study_dir: Path) -> list[str]:
    """The logs that are there."""
    return sorted(path.relative_to(study_dir).as_posix() for path in (study_dir / LOGS).glob("*.log"))


def checkpoint_dirs(study_dir: Path) -> list[str]:
    """The folders of checkpoints, whole or not, oldest first within each trial."""
    found = [path for trial in entries(study_dir / CHECKPOINTS) for path in entries(trial) if is_step(path.as_posix())]
    return [path.relative_to(study_dir).as_posix() for path in sorted(found, key=lambda path: (path.parent, path.name))]


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is none, or is gone meanwhile: trials end while it is looked at."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def whole_checkpoints(study_dir: Path) -> list[str]:
    """Those of them that are complete on this machine."""
    folders = [(name, study_dir / name) for name in checkpoint_dirs(study_dir)]
    return [name for name, folder in folders if not is_away(folder) and is_complete(folder)]


def is_away(checkpoint: Path) -> bool:
    """Whether a checkpoint is at the URL and not here."""
    return (checkpoint / AWAY).exists()


def note_away(checkpoints: Path, names: Collection[str]) -> None:
    """Have folders for the checkpoints of a trial that the URL has, and no others."""
    for name in names:
        if not (checkpoints / name).exists():
            (checkpoints / name).mkdir(parents=True)
            (checkpoints / name / AWAY).touch()
    for other in checkpoints.glob("step_*"):
        if is_step(other.as_posix()) and other.name not in names:
            shutil.rmtree(other, ignore_errors=True)


def is_step(name: str) -> bool:
    """Whether a path ends in the name of a checkpoint's folder."""
    try:
        step_of(Path(name))
    except ValueError:
        return False
    return not PurePosixPath(name).parent.name.startswith(".")


def checkpoint_of(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to, `checkpoints/7/step_00000009`; None for other files."""
    parts = name.split("/")
    folder = "/".join(parts[:3])
    return folder if len(parts) > 3 and parts[0] == CHECKPOINTS and is_step(folder) else None


def whole_at(names: Iterable[str]) -> list[str]:
    """The checkpoints that are complete among files of a URL: their manifests are uploaded last."""
    found = {checkpoint_of(name) for name in names if name.endswith(f"/{MANIFEST}")}
    return sorted(name for name in found if name is not None)


def read_tags(study_dir: Path) -> dict[str, str]:
    """The tag that each file had at the URL when it was last alike here."""
    try:
        found = json.loads((study_dir / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_tags(study_dir: Path, tags: dict[str, str]) -> None:
    """Keep them for the next time."""
    draft = study_dir / f"{STATE}.new"
    draft.write_text(json.dumps(tags), encoding="utf-8")
    draft.replace(study_dir / STATE)


def whole_lines(data: bytes) -> bytes:
    """What is read of a file to which lines are being appended, without a line that is not whole yet."""
    return data[: data.rfind(b"\n") + 1]
