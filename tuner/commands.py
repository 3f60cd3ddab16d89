"""Commands about a study, ready to paste: its folder may have been moved or renamed since it was made."""

from __future__ import annotations

import shlex
from pathlib import Path

from tuner.storage.place import shown

DEFAULT_ROOT = Path("studies")


def command(verb: str, study_dir: Path, *arguments: str) -> str:
    """`tune VERB STUDY`, with `--root` where the study lies elsewhere."""
    folder = study_dir if study_dir.name else study_dir.resolve()
    root = folder.parent
    place = [] if root.absolute() == DEFAULT_ROOT.absolute() else ["--root", shown(root)]
    return shlex.join(["tune", verb, folder.name, *place, *arguments])
