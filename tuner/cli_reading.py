"""The verbs that look at studies: they start no Ray, and are safe while the study runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tuner import output
from tuner.cli_arguments import ROOT, FormatOption, RootOption, StudyArgument, open_study
from tuner.errors import TuneError
from tuner.formats import Format

_WATCH_S = 2.0

app = typer.Typer()


@app.command("list", epilog="Example:  tune list --root /mnt/studies")
def list_(root: RootOption = ROOT, form: FormatOption = Format.TABLE) -> int:
    """List the studies under --root."""
    from tuner.study_dir import list_studies

    output.studies([_status_or_damage(root, name) for name in list_studies(root)], form)
    return 0


@app.command(epilog="Example:  tune status qwen_lr --watch")
def status(
    study: StudyArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Print again every 2 s until the study ends.")] = False,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
) -> int:
    """Show where a study stands.

    Counts of trials, the best one, the time spent. Safe while the study runs, like every reading verb.
    """
    state = open_study(study, root).status()
    output.status(state, form)
    while watch and state["state"] == "running":
        time.sleep(_WATCH_S)
        state = open_study(study, root).status()
        output.status(state, form, redraw=True)
    return 0


@app.command(epilog="Example:  tune trials qwen_lr --format csv > trials.csv")
def trials(study: StudyArgument, root: RootOption = ROOT, form: FormatOption = Format.TABLE) -> int:
    """List the trials of a study."""
    output.trials(open_study(study, root), form)
    return 0


@app.command(epilog="Example:  tune best qwen_lr --top 5 --format json")
def best(
    study: StudyArgument,
    top: Annotated[int | None, typer.Option("--top", min=1, metavar="K", help="The K best trials.")] = None,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
) -> int:
    """Show the best trial and its checkpoint."""
    opened = open_study(study, root)
    leaders = opened.best(top or 1)
    if not leaders:
        raise TuneError(f"no trial of study {study!r} has a value yet", f"See how it stands: tune status {study}")
    output.best(opened, leaders, form, as_list=top is not None)
    return 0


def _status_or_damage(root: Path, name: str) -> dict[str, Any]:
    """One damaged study must not hide the others."""
    try:
        return open_study(name, root).status() | {"study": name}
    except TuneError as error:
        output.error(error)
        return dict.fromkeys(output.STATUS_KEYS) | {"study": name, "state": "damaged", "counts": {}}
