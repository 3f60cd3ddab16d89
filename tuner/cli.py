"""The command line: each verb parses, calls and prints. What it does is in the modules it calls."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner import cli_jobs, cli_launch, cli_reading
from tuner.cli_arguments import (
    ROOT,
    FileArgument,
    FormatOption,
    RootOption,
    SetOption,
    ShapeOption,
    StudyArgument,
    ThereOption,
    load,
    open_study,
)
from tuner.commands import command
from tuner.display import output
from tuner.display.formats import Format, Shape
from tuner.errors import InputError, Problem, SpecError, TuneError
from tuner.execution.address import is_outside

if TYPE_CHECKING:
    from tuner.decisions.observer import Observer
    from tuner.record.study import Study
    from tuner.study_file.spec import StudySpec

# Verbs import what they need when called: `--help` and `validate` start at once, and only `run` and `resume` load Ray.
USAGE, CANNOT, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    name="tune",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example:  tune run search_spaces/quickstart.yaml",
)
# In the help they stand behind the verbs that run things.
app.add_typer(cli_reading.app)
app.add_typer(cli_jobs.app)
app.add_typer(cli_launch.app)

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Of a Ray cluster: auto or HOST:PORT joins it from a machine of it; http://... runs it there as a job.",
    ),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Every report of every trial as a line, too.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; results, warnings and errors only.")]


def _version(wanted: bool) -> None:
    if wanted:
        output.version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _tune(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Hyperparameter search for LLM fine-tuning: Optuna decides, Ray executes, MLflow shows."""
    if context.invoked_subcommand is None:
        output.result(context.get_help())
        raise typer.Exit(USAGE)


@app.command(epilog="Example:  tune run search_spaces/qwen_lr.yaml --set train.max_steps=20 --name first_try")
def run(
    file: FileArgument,
    overrides: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the study, instead of the file's.")] = None,
    root: RootOption = ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; start nothing.")] = False,
    go_on: Annotated[bool, typer.Option("--resume", help="Go on with the study where it is there already.")] = False,
    address: AddressOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Run the study that FILE describes.

    Checks the file, creates the study, runs its trials and prints the leaderboard.
    """
    spec, changes = load(file, overrides, name)
    if dry_run:
        return _print_plan(spec, address)
    if address is not None and is_outside(address):
        return cli_jobs.run_there(address, file, spec, changes, root, go_on=go_on)
    from tuner.execution import search
    from tuner.storage.pull import pull

    pull(root / spec.study)
    with _progress(root / spec.study, quiet, verbose) as observer:
        if go_on and (root / spec.study).exists():
            return _finish(search.resume(spec.study, root=root, changed=spec, observer=observer, address=address))
        study = search.run(spec, source_text=_read(file), root=root, observer=observer, address=address)
    return _finish(study)


@app.command(epilog="Example:  tune resume qwen_lr --set search.num_trials=128")
def resume(
    study: StudyArgument,
    overrides: SetOption = None,
    root: RootOption = ROOT,
    address: AddressOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Go on with a study, or extend it.

    Finished trials are never repeated; interrupted ones go on from their newest checkpoint.
    """
    if address is not None and is_outside(address):
        return cli_jobs.resume_there(address, study, overrides or [], root)
    from tuner.execution import search
    from tuner.record.study_dir import find_study
    from tuner.storage.pull import pull

    pull(root / study)
    with _progress(find_study(root, study), quiet, verbose) as observer:
        opened = search.resume(study, root=root, overrides=overrides or [], observer=observer, address=address)
    return _finish(opened)


@app.command(epilog="Example:  tune confirm qwen_lr --top 3 --seeds 5")
def confirm(
    study: StudyArgument,
    top: Annotated[int, typer.Option("--top", min=1, metavar="K", help="The K best trials.")] = 3,
    seeds: Annotated[int, typer.Option("--seeds", min=2, metavar="N", help="New seeds for each.")] = 3,
    root: RootOption = ROOT,
    form: FormatOption = Format.TABLE,
    address: AddressOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Run the best trials and the default one again with new seeds, and name the winner.

    To full length each. What was run before is kept: more seeds, or what an interruption left, are added to it.
    """
    from tuner.reports.confirm import confirm as run_again

    opened = open_study(study, root)
    again = command("confirm", opened.dir, "--top", str(top), "--seeds", str(seeds))
    with _progress(opened.dir, quiet, verbose, go_on=again) as observer:
        found, state = run_again(opened, top=top, seeds=seeds, observer=observer, address=address)
    output.confirmed(opened, found, form)
    if found.pending:
        output.note(f"{state}; go on with: {again}")
    elif found.ties:
        more = command("confirm", opened.dir, "--top", str(top), "--seeds", str(2 * seeds))
        output.note(f"More seeds may tell them apart: {more}")
    if state == "interrupted":
        return INTERRUPTED
    return 0 if any(arm.values for arm in found.arms) else 1


@app.command(epilog="Example:  tune validate search_spaces/*.yaml")
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The study files.", show_default=False)],
    overrides: SetOption = None,
) -> int:
    """Check study files, start nothing.

    Every fault of every file is shown at once, with its line.
    """
    problems: list[Problem] = []
    for file in files:
        try:
            spec, _ = load(file, overrides, None)
        except SpecError as error:
            problems += error.problems
        else:
            output.checked(file, spec.warnings())
    if problems:
        raise SpecError(problems)
    return 0


@app.command(epilog="Example:  tune plan search_spaces/qwen_lr.yaml --probe --price 2.5")
def plan(
    file: FileArgument,
    overrides: SetOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Run a few steps in a temporary folder, and measure instead of assuming.")
    ] = False,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Of a GPU-hour; without GPUs of an hour of a slot.")
    ] = None,
    address: AddressOption = None,
    form: ShapeOption = Shape.TABLE,
) -> int:
    """Say what a study will take: steps, hours, GPU-hours, money, room; and what that rests on.

    Nothing is started but a probe, which creates no study.
    """
    spec, _ = load(file, overrides, None)
    if probe:
        output.note("probe: the first steps of the study, in a temporary folder ...")
    return _print_plan(spec, address, with_probe=probe, price=price, form=form)


@app.command(epilog="Example:  tune doctor --address 10.0.0.1:6379 --root /shared/studies")
def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A study that is to run here.", show_default=False)
    ] = None,
    overrides: SetOption = None,
    root: RootOption = ROOT,
    address: AddressOption = None,
    form: ShapeOption = Shape.TABLE,
) -> int:
    """Look for what would keep a study from running here: each line ok, warn or fail, with the remedy.

    Exits with 3 where anything fails. Starts a Ray of its own for some seconds, or joins the one at --address.
    """
    from tuner.doctor.checks import Level
    from tuner.doctor.examination import examine

    spec = None if file is None else load(file, overrides, None)[0]
    found = examine(address=address, root=root, spec=spec)
    output.findings(found, form)
    return CANNOT if any(finding.level is Level.FAIL for finding in found) else 0


@app.command(epilog="Example:  tune stop qwen_lr")
def stop(
    study: StudyArgument,
    root: RootOption = ROOT,
    wait_s: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for its end.")] = 60.0,
    address: ThereOption = None,
) -> int:
    """End a study, or its confirmation, that runs in another terminal.

    Its running trials save a checkpoint; it can be gone on with.
    """
    if address is not None:
        return cli_jobs.verb_there(address, "stop", study, root, "--wait", str(wait_s))
    from tuner.reports.confirmation import FOLDER, command_again, open_confirmation
    from tuner.storage.pull import pull

    opened = open_study(study, root)
    confirmation = None if opened.is_running else open_confirmation(opened)
    running = confirmation or opened
    if not running.is_running:
        raise InputError(f"study {study!r} is not running", f"See how it stands: {command('status', opened.dir)}")
    running.ask_to_stop()
    deadline = time.monotonic() + wait_s
    while running.is_running and time.monotonic() < deadline:
        time.sleep(0.2)
        pull(running.dir)
    if running.is_running:
        raise TuneError(f"study {study!r} still runs after {wait_s:g} s", "It ends once its trials have saved.")
    ended = open_study(running.dir.name, running.dir.parent)
    if confirmation is None:
        output.stopped(opened.name, ended, command("resume", opened.dir))
    else:
        output.stopped(f"{opened.name}/{FOLDER}", ended, command_again(opened, confirmation))
    return 0


def _read(file: Path) -> str:
    return file.read_bytes().decode("utf-8")


def _print_plan(
    spec: StudySpec,
    address: str | None,
    *,
    with_probe: bool = False,
    price: float | None = None,
    form: Shape = Shape.TABLE,
) -> int:
    from tuner.display.live import progress
    from tuner.planning.machine import process_age_s
    from tuner.planning.planned import plan

    command_s = process_age_s()
    with progress(quiet=True) as observer:
        foreseen = plan(
            spec, address=address, with_probe=with_probe, price=price, observer=observer, command_s=command_s
        )
    output.plan(foreseen, form)
    return 0


@contextmanager
def _progress(study_dir: Path, quiet: bool, verbose: bool = False, go_on: str = "") -> Iterator[Observer]:
    """The progress display; a search that is cut off still says how to go on."""
    from tuner.display.live import progress

    try:
        with progress(quiet=quiet, verbose=verbose) as observer:
            yield observer
    except KeyboardInterrupt:
        output.cut_off(study_dir, go_on)
        raise


def _finish(study: Study) -> int:
    """Print the outcome; 130 interrupted, 1 when no trial completed, else 0."""
    output.outcome(study)
    state = study.status()
    if state["state"] == "interrupted":
        return INTERRUPTED
    return 0 if state["counts"]["COMPLETE"] else 1


def main() -> None:
    """Entry point of `tune`, `tuner` and `python -m tuner`: the one place where errors become exit codes."""
    try:
        code = app(prog_name="tune", standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = _report(error)
    sys.exit(code)


def _report(error: Exception) -> int:
    """Say what went wrong on stderr, and return the exit code."""
    if os.environ.get("TUNE_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):
        # The reader is gone (`| head`): the interpreter's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, TuneError):
        output.error(error)
        return error.exit_code
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        output.usage_error(error.format_message(), context.command_path if context else "tune")
        return error.exit_code
    output.unexpected(error)
    return 1
