"""Writes to MLflow in a process of its own, at a low priority, so that training and decisions lose no time to it.

Importing mlflow and making its tables cost three seconds of processor time, every run some more; in the driver they
would hold up its decisions, and on full cores the training. The driver sends chunks of events as JSON lines and waits,
in its sending thread, for the answer; the process ends with the pipe, so it outlives no driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.processes import python_path, set_niceness
from tuner.tracking.client import set_environment
from tuner.tracking.pending import Event
from tuner.tracking.preload import preload
from tuner.tracking.target import Target

if TYPE_CHECKING:
    from tuner.study_file.spec import StudySpec
    from tuner.tracking.runs import StudyRuns

# A tenth of a core beside full ones: a page of MLflow follows a study, and the training hardly notices.
NICENESS = 10
PATHS = ("database", "artifacts")


@dataclasses.dataclass(frozen=True)
class Listener:
    """What is called when something happens in the store.

    Attributes:
        on_run: Called with (trial number, run id, experiment id) whenever a trial starts.
        on_warning: Called with one line when MLflow refuses something for good.
    """

    on_run: Callable[[int, str, str], None]
    on_warning: Callable[[str], None]


class LocalStore:
    """A study's runs in this process; opened when the first events come, and anew after each failure."""

    def __init__(self, target: Target, spec: StudySpec, study_dir: Path, listener: Listener) -> None:
        self._target, self._spec, self._dir, self._listener = target, spec, study_dir, listener
        self._runs: StudyRuns | None = None
        self._artifact_failures: dict[tuple[str, str], int] = {}

    def apply(self, events: Sequence[Event]) -> None:
        """Take all events, or raise what the store raised; taking one twice changes nothing."""
        # The runs are looked up again: a call that failed may have been carried out there.
        runs, self._runs = self._runs or self._open(), None
        runs.apply(events)
        self._runs = runs

    def hurry(self) -> None:
        """Nothing to be done."""

    def close(self) -> None:
        """Nothing is held."""

    def _open(self) -> StudyRuns:
        from tuner.tracking.runs import StudyRuns

        heard = self._listener
        return StudyRuns(
            self._target,
            self._spec,
            self._dir,
            on_run=heard.on_run,
            on_warning=heard.on_warning,
            artifact_failures=self._artifact_failures,
        )


class StoreProcess:
    """A `LocalStore` in another process, started when the first events come and whenever it has gone."""

    def __init__(self, target: Target, spec: StudySpec, study_dir: Path, listener: Listener) -> None:
        self._target, self._spec, self._dir, self._listener = target, spec, study_dir, listener
        self._process: subprocess.Popen[str] | None = None
        self._niceness = NICENESS

    def apply(self, events: Sequence[Event]) -> None:
        """Have the process take all events.

        Raises:
            OSError: The process has ended.
            RuntimeError: The store raised; the text is the reason.
        """
        process = self._running()
        assert process.stdout is not None
        _send(process, {"events": list(events)})
        for line in process.stdout:
            answer = json.loads(line)
            if "run" in answer:
                self._listener.on_run(*answer["run"])
            elif "warning" in answer:
                self._listener.on_warning(answer["warning"])
            elif answer["error"] is None:
                return
            else:
                raise RuntimeError(answer["error"])
        raise OSError(f"the process that writes to MLflow ended with exit code {process.wait()}")

    def hurry(self) -> None:
        """Somebody waits: give the process the priority of this one, where the system lets us."""
        self._niceness = 0
        if self._process is not None:
            set_niceness(self._process.pid, 0)

    def close(self) -> None:
        """End the process; what it is writing just now is lost to it, not to the study."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # A session of its own: Ctrl-C in the terminal is for the driver, who still has to send the ends of trials.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner.tracking.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": python_path()},
                start_new_session=True,
            )
            set_niceness(self._process.pid, self._niceness)
            _send(self._process, self._setting())
        return self._process

    def _setting(self) -> dict[str, Any]:
        target = dataclasses.asdict(self._target)
        target |= {name: str(target[name]) for name in PATHS if target[name]}
        return {"target": target, "spec": self._spec.model_dump_json(), "study_dir": str(self._dir)}


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


# -- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer chunks of events until the pipe ends."""
    requests, answer = sys.stdin, _answers()
    setting = json.loads(requests.readline())
    with _only_writer(setting["study_dir"]):
        set_environment()
        preload(has_database=setting["target"]["database"] is not None)
        store = _store(setting, answer)
        for line in requests:
            try:
                store.apply(json.loads(line)["events"])
            except Exception as error:
                answer(error=str(error) or type(error).__name__)
            else:
                answer(error=None)


def _answers() -> Callable[..., None]:
    # Whatever prints, MLflow or a plugin of its, must not get between the answers.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**content: Any) -> None:
        pipe.write(json.dumps(content) + "\n")

    return answer


@contextlib.contextmanager
def _only_writer(study_dir: str) -> Iterator[None]:
    """Wait for the process of a driver that was killed: it may still be writing its last events."""
    descriptor = os.open(study_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every network file system can lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _store(setting: dict[str, Any], answer: Callable[..., None]) -> LocalStore:
    from tuner.study_file.spec import StudySpec

    target = setting["target"]
    target |= {name: Path(target[name]) for name in PATHS if target[name]}
    listener = Listener(
        on_run=lambda number, run_id, experiment_id: answer(run=[number, run_id, experiment_id]),
        on_warning=lambda text: answer(warning=text),
    )
    spec = StudySpec.model_validate_json(setting["spec"])
    return LocalStore(Target(**target), spec, Path(setting["study_dir"]), listener)


if __name__ == "__main__":
    main()
