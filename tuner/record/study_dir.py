"""The folder of a study: where it is, which files it holds, and what is refused about them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from trainables.checkpoint_dir import sync_to_disk
from tuner.commands import command
from tuner.errors import StudyAbortedError, StudyDamagedError, StudyExistsError, StudyNotFoundError
from tuner.record.storage import JOURNAL
from tuner.storage.files import entries, is_away
from tuner.storage.place import shown, url_of
from tuner.study_file.spec import StudySpec

SPEC, SOURCE, LOCK, STOP, REPORT = "spec.json", "study.yaml", "study.lock", "stop", "report.html"


def find_study(root: Path, name: str) -> Path:
    """The folder of a study given by name or path.

    Raises:
        StudyNotFoundError: No such study.
    """
    for directory in (root / name, Path(name)):
        if _is_study(directory) or (directory / SOURCE).exists():
            return directory
    known, place = list_studies(root), shown(root)
    remedy = f"Studies there: {', '.join(known)}." if known else f"There is no study under {place}; see `tune run`."
    raise StudyNotFoundError(f"no study {name!r} under {place}", remedy)


def list_studies(root: Path) -> list[str]:
    """Names of the studies under `root`, sorted."""
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if _is_study(path) and not path.name.startswith("."))


def _is_study(directory: Path) -> bool:
    # One that has lost a file is damaged, not gone.
    return any((directory / name).exists() for name in (SPEC, JOURNAL, LOCK))


def refuse_existing(name: str, root: Path) -> None:
    """Raise StudyExistsError when the name is taken."""
    if (root / name).exists():
        raise StudyExistsError(
            f"study {name!r} exists already in {shown(root / name)}",
            f"Go on with it: {command('resume', root / name)}   or start another: --name {name}-2",
        )


def write_spec(path: Path, spec: StudySpec) -> None:
    """Write a specification that reaches the disk before it is renamed into place."""
    path.write_text(spec.model_dump_json(indent=1), encoding="utf-8")
    # After a power cut an empty file must not stand where a whole one stood.
    sync_to_disk(path)


def replace_spec(directory: Path, spec: StudySpec) -> None:
    """Put a changed specification in the place of the old one, durably.

    Raises:
        StudyAbortedError: It cannot be written; the old one is still there.
    """
    draft = directory / f"{SPEC}.new"
    try:
        write_spec(draft, spec)
        draft.replace(directory / SPEC)
    except OSError as error:
        draft.unlink(missing_ok=True)
        remedy = f"It is as it was. Mend the cause, then: {command('resume', directory)}"
        raise cannot_be_written(directory / SPEC, error, remedy) from error


def cannot_be_written(path: Path, error: Exception, remedy: str) -> StudyAbortedError:
    """The error that says so in one line, to be raised."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).splitlines()[0]
    return StudyAbortedError(f"{path} cannot be written: {reason}", remedy)


def traces_of_trials(directory: Path) -> dict[int, Path]:
    """What trials left beside the record, by their numbers: a log or checkpoints."""
    is_at_url = url_of(directory) is not None
    return {number: path for path, number in _left(directory) if not (is_at_url and _is_of_workers(path))}


def forget_unrecorded(directory: Path, num_recorded: int) -> None:
    """Delete what workers have left at the URL of trials that the killed driver had not uploaded the record of."""
    if url_of(directory) is None:
        return
    for path, number in _left(directory):
        if number >= num_recorded and _is_of_workers(path):
            path.unlink() if path.is_file() else shutil.rmtree(path)


def _left(directory: Path) -> list[tuple[Path, int]]:
    left = [*(directory / "logs").glob("*.rank*.log"), *(directory / "checkpoints").glob("*")]
    numbers = [(path, path.name.partition(".")[0]) for path in left]
    return [(path, int(number)) for path, number in numbers if number.isdecimal()]


def _is_of_workers(path: Path) -> bool:
    """Whether workers have uploaded it themselves, which may be before the driver uploads the record."""
    if path.suffix == ".log":
        return not path.name.endswith(".rank0.log")
    steps = entries(path)
    return bool(steps) and all(map(is_away, steps))


def refuse_lost_trials(spec: StudySpec, directory: Path, traces: Mapping[int, Path], num_recorded: int) -> None:
    """See that the record knows every trial that was started.

    Going on would hand out a number again, and its trial would start from the lost one's checkpoint.

    Raises:
        StudyDamagedError: It does not.
    """
    newest = max(traces, default=-1)
    if newest >= num_recorded:
        raise StudyDamagedError(
            f"{spec.search.storage or directory / JOURNAL}: the record ends before trial {num_recorded}, but "
            f"{traces[newest]} shows that trial {newest} was started: its end is lost",
            f"Put it back from a copy. Or, to go on with what it has, move all that trials from {num_recorded} on "
            f"left in {directory / 'checkpoints'} and {directory / 'logs'} away.",
        )


def read_spec(directory: Path) -> StudySpec:
    """The specification of a study.

    Raises:
        StudyDamagedError: It is gone or cannot be read.
    """
    path = directory / SPEC
    try:
        return _as_it_was(StudySpec.model_validate_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        faults = error.errors() if isinstance(error, ValidationError) else []
        reason = faults[0]["msg"] if faults else getattr(error, "strerror", None) or str(error)
        raise StudyDamagedError(
            f"{path} cannot be read: {reason}",
            f"Put it back from a copy, or make it anew: tune run {directory / SOURCE} --name OTHER",
        ) from error


def _as_it_was(spec: StudySpec) -> StudySpec:
    """With what was not written out when there was no choice: no examples were packed."""
    if spec.is_custom or "packing" in spec.search_space.parameters:
        return spec
    return spec.model_copy(update={"train": {"packing": False, **spec.train}})
