"""The verbs that look at studies: they start no Ray, and are safe while the study runs."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tuner.cli_arguments import (
    ROOT,
    FormatOption,
    OptionalStudyArgument,
    RootOption,
    StudyArgument,
    ThereOption,
    TrialArgument,
    open_study,
    trial_of,
)
from tuner.cli_jobs import logs_there, refuse_there, verb_there
from tuner.commands import command
from tuner.display import output
from tuner.display.formats import Format
from tuner.errors import InputError, TuneError
from tuner.storage.place import shown

if TYPE_CHECKING:
    from tuner.record.study import Study

Dtype = Literal["float32", "bfloat16", "float16"]

app = typer.Typer()


@app.command("list", epilog="Example:  tune list --root /mnt/studies")
def list_(root: RootOption = ROOT, form: FormatOption = Format.TABLE) -> int:
    """List the studies under --root."""
    from tuner.record.study_dir import list_studies
    from tuner.storage.pull import pull_all

    pull_all(root)
    names = list_studies(root)
    output.studies([_status_or_damage(root, name) for name in names], form)
    if not names:
        output.note(f"There is no study under {shown(root)}; see `tune run`.")
    return 0


@app.command(epilog="Example:  tune status qwen_lr --watch")
def status(
    study: StudyArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it ends.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the live table as it stands.")] = None,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
    address: ThereOption = None,
) -> int:
    """Show where a study stands.

    Counts of trials, the best one, the time spent. Safe while the study runs, like every reading verb.
    """
    if address is not None:
        return verb_there(address, "status", study, root, "--format", form.value, *(["--watch"] if watch else []))
    from tuner.reports.confirmation import open_confirmation

    opened = open_study(study, root)
    if svg is not None:
        from tuner.display.picture import draw

        draw(opened, svg)
        return 0
    if watch and opened.is_running:
        _watch(opened, is_quiet=form is not Format.TABLE)
    output.status(opened.status(), form)
    runs = open_confirmation(opened)
    if runs is not None and runs.is_running:
        output.note(f"Its confirmation runs: {command('status', runs.dir, '--watch')}")
    return 0


def _watch(study: Study, *, is_quiet: bool) -> None:
    from tuner.display.live import LiveTable, progress
    from tuner.display.watch import watch
    from tuner.storage.pull import pull

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        pull(study.dir)

    with progress(quiet=is_quiet or not sys.stdout.isatty()) as display:
        watch(study, display if isinstance(display, LiveTable) else None, pause)


@app.command(epilog="Example:  tune trials qwen_lr --format csv > trials.csv")
def trials(
    study: StudyArgument,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
    address: ThereOption = None,
) -> int:
    """List the trials of a study."""
    if address is not None:
        return verb_there(address, "trials", study, root, "--format", form.value)
    output.trials(open_study(study, root), form)
    return 0


@app.command(epilog="Example:  tune best qwen_lr --top 5 --format json")
def best(
    study: StudyArgument,
    top: Annotated[int | None, typer.Option("--top", min=1, metavar="K", help="The K best trials.")] = None,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
    address: ThereOption = None,
) -> int:
    """Show the best trial and its checkpoint."""
    if address is not None:
        words = [] if top is None else ["--top", str(top)]
        return verb_there(address, "best", study, root, "--format", form.value, *words)
    opened = open_study(study, root)
    leaders = [opened.best_trial, *opened.best(top or 1)[1:]]
    output.best(opened, leaders, form, as_list=top is not None)
    return 0


@app.command(epilog="Example:  tune export qwen_lr --to models/qwen_best")
def export(
    study: StudyArgument,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to make.", show_default=False)],
    trial: Annotated[int | None, typer.Option("--trial", min=0, metavar="T", help="Not the best trial but T.")] = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Of the weights; float32 is as they were trained.")
    ] = "float32",
    merge: Annotated[bool, typer.Option("--merge/--no-merge", help="LoRA: make adapters part of the weights.")] = True,
    register: Annotated[
        str | None, typer.Option("--register", metavar="NAME", help="A new version of this model in MLflow, too.")
    ] = None,
    root: RootOption = ROOT,
    address: ThereOption = None,
) -> int:
    """Write the best trial's model as a Hugging Face folder.

    DIR holds model, tokenizer and generation config: AutoModelForCausalLM.from_pretrained(DIR).
    """
    if address is not None:
        refuse_there(address, "export", study, root, "--to", to)
    from trainables.progress import heard_by
    from tuner.record.export import export

    opened = open_study(study, root)
    with heard_by(output.in_place):
        record = export(opened, to, trial, dtype=dtype, merge=merge, register=register)
    output.in_place("")
    output.exported(opened, record, to)
    return 0


@app.command(epilog="Example:  tune logs qwen_lr 7 --follow")
def logs(
    study: StudyArgument,
    trial: Annotated[
        int | None, typer.Argument(metavar="[TRIAL]", min=0, help="Number of a trial; with --address it may be absent.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The worker whose log it is.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the trial ends.")] = False,
    root: RootOption = ROOT,
    address: ThereOption = None,
) -> int:
    """Print what a trial's workers printed.

    With --address and no trial: what the study itself printed there, until it ends.
    """
    if address is not None:
        words = [] if trial is None else [str(trial), "--rank", str(rank), *(["--follow"] if follow else [])]
        return logs_there(address, study, root, *words)
    if trial is None:
        raise InputError("logs needs a trial", f"List them: tune trials {study}")
    from tuner.record.log_view import find_log, goes_on, read_log

    opened = open_study(study, root)
    number = trial_of(opened, trial).number
    path = find_log(opened, number, rank, may_come=follow)
    for piece in read_log(path, lambda: follow and goes_on(opened, number)):
        output.raw(piece)
    return 0


@app.command(epilog="Example:  tune show qwen_lr 7")
def show(
    study: StudyArgument,
    trial: TrialArgument,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
    address: ThereOption = None,
) -> int:
    """Show everything about one trial.

    Its parameters, end, learning curve, checkpoints, logs, MLflow run, and how to run it again.
    """
    if address is not None:
        return verb_there(address, "show", study, root, str(trial), "--format", form.value)
    opened = open_study(study, root)
    output.trial(opened, trial_of(opened, trial), form)
    return 0


@app.command(epilog="Example:  tune reproduce qwen_lr 7 --run")
def reproduce(
    study: StudyArgument,
    trial: TrialArgument,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Default: reproduced/STUDY-TRIAL.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run it now, and compare it with the record.")] = False,
    root: RootOption = ROOT,
) -> int:
    """Run one trial again, without the study.

    Writes the file and prints the command. A trial of the built-in loop becomes one fine-tune without Ray, one of
    another loop a study with one trial.
    """
    from tuner.record.reproduce import comparison, repeated_reports, reproduction

    opened = open_study(study, root)
    record = trial_of(opened, trial)
    made = reproduction(opened, record, to or Path("reproduced", f"{opened.spec.study}-{record.number}"))
    made.write()
    output.result(made.command)
    if not run:
        return 0
    code = made.run()
    if code == 0:
        output.result(comparison(record.reports, repeated_reports(opened, record, made), opened.spec.objective.metric))
    return code


@app.command(epilog="Example:  tune ui qwen_lr")
def ui(
    study: OptionalStudyArgument = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: any that is free.")] = None,
    root: RootOption = ROOT,
) -> int:
    """Show a study in the pages of MLflow.

    Starts them on this machine until Ctrl-C, and prints the address. For a store that is a server already, only its
    address is printed.
    """
    from tuner.tracking.links import server_url, study_url, target_to_show
    from tuner.tracking.mlflow_server import ended_by_signals, served

    opened = None if study is None else open_study(study, root)
    target = target_to_show(root, opened)
    base = server_url(target)
    if base is not None:
        output.result(base if opened is None else study_url(opened, base))
        return 0
    with suppress(KeyboardInterrupt), ended_by_signals(), served(target, port) as (url, process):
        output.result(url if opened is None else study_url(opened, url))
        if opened is not None:
            output.note(f"charts: {study_url(opened, url, charts=True)}")
        output.note("Ctrl-C ends it.")
        process.wait()
        raise TuneError("the MLflow server has ended by itself", "Start it again, and see its messages: mlflow server")
    return 0


@app.command(epilog="Example:  tune report qwen_lr --open")
def report(
    study: StudyArgument,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write it elsewhere.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw its head as a picture, too.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    root: RootOption = ROOT,
) -> int:
    """Write report.html into the study's folder, and print its path.

    One page with plots, what they say in words, the cost and all trials; it needs no network.
    """
    from tuner.reports import screenshot
    from tuner.reports.report import write_report
    from tuner.storage.pull import keep

    path = write_report(open_study(study, root), to)
    if to is None:
        keep(path)
    output.result(shown(path))
    if png is not None:
        screenshot.draw(path, png)
        output.note(f"written: {png}")
    if show:
        typer.launch(str(path.absolute()))
    return 0


@app.command(epilog="Example:  tune compare qwen_lr qwen_lr-2 --to comparison.html")
def compare(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Two or more studies.", show_default=False)],
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write an HTML page with curves too.")] = None,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
) -> int:
    """Show studies side by side.

    Best value, gain, cost, trials by state, and the keys in which they differ.
    """
    from tuner.reports.compare import compared, write_comparison

    if len(studies) < 2:
        raise InputError("compare needs two studies or more", "List the studies: tune list")
    found = [compared(name, open_study(name, root)) for name in studies]
    output.comparison(found, form)
    if to is not None:
        output.note(f"written: {write_comparison(found, to)}")
    return 0


def _status_or_damage(root: Path, name: str) -> dict[str, Any]:
    """One damaged study must not hide the others."""
    try:
        return open_study(name, root).status() | {"study": name}
    except TuneError as error:
        output.error(error)
        return dict.fromkeys(output.STATUS_KEYS) | {"study": name, "state": "damaged", "counts": {}}
