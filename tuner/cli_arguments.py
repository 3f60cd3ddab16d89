"""What several verbs take: a study and its file, its root, a format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner import text
from tuner.commands import DEFAULT_ROOT
from tuner.display.formats import Format, Shape
from tuner.errors import InputError
from tuner.storage.place import as_root

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study
    from tuner.study_file.spec import StudySpec


def _complete_study(context: typer.Context, incomplete: str) -> list[str]:
    """Names of studies for the shell; a look at the folder, since the shell waits for it."""
    root = Path(context.params.get("root") or DEFAULT_ROOT)
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path.name for path in found if path.name.startswith(incomplete) and (path / "spec.json").exists())


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The study file.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the study file; may be repeated."),
]
StudyArgument = Annotated[
    str,
    typer.Argument(
        metavar="STUDY",
        help="A name under --root, or the path of a study's folder.",
        autocompletion=_complete_study,
        show_default=False,
    ),
]
OptionalStudyArgument = Annotated[
    str | None,
    typer.Argument(metavar="[STUDY]", help="Its page; without: that of all studies.", autocompletion=_complete_study),
]
RootOption = Annotated[
    Path,
    typer.Option("--root", metavar="DIR", parser=as_root, help="Where studies live: a folder, or s3://BUCKET/FOLDER."),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print.")]
ShapeOption = Annotated[Shape, typer.Option("--format", help="How to print.")]
ThereOption = Annotated[
    str | None,
    typer.Option("--address", metavar="http://HOST:8265", help="It was submitted to this cluster; ask there."),
]
TrialArgument = Annotated[int, typer.Argument(metavar="TRIAL", help="Number of a trial.", min=0, show_default=False)]
ROOT = DEFAULT_ROOT


def open_study(study: str, root: Path) -> Study:
    """The study that the arguments name, to read."""
    from tuner.record.study import Study

    return Study.open(root, study)


def trial_of(study: Study, number: int) -> TrialRecord:
    """One trial of a study.

    Raises:
        InputError: It has no such trial; the message names those it has.
    """
    records = study.trials()
    if number >= len(records):
        known = f"Trials there: {text.ranges(range(len(records)))}." if records else "It has no trial yet."
        raise InputError(f"study {study.dir.name!r} has no trial {number}", known)
    return records[number]


def load(file: Path, overrides: list[str] | None, name: str | None) -> tuple[StudySpec, list[str]]:
    """A study, and the changes that the command line makes to its file."""
    from tuner.study_file.spec import load_spec

    changes = [*(overrides or []), *([] if name is None else [f"study={json.dumps(name)}"])]
    return load_spec(file, changes), changes
