"""Brings the working copy of a study up to date with its URL, before the study is opened.

What the URL holds counts, but for what this machine has not uploaded yet: journals are only ever appended to, so of two
that begin alike the longer one is the newer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from trainables.checkpoint_dir import MANIFEST
from tuner.errors import StudyDamagedError
from tuner.record.lock import holder
from tuner.record.storage import JOURNAL
from tuner.record.study_dir import LOCK, SPEC
from tuner.storage.bucket import Bucket, Seen
from tuner.storage.files import (
    AWAY,
    HOLDER,
    LOGS,
    checkpoint_dirs,
    checkpoint_of,
    is_away,
    is_mirrored,
    log_files,
    read_tags,
    whole_at,
    whole_lines,
    write_tags,
)
from tuner.storage.owner import OBJECT, read_holder
from tuner.storage.place import url_of

AT_ONCE = 8

Newer = Literal["here", "there", "neither"]


def pull(study_dir: Path) -> None:
    """Bring a study up to date for reading, without its checkpoints; nothing to do where its root is a folder.

    Raises:
        StorageError: The URL cannot be used.
        StudyDamagedError: It and the working copy have gone different ways.
    """
    with pulled(study_dir):
        return


@contextmanager
def pulled(study_dir: Path) -> Iterator[None]:
    """The same, and as long as the block runs no other process of this machine does so."""
    url = url_of(study_dir)
    if url is None:
        yield
        return
    from filelock import FileLock

    with FileLock(study_dir.with_name(f".{study_dir.name}.pull")):
        # What a process of this machine runs is newer here.
        if holder(study_dir / LOCK) is None and _bring(study_dir, Bucket(url)):
            # A confirmation of it is a study of its own.
            pull(study_dir / "confirm")
        yield


def pull_all(root: Path) -> None:
    """Bring all studies of a root up to date for reading, as far as they can be."""
    url = url_of(root)
    for name in [] if url is None else Bucket(url).folders():
        with suppress(StudyDamagedError):
            pull(root / name)


def fetch(checkpoint: Path) -> None:
    """Bring a checkpoint whole to this machine, the manifest last; nothing to do where it is.

    Raises:
        StorageError: The URL cannot be used.
    """
    url = url_of(checkpoint) if is_away(checkpoint) else None
    if url is None:
        return
    from filelock import FileLock

    bucket = Bucket(url)
    listed = bucket.listing()
    names = sorted(listed, key=lambda name: name == MANIFEST)
    for name in names:
        bucket.download(name, checkpoint / name)
    (checkpoint / AWAY).unlink()
    study_dir = checkpoint.parents[2]
    inside = checkpoint.relative_to(study_dir).as_posix()
    with FileLock(study_dir.with_name(f".{study_dir.name}.tags")):
        write_tags(study_dir, read_tags(study_dir) | {f"{inside}/{name}": listed[name].tag for name in names})


def fetch_all(checkpoints: Path) -> None:
    """Bring all checkpoints of a trial that is to go on, or to be exported, from the folder that holds them."""
    for checkpoint in sorted(checkpoints.glob("step_*")):
        fetch(checkpoint)


def keep(file: Path) -> None:
    """Upload a file of a study that nobody runs, a report say; nothing to do where its root is a folder.

    Raises:
        StorageError: The URL cannot be used.
    """
    url = url_of(file.parent)
    if url is not None:
        Bucket(url).upload(file, file.name)


def _bring(study_dir: Path, bucket: Bucket) -> bool:
    """Returns whether there is a confirmation, too."""
    listed = bucket.listing()
    there = {name: seen for name, seen in listed.items() if is_mirrored(name)}
    if not _is_study(there, bucket):
        return False
    study_dir.mkdir(exist_ok=True)
    _note_holder(study_dir, bucket, OBJECT in listed)
    tags = read_tags(study_dir)
    newer = _newer(study_dir, bucket, there, tags)
    wanted = [name for name, seen in there.items() if _is_wanted(study_dir, name, seen, newer, tags)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: bucket.download(name, study_dir / name), wanted))
    _match_checkpoints(study_dir, there, newer, tags)
    if newer == "there":
        for name in set(log_files(study_dir)) - set(there):
            (study_dir / name).unlink()
    # The journals have just been compared.
    alike = {name: there[name].tag for name in [*wanted, JOURNAL] if name in there}
    write_tags(study_dir, {name: tag for name, tag in tags.items() if name in there} | alike)
    return any(name.startswith("confirm/") for name in listed)


def _is_study(there: Mapping[str, Seen], bucket: Bucket) -> bool:
    # The journal of a new study is uploaded last; one in a database has none.
    if JOURNAL in there or SPEC not in there:
        return JOURNAL in there
    try:
        return bool(json.loads(bucket.read(SPEC))["search"].get("storage"))
    except (ValueError, KeyError, FileNotFoundError):
        return False


def _note_holder(study_dir: Path, bucket: Bucket, is_held: bool) -> None:
    who = read_holder(bucket) if is_held else {}
    if who:
        (study_dir / HOLDER).write_text(json.dumps(who), encoding="utf-8")
    else:
        (study_dir / HOLDER).unlink(missing_ok=True)


def _newer(study_dir: Path, bucket: Bucket, there: Mapping[str, Seen], tags: Mapping[str, str]) -> Newer:
    """Which journal has gone on since both were alike."""
    path = study_dir / JOURNAL
    if JOURNAL not in there or not path.exists():
        return "there"
    here = whole_lines(path.read_bytes())
    if tags.get(JOURNAL) == there[JOURNAL].tag:
        return "here" if len(here) > there[JOURNAL].size else "neither"
    data = bucket.read(JOURNAL)
    if data == here:
        return "neither"
    if data.startswith(here):
        return "there"
    if here.startswith(data):
        return "here"
    raise StudyDamagedError(
        f"{bucket.url} has gone on elsewhere, and so has the working copy {study_dir} after its last upload",
        f"To go on with what the URL has, move the working copy away: mv {study_dir} {study_dir}.old",
    )


def _is_wanted(study_dir: Path, name: str, seen: Seen, newer: Newer, tags: Mapping[str, str]) -> bool:
    """Whether a file of the record is to be downloaded."""
    if checkpoint_of(name) is not None:
        return False
    path = study_dir / name
    if not path.exists():
        return True
    if tags.get(name) == seen.tag:
        return False
    if newer != "there" and name.startswith(f"{LOGS}/"):
        # It is only ever appended to, and not by this machine alone: workers upload theirs.
        return path.stat().st_size < seen.size
    return newer != "here"


def _match_checkpoints(study_dir: Path, there: Mapping[str, Seen], newer: Newer, tags: dict[str, str]) -> None:
    """Have a folder for each checkpoint at the URL, and none that only an older state of the study had."""
    whole = whole_at(there)
    for name in checkpoint_dirs(study_dir):
        manifest = f"{name}/{MANIFEST}"
        is_gone = name not in whole and (newer == "there" or is_away(study_dir / name))
        is_other = name in whole and newer == "there" and tags.get(manifest) != there[manifest].tag
        if is_gone or (is_other and not is_away(study_dir / name)):
            shutil.rmtree(study_dir / name)
            tags.pop(manifest, None)
    for name in whole:
        if not (study_dir / name).exists():
            (study_dir / name).mkdir(parents=True)
            (study_dir / name / AWAY).touch()
