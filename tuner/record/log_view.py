"""A trial's logs as somebody else reads them, also while they are written."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tuner import text
from tuner.commands import command
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.record.study import Study

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20


def log_ranks(study: Study, number: int) -> list[int]:
    """The ranks of a trial that have a log."""
    names = [path.stem.partition(".rank")[2] for path in study.log_path(number).parent.glob(f"{number}.rank*.log")]
    return sorted(int(rank) for rank in names if rank.isdecimal())


def find_log(study: Study, number: int, rank: int, *, may_come: bool) -> Path:
    """The log of one rank of a trial.

    Args:
        study: The study.
        number: A trial that it has.
        rank: The rank.
        may_come: Whether one that is not there yet will do, as long as the trial runs.

    Raises:
        InputError: There is none; the message names those there are.
    """
    ranks = log_ranks(study, number)
    num_workers = study.spec.scaling.max_workers
    if rank in ranks or (may_come and rank < num_workers and goes_on(study, number)):
        return study.log_path(number, rank)
    if not ranks:
        raise InputError(f"trial {number} has no log", f"See how it stands: {command('show', study.dir, str(number))}")
    raise InputError(f"trial {number} has no log of rank {rank}", f"Ranks with one: {text.ranges(ranks)}.")


def goes_on(study: Study, number: int) -> bool:
    """Whether a trial is running now."""
    return study.trial(number).state == "RUNNING" and study.is_running


def read_log(path: Path, is_written: Callable[[], bool] = lambda: False) -> Iterator[str]:
    """What a log holds, and what is added to it for as long as it is written.

    Args:
        path: The log; may not be there yet.
        is_written: Whether more may come.

    Yields:
        Pieces of text; what is no UTF-8 is replaced.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = 0
    while True:
        # Asked before the reading: what is written in between must not be missed.
        more_may_come = is_written()
        chunk = _read(path, position)
        position += len(chunk)
        if chunk:
            yield decoder.decode(chunk)
        elif more_may_come:
            time.sleep(_POLL_S)
        else:
            return


def _read(path: Path, position: int) -> bytes:
    if not path.exists():
        return b""
    with open(path, "rb") as file:
        file.seek(position)
        return file.read(_CHUNK_BYTES)
