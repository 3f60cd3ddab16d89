"""Measurements run where there is no GPU, most of them without Ray, and their gates hold."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.benchmarks import gpu, head, packing
from tests.conftest import REPOSITORY


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("measurement", [gpu, head, packing])
def test_without_a_gpu_a_measurement_says_so(
    measurement: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["measurement", "--device", "cuda"])
    assert measurement.main() == 3
    output = capsys.readouterr()
    assert (output.out, output.err.partition(";")[0]) == ("", "there is no GPU here")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_code_that_measures_a_gpu_runs_on_a_cpu(capsys: pytest.CaptureFixture[str], parallel: str) -> None:
    assert gpu.main(["--shape", "tiny", "--device", "cpu", "--steps", "2", "--parallel", parallel]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [fault for fault in result["faults"] if "busy" not in fault] == []
    assert result["card"] == "none"
    assert min(value for value in result.values() if isinstance(value, float)) > 0
    # By hand: 2 layers of 4 * 64 * 64 + 3 * 64 * 128 and a head of 259 * 64 weights; attention over 64 tokens.
    flops = 6 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 259 * 64) + 12 * 2 * 64 * 64
    assert result["share_of_peak"] == pytest.approx(result["tokens_per_s"] * flops / 989e12, rel=1e-2)
    assert ("stall_s" in result) == (parallel == "ddp")


def measured(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert [fault for fault in result["faults"] if "busy" not in fault] == []
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_work_is_done_once() -> None:
    assert set(measured("tests.benchmarks.once", "--trials", "3")["reaches_goals"].values()) == {True}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slot_reports_the_losses_that_torchrun_does() -> None:
    sizes = ("--steps", "4", "--eval-every", "2", "--pairs", "1", "--batch-size", "4", "--workers", "2")
    assert measured("tests.benchmarks.loop_parity", *sizes)["slot"]["steps_per_s"] > 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_deciding_costs_is_measured() -> None:
    figures = measured("tests.benchmarks.controller", "--trials", "8", "--seconds", "0.2", "--many", "0", "--no-mlflow")
    assert figures["slow"]["over_ideal"] > 1
    assert figures["reaches_goals"]["growth"] is None
