"""Steps a second inside a warm slot, beside the same loop under `torchrun -m trainables`.

    python -m tests.benchmarks.loop_parity [--workers 1] [--batch-size 32] [--steps 60] [--eval-every 5] [--pairs 8]

The slot's workers are processes that torchrun starts too. They serve trials as in a study, with the channel, the log,
the warm model and the checkpoint at the end, and wait for a verdict at every report; this process is the slot at the
other end. Ray, which only starts those processes, is not there. A process keeps its speed for life, some are 5 %
slower than others: each pair has a slot of its own, whose second trial counts. The clock runs from the first report of
a trial to its last one as they arrive here: `steps_per_s` by wall, `steps_per_cpu_s` by processor time of all that
torchrun started. The gate: every report's losses are equal. The goal is 0.98 of torchrun's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.benchmarks.common import Workload, in_turn, machine, medians, print_result, ratio
from tests.benchmarks.processes import MARKER, ONE_THREAD, REPOSITORY, all_pids, cpu_seconds, end_marked, is_marked
from tuner.execution.channel import Address, Assignment, Ended, Endpoint, Go, Preparing, Quit, Reported, Start

GOAL = 0.98
PATIENCE_S = 300.0
NAMES = ("slot", "torchrun")
LOSSES = ("eval_loss", "train_loss", "grad_norm", "tokens")
# Figures and metrics.
Run = tuple[dict[str, float], list[dict[str, float]]]


@dataclass
class Clock:
    """The reports of one trial as they arrive.

    Attributes:
        mark: Of the processes whose processor time counts.
        arrivals: (step, wall clock, processor seconds) of each report.
    """

    mark: str
    arrivals: list[tuple[int, float, float]] = field(default_factory=list)

    def note(self, step: int) -> None:
        """A report is here."""
        cpu_s = sum(cpu_seconds(pid) for pid in all_pids() if is_marked(pid, self.mark))
        self.arrivals.append((step, time.perf_counter(), cpu_s))

    def figures(self) -> dict[str, float]:
        """From the first report to the last."""
        (first, began, cpu_began), (last, ended, cpu_ended) = self.arrivals[0], self.arrivals[-1]
        steps = last - first
        return {"steps_per_s": steps / (ended - began), "steps_per_cpu_s": steps / (cpu_ended - cpu_began)}


def start(mark: str, workers: int, *program: str, **options: Any) -> subprocess.Popen[str]:
    """Has torchrun start the workers."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(workers))
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, "-m", *program],
        cwd=REPOSITORY,
        env={**os.environ, **ONE_THREAD, MARKER: mark},
        text=True,
        **options,
    )


class Slot:
    """Workers that serve one trial after another, and this process's end of their line."""

    def __init__(self, values: dict[str, Any], workers: int, folder: Path, log: IO[str]) -> None:
        self._values, self._folder = values, folder
        self._mark = f"slot-{os.getpid()}-{time.time_ns()}"
        self._endpoint = Endpoint("127.0.0.1")
        self._number = 0
        address = self._endpoint.address
        told = json.dumps([address.host, address.port, address.secret.hex(), str(folder / "data")])
        self._process = start(self._mark, workers, "tests.benchmarks.loop_parity", "--serve", told, stderr=log)
        # What is sent to workers that are not there yet is lost.
        assert isinstance(self._receive(), Preparing)

    def run(self) -> Run:
        """One trial: its figures and its metrics."""
        self._number += 1
        clock, metrics = Clock(self._mark), []
        self._send(Start(self._assignment()))
        while not isinstance(message := self._receive(), Ended):
            if isinstance(message, Reported):
                # First: the worker waits, and torchrun's does not while it is looked at.
                if message.waits:
                    self._send(Go(self._number))
                clock.note(message.step)
                metrics.append(message.metrics)
        if message.outcome != "completed":
            raise RuntimeError(f"the trial in the slot ended as {message.outcome}: {message.cause}")
        return clock.figures(), metrics

    def close(self) -> None:
        """Ends the workers."""
        self._send(Quit())
        self._process.wait(PATIENCE_S)
        self._endpoint.close()

    def _send(self, message: Any) -> None:
        self._endpoint.send(message)

    def _receive(self) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while (message := self._endpoint.receive(1.0)) is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("the slot's workers do not answer")
        return message

    def _assignment(self) -> Assignment:
        max_steps = self._values["max_steps"]
        return Assignment(
            number=self._number,
            values=self._values,
            decision_steps=None,
            max_t=max_steps,
            reported_step=0,
            checkpoint_dir=str(self._folder / "checkpoints" / f"{self._mark}-{self._number}"),
            log_dir=str(self._folder / "logs"),
            checkpoint_every=max_steps,
            keep_last=1,
            metric="eval_loss",
            mode="min",
            keep_best_report=False,
        )


def serve(told: str) -> None:
    """One worker of the slot."""
    from trainables.__main__ import joined_worker
    from tuner.execution.line import Line
    from tuner.execution.worker import Service, serve_trials

    host, port, secret, cache_dir = json.loads(told)
    address = Address(host, port, bytes.fromhex(secret))
    with joined_worker() as worker:
        line = Line(address, worker)
        line.send(Preparing(0, "is there"))
        serve_trials(Service(address, "ddp", cache_dir), worker, line)


def run_slot(values: dict[str, Any], workers: int, folder: Path, log: IO[str]) -> Run:
    """A trial through a warm slot: its figures and its metrics."""
    slot = Slot(values, workers, folder, log)
    slot.run()
    run = slot.run()
    slot.close()
    return run


def run_torchrun(values: dict[str, Any], workers: int, folder: Path, log: IO[str]) -> Run:
    """The same trial by itself: its figures and its metrics."""
    file, kept = folder / "train.yaml", folder / "metrics.jsonl"
    file.write_text(json.dumps(values), encoding="utf-8")
    kept.unlink(missing_ok=True)
    mark = f"torchrun-{os.getpid()}-{time.time_ns()}"
    program = ("trainables", str(file), "--cache-dir", str(folder / "data"), "--metrics", str(kept))
    process = start(mark, workers, *program, stdout=subprocess.PIPE, stderr=log)
    clock = Clock(mark)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            clock.note(int(line.split()[1]))
    if process.wait(PATIENCE_S):
        raise RuntimeError(f"torchrun ended with code {process.returncode}, see {log.name}")
    end_marked(mark, PATIENCE_S)
    return clock.figures(), [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def faults_of(metrics: dict[str, list[dict[str, float]]]) -> list[str]:
    """Reports that differ."""
    one, other = ([{name: report[name] for name in LOSSES} for report in metrics[name]] for name in NAMES)
    return [] if one == other else ["the losses in the slot are not those under torchrun"]


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Both, in turn; a first round of each makes the data."""
    values = Workload(str(folder), options.batch_size, num_trials=1).train()
    values |= {"max_steps": options.steps, "eval_every": options.eval_every}
    with open(folder / "log", "w", encoding="utf-8") as log:
        ways: dict[str, Callable[..., Run]] = {"slot": run_slot, "torchrun": run_torchrun}
        runs: dict[str, list[Run]] = {name: [] for name in NAMES}
        in_turn(
            NAMES,
            1 + options.pairs,
            lambda name: runs[name].append(ways[name](values, options.workers, folder, log)),
        )
    faults = faults_of({name: runs[name][0][1] for name in NAMES})
    return {name: medians([figures for figures, _ in runs[name][1:]]) for name in NAMES}, faults


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="examples per optimizer step")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a trial")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between reports, each of which waits")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    host = machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        figures, faults = measure(options, Path(folder))
    ratios = {key: ratio(figures["slot"], figures["torchrun"], key) for key in ("steps_per_s", "steps_per_cpu_s")}
    print_result(
        "loop_parity",
        faults,
        machine=host,
        settings={key: value for key, value in vars(options).items() if key != "serve"},
        **figures,
        ratios=ratios,
        goal=GOAL,
        reaches_goal={key: (value or 0) >= GOAL for key, value in ratios.items()},
    )


if __name__ == "__main__":
    main()
