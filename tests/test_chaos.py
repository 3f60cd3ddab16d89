"""The proof that a study survives being killed, in its shortest form; `tests.benchmarks.chaos` goes on for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.chaos import run_chaos

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_a_study_that_is_killed_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    figures = run_chaos(tmp_path, num_kills=5, seed=0, slots=1)
    assert figures["differences"] == []
    assert figures["kills"] == 5
    assert figures["trials"] == 12
    assert figures["mlflow_runs"] == 13
