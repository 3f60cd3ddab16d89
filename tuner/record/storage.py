"""Where the record lives: Optuna's journal file in the study folder, or a database the study names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tuner.commands import command
from tuner.errors import StudyDamagedError, StudyExistsError
from tuner.record.journal_view import JournalView
from tuner.study_file.database_url import without_password

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage

    from tuner.study_file.spec import StudySpec

JOURNAL = "optuna.journal"
# A file with a token that is there until the database knows the study; as long it has no trials.
UNRECORDED = "unrecorded"
# Attribute of a study in a database: that token, by which it is known to belong to the folder.
OWNER = "owner"


class Record(Protocol):
    """What reading a study needs of its record; Optuna's own study has it, and so has a view of the journal."""

    @property
    def user_attrs(self) -> dict[str, Any]:
        """Attributes of the study."""
        ...

    def get_trials(self, deepcopy: bool = ...) -> Sequence[Any]:
        """All trials by number, as Optuna's FrozenTrial or a RecordedTrial."""
        ...


def open_record(study_dir: Path, spec: StudySpec, *, writable: bool) -> Record:
    """The record of a study: without Optuna where it is only read and lies in a journal.

    Raises:
        StudyDamagedError: It is gone, or cannot be read, or holds no such study.
    """
    if writable or spec.search.storage is not None:
        return load_study(study_dir, spec, writable=writable)
    _see_journal(study_dir)
    try:
        return JournalView(study_dir / JOURNAL, spec.study)
    except KeyError:
        raise _lost_study(study_dir, spec) from None


def create_study(spec: StudySpec, storage: BaseStorage) -> optuna.Study:
    """Begin the record, or load what was made of it."""
    import optuna

    direction: Literal["minimize", "maximize"] = "minimize" if spec.objective.mode == "min" else "maximize"
    with _quiet_optuna():
        return optuna.create_study(study_name=spec.study, storage=storage, direction=direction, load_if_exists=True)


def load_study(study_dir: Path, spec: StudySpec, *, writable: bool) -> optuna.Study:
    """Optuna's own study.

    Raises:
        StudyDamagedError: It is gone, or cannot be read, or holds no such study.
    """
    import optuna

    storage = open_storage(study_dir, spec.search.storage, writable=writable)
    try:
        # The sampler is set by whoever proposes; the default one would only cost time here.
        return optuna.load_study(study_name=spec.study, storage=storage, sampler=optuna.samplers.RandomSampler())
    except KeyError:
        raise _lost_study(study_dir, spec) from None


def open_storage(study_dir: Path, url: str | None, *, writable: bool) -> BaseStorage:
    """Open the storage of a study.

    Args:
        study_dir: The study's folder.
        url: A database URL as SQLAlchemy writes it, or None for the journal in the folder.
        writable: Whether this process writes; it must hold the study's lock then.

    Raises:
        StudyDamagedError: The journal is gone, empty or holds a line that cannot be read.
    """
    if url is not None:
        return _open_database(url)
    path = _see_journal(study_dir)
    # Imported here, since only the verbs that need the record shall pay for Optuna.
    from tuner.record.journal import cut_torn_line, open_journal

    if writable:
        cut_torn_line(path)
    return open_journal(path)


def create_journal(study_dir: Path) -> BaseStorage:
    """Start the journal of a new study."""
    from tuner.record.journal import open_journal

    return open_journal(study_dir / JOURNAL)


# -- a study in a database ----------------------------------------------------------------------------------------


def refuse_recorded(spec: StudySpec) -> None:
    """Raise StudyExistsError when the database knows a study of that name."""
    if spec.search.storage is None:
        return
    storage = _open_database(spec.search.storage)
    if any(study.study_name == spec.study for study in storage.get_all_studies()):
        raise _name_is_taken(spec)


def record(spec: StudySpec, study_dir: Path) -> None:
    """Make the database know a study whose folder is there, also where a kill cut that off before.

    Raises:
        StudyExistsError: It knows another one of that name.
    """
    made = create_study(spec, open_storage(study_dir, spec.search.storage, writable=True))
    token = (study_dir / UNRECORDED).read_text(encoding="utf-8")
    if OWNER not in made.user_attrs and not made.trials:
        made.set_user_attr(OWNER, token)
    if made.user_attrs.get(OWNER) != token:
        raise _name_is_taken(spec)
    (study_dir / UNRECORDED).unlink()


def _name_is_taken(spec: StudySpec) -> StudyExistsError:
    return StudyExistsError(
        f"the database {_shown(spec.search.storage or '')} holds a study {spec.study!r} already",
        f"Choose another name: --name {spec.study}-2",
    )


def _open_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except Exception as error:  # SQLAlchemy, the driver and the server each raise their own kinds
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StudyDamagedError(
            f"search.storage: cannot open {_shown(url)}: {_shown(summary, url)}",
            "Check the URL and that the server is up.",
        ) from error


def _shown(text: str, url: str | None = None) -> str:
    return without_password(text, url or text)


def _see_journal(study_dir: Path) -> Path:
    path = study_dir / JOURNAL
    if not path.exists() or path.stat().st_size == 0:
        raise StudyDamagedError(
            f"{path} is missing or empty, but the study's folder exists: its record was lost",
            f"Put the file back from a copy, or move {study_dir} away and run the study file again.",
        )
    return path


def _lost_study(study_dir: Path, spec: StudySpec) -> StudyDamagedError:
    if (study_dir / UNRECORDED).exists():
        return StudyDamagedError(
            f"{study_dir}: a kill fell into the making of the study, which has no trials yet",
            f"Go on with it: {command('resume', study_dir)}",
        )
    return StudyDamagedError(
        f"{spec.search.storage or study_dir}: the record holds no study named {spec.study!r}",
        "The record belongs to another study, or its first line was lost; put it back from a copy.",
    )


class _quiet_optuna:
    """Optuna tells every new study on stderr; the progress display is ours."""

    def __enter__(self) -> None:
        import optuna

        self._level = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def __exit__(self, *_: object) -> None:
        import optuna

        optuna.logging.set_verbosity(self._level)
