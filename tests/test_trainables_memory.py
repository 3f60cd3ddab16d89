"""Passes that do not fit into memory are halved, and nothing else changes; what a trial will take is estimated."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import run_ranks, tiny_config, train, without_speed, write_texts
from trainables.config import TrainConfig
from trainables.errors import OutOfMemory
from trainables.finetune import Worker
from trainables.micro_batch import NOTES
from tuner.failures import cause_of

MIB = 1 << 20


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Whatever asks for more than this beyond what the process has fails to get it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # What was freed before is not to be had again.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def large_config(folder: Path) -> TrainConfig:
    # Attention that makes few and large tensors: a pass over 16 examples takes some 70 MB for each.
    settings = {"max_length": 512, "batch_size": 16, "max_steps": 2, "eval_every": 2, "eval_batches": 1}
    return tiny_config(folder / "texts.jsonl", **settings, attention="eager", packing=False)


def _short_of_memory(worker: Worker, folder: Path) -> dict[str, Any]:
    config = large_config(folder)
    # What is allocated once is there before memory becomes short.
    train(config.with_params({"micro_batch_size": 1, "max_steps": 1}), folder / "first")
    result: dict[str, Any] = {"one": without_speed(train(config.with_params({"micro_batch_size": 1}), folder / "one"))}
    with limited_memory(120 * MIB):
        result["found"] = without_speed(train(config, folder / "cache"))
        result["notes"] = json.loads((folder / "cache" / NOTES).read_text())
        result["again"] = without_speed(train(config, folder / "cache"))
    with limited_memory(MIB):
        try:
            train(config, folder / "cache")
        except OutOfMemory as error:
            result["failure"] = (error.num_examples, cause_of(error).reason)
    return result


def test_passes_that_do_not_fit_are_halved_and_the_size_is_remembered(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", num=64, max_words=100)
    [result] = run_ranks(_short_of_memory, 1, tmp_path)
    [size] = result["notes"].values()
    assert 1 <= size < 16
    for (found, _), (one, _) in zip(result["found"], result["one"], strict=True):
        assert found == pytest.approx(one, rel=1e-5)
    for (again, _), (one, _) in zip(result["again"], result["one"], strict=True):
        assert again == pytest.approx(one, rel=1e-5)
    assert result["failure"] == (1, "out of memory: OutOfMemory: out of memory in a pass over 1 example")


def _rank_one_short_of_memory(worker: Worker, folder: Path) -> tuple[str, int, list[Any]]:
    config = large_config(folder)
    limit = 40 * MIB if worker.rank == 1 else 8192 * MIB
    train(config.with_params({"micro_batch_size": 1, "max_steps": 1}), folder / "first", worker=worker)
    try:
        with limited_memory(limit):
            reports = train(config, folder / "cache", worker=worker)
    except (OutOfMemory, RuntimeError) as error:
        # The end of the process is what frees the others.
        return type(error).__name__, getattr(error, "num_examples", 0), []
    return "completed", 0, without_speed(reports)


@pytest.mark.slow
def test_a_rank_short_of_memory_ends_the_attempt_on_all_and_the_next_one_is_smaller(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", num=64, max_words=100)
    attempts = []
    while not attempts or attempts[-1][1][0] != "completed":
        attempts.append(run_ranks(_rank_one_short_of_memory, 2, tmp_path))
        assert len(attempts) <= 4
    *failed, [(_, _, reports), (_, _, reports_of_one)] = attempts
    assert [one[:2] for _, one in failed] == [("OutOfMemory", size) for size in (8, 4, 2)][: len(failed)]
    assert {zero[0] for zero, _ in failed} == {"RuntimeError"}
    alone = without_speed(train(large_config(tmp_path), tmp_path / "alone"))
    assert reports == reports_of_one
    assert reports[0][0] == pytest.approx(alone[0][0], rel=1e-5)
