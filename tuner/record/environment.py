"""Where a study ran: versions, hardware, code and command line of each sitting, kept in its folder."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from tuner.tracking.values import VERSIONS, git_tags, version

ENVIRONMENT = "environment.json"
MAX_SITTINGS = 100


def note_environment(study_dir: Path, **more: Any) -> None:
    """Add this process's environment to the study's; a folder that cannot be written is no reason to stop.

    Args:
        study_dir: The study's folder.
        more: What the caller knows besides.
    """
    sittings = [*environments(study_dir), _environment() | more]
    draft = study_dir / f"{ENVIRONMENT}.new"
    try:
        draft.write_text(json.dumps(sittings[-MAX_SITTINGS:], indent=1), encoding="utf-8")
        draft.replace(study_dir / ENVIRONMENT)
    except OSError:
        draft.unlink(missing_ok=True)


def environments(study_dir: Path) -> list[dict[str, Any]]:
    """The environment of each sitting, oldest first; empty where nothing is known."""
    try:
        found = json.loads((study_dir / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [sitting for sitting in found if isinstance(sitting, dict)] if isinstance(found, list) else []


def _environment() -> dict[str, Any]:
    git = git_tags()
    dirty = " with changes" if git.get("git.dirty") else ""
    return {
        "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
        "git commit": f"{git['mlflow.source.git.commit']}{dirty}" if git else None,
    }
