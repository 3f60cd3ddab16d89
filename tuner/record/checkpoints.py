"""Which checkpoints of a study stay: those of its best trials and of every trial that may go on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainables.checkpoint_dir import is_complete, step_dir
from tuner.execution.channel import Saved
from tuner.planning.space import checkpoint_bytes, free_bytes, gigabytes
from tuner.record.record import TrialRecord, ranked, value_step
from tuner.record.study import Study
from tuner.storage.files import is_away, note_away


class Checkpoints:
    """The checkpoint folders of a study's trials; what may go is deleted beside the search, not in its way."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._root = study.dir.resolve() / "checkpoints"
        self._size = 0
        # Complete trials that may have a checkpoint: few of thousands.
        self._keeping = {each.number for each in study.trials() if each.state == "COMPLETE" and each.checkpoint}
        self._deleter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-deleter")
        for condemned in self._root.glob(".*.deleted"):
            # A kill fell into its deletion.
            self._delete(condemned)
        self._forget_ended()

    def _forget_ended(self) -> None:
        """What a kill, or an upload under way, has left of trials that keep nothing."""
        ended = {record.number for record in self._study.trials() if record.state in ("PRUNED", "FAILED")}
        for folder in self._root.glob("*"):
            if folder.name.isdecimal() and int(folder.name) in ended:
                self._forget(int(folder.name))

    def begin(self, number: int) -> None:
        """A trial is about to run: at the URL, what its workers upload is deleted once its folder here is gone."""
        self.directory(number).mkdir(parents=True, exist_ok=True)

    def directory(self, number: int) -> Path:
        """The folder of a trial's checkpoints."""
        return self._root / str(number)

    def note_saved(self, number: int, saved: Sequence[Saved]) -> None:
        """Record the newest checkpoint of a trial, relative to the study so that the study can be moved."""
        if saved:
            newest = Path(saved[-1].path)
            if saved[-1].kept:
                note_away(self.directory(number), saved[-1].kept)
            self._note(number, newest)
            self._size = checkpoint_bytes(self.directory(number) / newest.name) or self._size

    def make_room(self, num_slots: int) -> str:
        """Delete what can be spared when the next checkpoint of each slot may not fit any more.

        Returns:
            A warning, or nothing while all is well.
        """
        needed, free = num_slots * self._size, free_bytes(self._study.dir)
        if needed <= free:
            return ""
        spared = self._keep(1)
        gone = f"; deleted those of trial {', '.join(map(str, spared))}, which are not the best" if spared else ""
        return (
            f"the disk is filling up: the next checkpoints need {gigabytes(needed)}, {self._study.dir} has "
            f"{gigabytes(free)} left{gone}"
        )

    def settle(self, number: int, state: str) -> None:
        """A trial is about to end: point at the checkpoint of its value, or delete what a stopped one left."""
        if state != "COMPLETE":
            self._forget(number)
            return
        record = self._study.trial(number)
        if self._study.spec.objective.scope == "best" and record.reports:
            best = step_dir(self.directory(number), value_step(record.reports, self._study.spec.objective))
            if is_complete(best) or is_away(best):
                self._note(number, best)
                record = self._study.trial(number)
        if record.checkpoint is not None:
            self._keeping.add(number)

    def keep_best(self) -> None:
        """Delete the checkpoints of complete trials beyond the best `checkpoint.keep_best_trials`."""
        self._keep(max(1, self._study.spec.checkpoint.keep_best_trials))

    def _keep(self, num: int) -> list[int]:
        """Delete those beyond the best so many; returns whose they were."""
        records = [self._study.trial(number) for number in self._keeping]
        complete = [record for record in records if record.state == "COMPLETE"]
        # One whose checkpoint is gone or damaged takes nobody's place.
        usable = [record for record in ranked(complete, self._study.spec.objective) if _has_checkpoint(record)]
        spared = [record.number for record in usable[num:]]
        for number in spared:
            self._forget(number)
        self._keeping.difference_update(spared)
        return spared

    def close(self) -> None:
        """Wait for the deletions under way."""
        self._deleter.shutdown(wait=True)

    def _note(self, number: int, path: Path) -> None:
        # Workers may reach the study by another path than this process; the tail is the same on both.
        relative = Path("checkpoints", self.directory(number).name, path.name)
        self._study.note(number, checkpoint=relative.as_posix())

    def _forget(self, number: int) -> None:
        directory = self.directory(number)
        condemned = directory.with_name(f".{number}.deleted")
        try:
            # Renamed first: what is being deleted is no checkpoint any more, and the number may be used again.
            directory.rename(condemned)
        except OSError:
            return
        self._delete(condemned)

    def _delete(self, path: Path) -> None:
        self._deleter.submit(shutil.rmtree, path, ignore_errors=True)


def _has_checkpoint(record: TrialRecord) -> bool:
    if record.checkpoint is None:
        return False
    # At a URL are only those that are whole.
    return "://" in record.checkpoint or is_complete(Path(record.checkpoint))
