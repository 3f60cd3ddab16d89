"""`tune submit`, and what other verbs do with the address of a cluster that this machine is no part of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tuner.cli_arguments import ROOT, FileArgument, RootOption, SetOption, load
from tuner.display import output
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.remote.jobs import Jobs
    from tuner.remote.submission import Submission
    from tuner.study_file.spec import StudySpec

app = typer.Typer()


@app.command(epilog="Example:  tune submit search_spaces/qwen_lr.yaml --address http://head:8265 --root /mnt/studies")
def submit(
    file: FileArgument,
    address: Annotated[
        str, typer.Option("--address", metavar="http://HOST:8265", help="The cluster's dashboard.", show_default=False)
    ],
    overrides: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the study, instead of the file's.")] = None,
    root: RootOption = ROOT,
    key: Annotated[
        str, typer.Option("--idempotency-key", metavar="KEY", help="The same key again is the same submission.")
    ] = "",
    go_on: Annotated[bool, typer.Option("--resume", help="Go on with the study where it is there already.")] = False,
) -> int:
    """Run a study on a cluster, as a Ray job.

    Sends the current folder along, without studies, environments and caches, and returns when the study has begun.
    --root is a path on the cluster; a relative one counts from the home folder there.
    """
    from tuner.remote.jobs import Jobs

    spec, changes = load(file, overrides, name)
    jobs = Jobs(address)
    job = jobs.submit(file, changes, _submission(spec, root, key), go_on=go_on)
    code = jobs.watch_start(job, spec.study)
    if code == 0:
        output.result(job)
        place = f"{spec.study} --address {address}"
        output.note(f"next:\n  tune status {place}\n  tune logs {place}")
    return code


def run_there(address: str, file: Path, spec: StudySpec, changes: list[str], root: Path, *, go_on: bool) -> int:
    """`tune run` with the address of such a cluster: submit, and follow."""
    from tuner.remote.jobs import Jobs

    jobs = Jobs(address)
    return _follow(jobs, spec.study, jobs.submit(file, changes, _submission(spec, root), go_on=go_on))


def resume_there(address: str, study: str, overrides: list[str], root: Path) -> int:
    """`tune resume` of a study that was submitted."""
    from tuner.remote.jobs import Jobs

    jobs = Jobs(address)
    return _follow(jobs, study, jobs.resume(study, root, overrides))


def _follow(jobs: Jobs, study: str, job: str) -> int:
    """Print what a study's job prints, until it ends; Ctrl-C leaves the study running."""
    try:
        return jobs.follow(job)
    except KeyboardInterrupt:
        output.note(f"the study goes on as job {job}; end it with: tune stop {study} --address {jobs.address}")
        raise


def logs_there(address: str, study: str, root: Path, *words: str) -> int:
    """`tune logs` of a study that was submitted: of a trial, or without one of the study's job."""
    from tuner.remote.jobs import Jobs

    jobs = Jobs(address)
    return jobs.run_verb("logs", study, root, *words) if words else jobs.follow(jobs.job_of(study))


def verb_there(address: str, verb: str, study: str, root: Path, *words: str) -> int:
    """Any verb about a study that was submitted, on its cluster."""
    from tuner.remote.jobs import Jobs

    return Jobs(address).run_verb(verb, study, root, *words)


def refuse_there(address: str, verb: str, study: str, root: Path, *words: str | Path) -> NoReturn:
    """Say where to run a verb that leaves files where it runs."""
    from tuner.remote.jobs import Jobs

    known = Jobs(address).find(study, root)
    raise InputError(
        f"{verb} writes where it runs: from outside, nothing of it would arrive here",
        f"On a machine of the cluster: tune {verb} {study} --root {known.root} {' '.join(map(str, words))}",
    )


def _submission(spec: StudySpec, root: Path, key: str = "") -> Submission:
    from tuner.remote.submission import Submission, root_there

    return Submission(spec.study, root_there(root), spec.env, spec.secrets, key)
