"""Plain Ray Train functions, as anyone might have written them: they know nothing of this project."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint


def quadratic(config: dict[str, Any]) -> None:
    """Nine steps towards x squared, with a checkpoint at each; the file in it counts the steps."""
    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            start = json.loads(Path(folder, "state.json").read_text())["step"]
    for step in range(start + 1, 10):
        metrics = {"step": step, "loss": config["x"] ** 2 + 1 / step}
        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                Path(folder, "state.json").write_text(json.dumps(metrics))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def steady(config: dict[str, Any]) -> None:
    """Sixty steps of a tenth of a second, with a checkpoint at each."""
    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            start = int(Path(folder, "step").read_text())
    for step in range(start + 1, 61):
        time.sleep(0.1)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            ray.train.report({"step": step, "loss": config["x"] ** 2 + 1 / step}, Checkpoint.from_directory(folder))


def without_step(config: dict[str, Any]) -> None:
    """Reports no step."""
    ray.train.report({"loss": 1.0, "other": config["x"]})


def greedy(config: dict[str, Any]) -> None:
    """Asks for more memory than any machine has."""
    torch.empty(1 << 50)


def patient(config: dict[str, Any]) -> None:
    """Trial x < 0 leaves a mark when it has let go; the other one reports until it sees it."""
    here, other = (Path(config["folder"], name) for name in (("bad", "good") if config["x"] < 0 else ("good", "bad")))
    is_bad = config["x"] < 0
    try:
        for step in range(1, 2000):
            while is_bad and not other.exists():
                time.sleep(0.05)
            ray.train.report({"step": step, "loss": -config["x"]})
            here.touch()
            if not is_bad and step > 1 and Path(config["folder"], "let go").exists():
                return
            time.sleep(0.1)
        raise AssertionError("the other one was not told to stop")
    finally:
        if is_bad:
            Path(config["folder"], "let go").touch()


def raising(config: dict[str, Any]) -> None:
    """Fails the same way every time."""
    config["x"] / 0
