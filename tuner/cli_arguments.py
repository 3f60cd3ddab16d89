"""What several verbs take: a study, its root, a format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.formats import Format
from tuner.outcomes import DEFAULT_ROOT

if TYPE_CHECKING:
    from tuner.study import Study

StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A name under --root, or the path of a study's folder.")
]
RootOption = Annotated[Path, typer.Option("--root", metavar="DIR", help="Where studies live.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print.")]
ROOT = DEFAULT_ROOT


def open_study(study: str, root: Path) -> Study:
    """The study that the arguments name, to read."""
    from tuner.study import Study

    return Study.open(root, study)
