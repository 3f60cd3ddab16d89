"""The log of a Ray job, written on a cluster and read here."""

from __future__ import annotations

import io

import pytest

from tuner.remote.job_log import JobLog, MarkedLines


def written(*pieces: tuple[str, str]) -> str:
    """A log into which Ray, then a verb's stdout and stderr write."""
    log = io.StringIO()
    stdout = MarkedLines(log)
    for stream, piece in pieces:
        stdout.write(piece) if stream == "out" else log.write(piece)
    stdout.close_line()
    return log.getvalue()


def test_stdout_and_stderr_of_a_job_arrive_where_they_belong(capsys: pytest.CaptureFixture[str]) -> None:
    log = written(("ray", "setting up\n"), ("out", "\n"), ("err", "warning: w\n"), ("out", "{\n }\nrest"))
    reader = JobLog()
    for piece in (log[:7], log[7:40], log[40:]):
        reader.take(piece)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("{\n }\nrest\n", "warning: w\n")
    assert reader.has_begun


def test_reading_ends_at_a_line_that_was_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    reader = JobLog(lambda line: line.startswith("study q: "))
    reader.take(written(("out", "\n"), ("err", "one\nstudy q: 3 trials\ntrial 0 starts\n")))
    assert reader.has_seen
    assert capsys.readouterr().err == "one\nstudy q: 3 trials\n"


def test_a_job_that_did_not_begin_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reader = JobLog()
    reader.take("ModuleNotFoundError: No module named 'tuner'\n")
    assert not reader.has_begun
    assert capsys.readouterr().err == ""
