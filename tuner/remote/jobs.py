"""Studies on a cluster from outside, as Ray jobs: submit one, follow it, and run any verb about it there.

A study that is submitted is a job named after it, whose metadata say where its studies live. A verb about it is a job
of a second or two, whose output is passed on and which is then deleted: what runs there is the same command line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands import DEFAULT_ROOT
from tuner.display import output
from tuner.errors import ClusterError, InputError, StudyExistsError, StudyNotFoundError, TuneError
from tuner.execution.address import check_reachable, check_version, reason_of
from tuner.execution.cluster_token import adopt_token, settle_token
from tuner.remote.job_log import JobLog
from tuner.remote.package import name_of, pack
from tuner.remote.submission import Submission, root_there

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

# How long `submit` watches for the study to begin.
_START_PATIENCE_S = 120.0
_POLL_S = 0.3
_ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
# How long Ray's own stop waits: trials save after their next step.
_PATIENT = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
# Exit codes of `tune run` that say that nothing was started.
_NOT_STARTED = frozenset({2, 3})


class Jobs:
    """The jobs of one cluster.

    Attributes:
        address: As given.

    Args:
        address: `http://HOST:8265` of its dashboard, or `ray://HOST:10001`.

    Raises:
        ClusterError: It cannot be reached, does not take the token, or has another version of Ray.
    """

    def __init__(self, address: str) -> None:
        check_reachable(address)
        self.address = address
        with _only(address), _as_cluster_error(address):
            from ray.job_submission import JobSubmissionClient

            # What it does is said by us, where it is worth a line.
            logging.disable(logging.WARNING)
            adopt_token()
            if address.startswith("ray://"):
                settle_token(address)
            self._client: JobSubmissionClient = JobSubmissionClient(address)
        check_version(address, self._client._server_ray_version or "")

    def submit(self, file: Path, changes: Sequence[str], submission: Submission, *, go_on: bool) -> str:
        """Give a study to the cluster.

        Returns:
            The id of its job; with a key that was used before, that of the job it made.

        Raises:
            InputError: The file is not in the current folder, or this does not fit.
            StudyExistsError: It has been submitted already.
        """
        here, place = Path.cwd(), file.resolve()
        if not place.is_relative_to(here):
            raise InputError(f"{file} is not in the folder that is sent to the cluster", f"cd {file.parent}")
        words = ["run", place.relative_to(here).as_posix(), "--root", submission.root, *(["--resume"] if go_on else [])]
        words += [word for change in changes for word in ("--set", change)]
        return self._start(submission, words, may_exist=go_on)

    def resume(self, study: str, root: Path, overrides: Sequence[str]) -> str:
        """Go on with a study that was submitted.

        Returns:
            The id of the new job.

        Raises:
            StudyNotFoundError: The cluster knows of no such study.
            InputError: It runs.
        """
        submission = self.find(study, root)
        words = ["resume", study, "--root", submission.root, *(word for item in overrides for word in ("--set", item))]
        return self._start(replace(submission, key=""), words, may_exist=True)

    def find(self, study: str, root: Path) -> Submission:
        """The newest submission of a study; one at `root` where that is given.

        Raises:
            StudyNotFoundError: There is none.
        """
        found = [submission for _, submission in self._of(study)]
        if not found and root == DEFAULT_ROOT:
            known = sorted({submission.study for _, submission in self._all()})
            remedy = f"Studies there: {', '.join(known)}." if known else "Name its place on the cluster: --root DIR"
            raise StudyNotFoundError(f"no study {study!r} was submitted to {self.address}", remedy)
        return found[-1] if root == DEFAULT_ROOT else Submission(study, root_there(root))

    def job_of(self, study: str) -> str:
        """The id of the newest job of a study.

        Raises:
            StudyNotFoundError: There is none.
        """
        self.find(study, DEFAULT_ROOT)
        return str(self._of(study)[-1][0].submission_id)

    def run_verb(self, verb: str, study: str, root: Path, *words: str) -> int:
        """Run a verb about a study on the cluster; what it prints is printed here.

        Returns:
            Its exit code.
        """
        known = self.find(study, root)
        entry = ["python", "-m", "tuner.remote.on_cluster", verb, study, "--root", known.root, *words]
        columns = os.environ.get("COLUMNS", "")
        env = {"COLUMNS": columns} if columns else {}
        job = self._submit_job(entry, f"tune-{verb}-{secrets.token_hex(4)}", None, env, {})
        try:
            return self.follow(job)
        finally:
            with suppress(RuntimeError), _as_cluster_error(self.address):
                self._client.delete_job(job)

    def follow(self, job: str, until: Callable[[str], bool] = lambda line: False) -> int:
        """Print what a job prints, from its first line on, until it ends.

        Args:
            job: Its id.
            until: Ends it earlier, at a line.

        Returns:
            The exit code of its command; 0 when `until` ended it.
        """
        printer = JobLog(until)
        self._wait(job, lambda status: status != "PENDING")
        with _as_cluster_error(self.address):
            asyncio.run(self._tail(job, printer))
        if printer.has_seen:
            return 0
        self._wait(job, lambda status: status in _ENDED)
        details = self._client.get_job_info(job)
        if not printer.has_begun:
            raise ClusterError(f"job {job} has not begun: {_last_words(details)}", f"See {self.address} for its log.")
        return int(details.driver_exit_code if details.driver_exit_code is not None else 1)

    def watch_start(self, job: str, study: str) -> int:
        """Wait until a study has begun; what goes wrong before is printed.

        Returns:
            0, or the exit code of the job that has ended.
        """
        deadline = time.monotonic() + _START_PATIENCE_S
        self._wait(job, lambda status: status != "PENDING", deadline)
        if self._status(job) == "PENDING":
            output.note(f"job {job} waits for its turn")
            return 0
        return self.follow(job, lambda line: line.startswith(f"study {study}: "))

    # -- one job ------------------------------------------------------------------------------------------------

    def _start(self, submission: Submission, words: Sequence[str], *, may_exist: bool) -> str:
        from tuner.study_file.variables import values_of

        env, hidden = values_of(submission.env, "env"), values_of(submission.secrets, "secrets")
        number, repeated = self._next_number(submission, may_exist=may_exist)
        if repeated:
            return repeated
        name = f"tune-{submission.study}" + (f"-{number}" if number > 1 else "")
        # Not a part of what a job is submitted with: Ray keeps and shows that.
        place = f"gcs://_ray_pkg_{secrets.token_hex(16)}.zip" if hidden else ""
        hidden_words = ["--secrets", place] if place else []
        entry = ["python", "-m", "tuner.remote.on_cluster", *hidden_words, *words, "--address", "auto"]
        try:
            job = self._submit_job(entry, name, Path.cwd(), _PATIENT | env, submission.to_metadata())
        except ClusterError:
            # Ray takes a name once: where somebody else was faster, this says so.
            if repeated := self._next_number(submission, may_exist=may_exist)[1]:
                return repeated
            raise
        if place:
            self._put(place.removeprefix("gcs://"), json.dumps(hidden).encode())
        return job

    def _next_number(self, submission: Submission, *, may_exist: bool) -> tuple[int, str]:
        """(which job of its study the next one is, the job that a repeated submission has made already)."""
        known, study, there = self._of(submission.study), submission.study, f"--address {self.address}"
        if repeated := [job for job, other in known if submission.key and other.key == submission.key]:
            return len(known), str(repeated[-1].submission_id)
        if running := [job for job, _ in known if job.status not in _ENDED]:
            remedy = f"See how it stands: tune status {study} {there}"
            raise StudyExistsError(f"study {study!r} runs there already, as job {running[-1].submission_id}", remedy)
        was_started = [job for job, _ in known if job.status != "FAILED" or job.driver_exit_code not in _NOT_STARTED]
        if was_started and not may_exist:
            raise StudyExistsError(
                f"study {study!r} was submitted already, as job {was_started[-1].submission_id}",
                f"Go on with it: tune resume {study} {there}   or start another: --name {study}-2",
            )
        return len(known) + 1, ""

    def _submit_job(
        self, entry: Sequence[str], name: str, directory: Path | None, env: Mapping[str, str], metadata: dict[str, str]
    ) -> str:
        content = pack(directory)
        package = name_of(content)
        with _as_cluster_error(self.address):
            if not self._client._package_exists(f"gcs://{package}"):
                self._put(package, content)
            runtime_env: dict[str, Any] = {"working_dir": f"gcs://{package}", "env_vars": dict(env)}
            return str(
                self._client.submit_job(
                    entrypoint=shlex.join(entry), submission_id=name, runtime_env=runtime_env, metadata=metadata
                )
            )

    def _put(self, name: str, content: bytes) -> None:
        answer = self._client._do_request("PUT", f"/api/packages/gcs/{name}", data=content)
        if answer.status_code != 200:
            raise ClusterError(f"{self.address} has not taken {len(content)} bytes: status {answer.status_code}")

    def _all(self) -> list[tuple[JobDetails, Submission]]:
        with _as_cluster_error(self.address):
            jobs = self._client.list_jobs()
        jobs.sort(key=lambda job: job.start_time or 0)
        return [(job, submission) for job in jobs if (submission := Submission.of(job)) is not None]

    def _of(self, study: str) -> list[tuple[JobDetails, Submission]]:
        return [(job, submission) for job, submission in self._all() if submission.study == study]

    def _status(self, job: str) -> str:
        with _as_cluster_error(self.address):
            return str(self._client.get_job_info(job).status.value)

    def _wait(self, job: str, is_over: Callable[[str], bool], deadline: float = float("inf")) -> None:
        while not is_over(self._status(job)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    async def _tail(self, job: str, printer: JobLog) -> None:
        async for piece in self._client.tail_job_logs(job):
            printer.take(piece)
            if printer.has_seen:
                return


def _last_words(job: JobDetails) -> str:
    lines = (job.message or str(job.status)).strip().splitlines()
    return lines[-1] if lines else ""


@contextmanager
def _only(address: str) -> Iterator[None]:
    """Ray's own variables would win over an address that was asked for."""
    kept = {name: os.environ.pop(name) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def _as_cluster_error(address: str) -> Iterator[None]:
    try:
        yield
    except (TuneError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise reason_of(address, error) from error
