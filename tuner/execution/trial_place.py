"""Where the ranks of a trial keep its checkpoints: in the study's folder, or at its URL by way of each node's disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from trainables.checkpoint_dir import PARTIAL_SUFFIX, condemn, is_step_dir, newest_complete
from trainables.parallel import Worker
from tuner.errors import TuneError
from tuner.execution.channel import Assignment, Logged, Warned
from tuner.execution.damage import clear_damage
from tuner.execution.home import Home
from tuner.execution.log_courier import SEND_EVERY_S, UPLOAD_EVERY_S, Increments, LogCourier, Uploads
from tuner.execution.trial_log import log_path
from tuner.storage.place import as_root
from tuner.storage.pull import fetch_all
from tuner.storage.trial import TrialAtUrl

IN_USE = ".in-use"


class Ranks(Protocol):
    """What is asked of the line between the ranks."""

    def send(self, message: Any) -> None:
        """Tell the slot."""

    def share(self, value: Any) -> Any:
        """Rank 0's value."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""


class StudyFolder:
    """The study's folder, which all ranks see.

    Attributes:
        assignment: The trial, with the paths that hold for this rank.
        publisher: What makes checkpoints complete elsewhere; none here.
        kept: Names of the checkpoints that are complete elsewhere.
    """

    publisher: TrialAtUrl | None = None
    kept: tuple[str, ...] = ()

    def __init__(self, assignment: Assignment, worker: Worker, line: Ranks) -> None:
        self.assignment = assignment
        self._worker, self._line = worker, line
        self._root = Path(assignment.checkpoint_dir)

    def resume_point(self) -> Path | None:
        """The newest complete checkpoint, after what a kill left has been removed; the same on every rank."""
        if self._worker.rank == 0:
            # Those that another machine has saved.
            fetch_all(self._root)
            warned = clear_damage(self._root, self.assignment.number)
            if warned is not None:
                self._line.send(warned)
        if self._worker.world_size > 1:
            self._line.share(None)
        return newest_complete(self._root)

    def condemn(self, checkpoint: Path) -> None:
        """Have nobody go on from it; called on every rank."""
        if self._worker.rank == 0:
            condemn(checkpoint)

    def ship_log(self) -> None:
        """See that what was printed is known before what is told next."""

    def leave(self) -> None:
        """This attempt has ended."""


class NodeFolder(StudyFolder):
    """A folder of this node: what its ranks save is complete at the URL alone, and what it lacks comes from there."""

    def __init__(self, assignment: Assignment, worker: Worker, line: Ranks, home: Home) -> None:
        # A rank of the driver's own node, too, leaves the working copy to the driver.
        study, number = as_root(home.url), assignment.number
        checkpoints = study / "checkpoints" / str(number)
        super().__init__(
            replace(assignment, checkpoint_dir=str(checkpoints), log_dir=str(_made(study / "logs"))), worker, line
        )
        self.publisher: TrialAtUrl = TrialAtUrl(f"{home.url}/checkpoints/{number}")
        self._log = _courier(self.assignment, worker, line, f"{home.url}/logs")
        self._in_use = FileLock(self._root / IN_USE)
        with FileLock(_made(study / "checkpoints") / ".begin"):
            self._root.mkdir(exist_ok=True)
            _hold(self._in_use)
            _clear_left(self._root)
            # Of an attempt that was killed here: no rank of this one writes before all are here.
            for part in self._root.glob(f"*{PARTIAL_SUFFIX}"):
                shutil.rmtree(part, ignore_errors=True)

    @property
    def kept(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of those at the URL, as far as this rank knows: rank 0 does."""
        return self.publisher.kept

    def resume_point(self) -> Path | None:
        """The same, of those at the URL; each node fetches what it lacks."""
        damaged: list[str] = []
        whole = list(self._of_rank_zero(self.publisher.clean))
        while whole and not all(self._on_all(lambda: self.publisher.fetch(whole[-1], self._root))):
            self.condemn(self._root / whole[-1])
            damaged.append(whole.pop())
        if damaged and self._worker.rank == 0:
            instead = f"goes on from {whole[-1]}" if whole else "starts over"
            text = f"checkpoint {', '.join(reversed(damaged))} is damaged; it {instead}"
            self._line.send(Warned(self.assignment.number, f"trial {self.assignment.number}: {text}"))
        if not whole:
            self._on_all(self._clear)
        return self._root / whole[-1] if whole else None

    def _clear(self) -> None:
        """Of a trial that starts over, each rank before any saves."""
        for path in filter(is_step_dir, self._root.iterdir()):
            shutil.rmtree(path, ignore_errors=True)

    def condemn(self, checkpoint: Path) -> None:
        """Have nobody go on from it; called on every rank."""
        self._of_rank_zero(lambda: self.publisher.condemn(checkpoint.name))

    def ship_log(self) -> None:
        """As above: the log of rank 0, which the slot gets; no rank waits for the upload of another's."""
        if self._worker.rank == 0:
            self._log.ship()

    def leave(self) -> None:
        """Leave nothing of the trial on this node."""
        self._log.close()
        shutil.rmtree(self._root, ignore_errors=True)
        self._in_use.release()

    def _of_rank_zero(self, action: Any) -> Any:
        return self._on_all(action if self._worker.rank == 0 else lambda: None)[0]

    def _on_all(self, action: Any) -> list[Any]:
        """What it returns on each rank, once it is done on all; an error on every rank alike."""
        outcome: tuple[Any, str] = (None, "")
        try:
            outcome = (action(), "")
        except (TuneError, OSError) as error:
            outcome = (None, str(getattr(error, "message", error)) or type(error).__name__)
        outcomes = self._line.gather(outcome)
        for _, failure in outcomes:
            if failure:
                raise ConnectionError(failure)
        return [result for result, _ in outcomes]


@contextmanager
def place_of(assignment: Assignment, worker: Worker, line: Ranks, home: Home | None) -> Iterator[StudyFolder]:
    """Where the ranks of this group keep a trial while the block runs; called on all of them."""
    if home is None or not home.url or all(line.gather(home.is_seen)):
        yield StudyFolder(assignment, worker, line)
        return
    place = NodeFolder(assignment, worker, line, home)
    try:
        yield place
    finally:
        place.leave()


def _courier(assignment: Assignment, worker: Worker, line: Ranks, url: str) -> LogCourier:
    path = log_path(assignment, worker.rank)
    if worker.rank == 0:
        increments = Increments(lambda text: line.send(Logged(assignment.number, text)))
        return LogCourier(path, lambda path: None, increments, SEND_EVERY_S)
    uploads = Uploads(url)
    return LogCourier(path, uploads.load, uploads, UPLOAD_EVERY_S)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _hold(lock: FileLock) -> None:
    # One of a node's ranks has it for all.
    with suppress(Timeout):
        lock.acquire(timeout=0)


def _clear_left(own: Path) -> None:
    """Delete what a killed worker left of other trials on this node."""
    for other in own.parent.iterdir():
        if other == own or not other.is_dir():
            continue
        with suppress(Timeout), FileLock(other / IN_USE, timeout=0):
            shutil.rmtree(other, ignore_errors=True)
