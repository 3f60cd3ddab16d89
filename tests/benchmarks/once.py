"""Work done once: tokenizer calls for each example of a study, and bytes of weights read for each further trial.

    python -m tests.benchmarks.once [--processes 2] [--trials 4]

Processes that start at the same time, as the slots of a study do, share the folder of tokenised data and run trials
one after the other, each warm. The model is a folder of safetensors with its tokenizer. Texts given to the tokenizer
are counted where transformers takes them. Weights are mapped into memory, which counters of read bytes do not see: the
kernel tells of each opening of their files (inotify), and each is taken for a reading of the whole file. The gate: all
processes report the same losses. The goals are 1.0 and at most 5 % of the model.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.common import MODEL, machine, print_result, significant
from tests.benchmarks.processes import ONE_THREAD, REPOSITORY
from trainables.config import TrainConfig

CALLS_GOAL, BYTES_GOAL = 1.0, 0.05
NUM_TEXTS = 400
LARGER = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8000}
WEIGHTS = "*.safetensors"
# Of <sys/inotify.h>, and of the head of its struct inotify_event: watch, mask, cookie, length of the name behind it.
IN_OPEN, IN_NONBLOCK = 0x20, 0o4000
EVENT = struct.Struct("iIII")


class Opens:
    """Counts how often the weight files in a folder are opened, whoever does it."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(IN_NONBLOCK)
        if self._queue < 0 or libc.inotify_add_watch(self._queue, os.fsencode(folder), IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify", str(folder))

    def take(self) -> list[str]:
        """Names of the files opened since the last call; equal ones in a row may be told of once."""
        names = []
        while data := self._read():
            place = 0
            while place < len(data):
                *_, length = EVENT.unpack_from(data, place)
                place += EVENT.size
                name = data[place : place + length].rstrip(b"\0").decode()
                place += length
                names += [name] if name.endswith(WEIGHTS.removeprefix("*")) else []
        return names

    def _read(self) -> bytes:
        try:
            return os.read(self._queue, 1 << 16)
        except BlockingIOError:
            return b""


@contextmanager
def counted_texts() -> Iterator[list[int]]:
    """The number of texts in each call of a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    calls: list[int] = []
    plain = PreTrainedTokenizerFast._encode_plus

    def counting(self: Any, text: Any, *rest: Any, **options: Any) -> Any:
        calls.append(1 if isinstance(text, str) else len(text))
        return plain(self, text, *rest, **options)

    PreTrainedTokenizerFast._encode_plus = counting  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        PreTrainedTokenizerFast._encode_plus = plain  # type: ignore[method-assign]


def write_model(folder: Path) -> None:
    """A model with its tokenizer, as a hub's snapshot is one."""
    import torch

    from trainables.model import build_model
    from trainables.tokenizer import byte_level_tokenizer

    config = TrainConfig.model_validate({"model": MODEL | LARGER, "dataset": {"path": "x"}})
    build_model(config, byte_level_tokenizer(), torch.device("cpu")).save_pretrained(folder)  # type: ignore[operator]
    byte_level_tokenizer().save_pretrained(folder)


def write_texts(path: Path) -> None:
    """Examples, all of them different."""
    rows = [{"text": f"example {number}: " + "loss " * (number % 20)} for number in range(NUM_TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def serve(model: Path, trials: int) -> dict[str, Any]:
    """One process: trials of different hyperparameters."""
    import torch

    from trainables.finetune import Warm, Worker, finetune

    settings = {"max_length": 128, "max_steps": 2, "eval_every": 2, "eval_batches": 1, "precision": "fp32"}
    folder = model.parent
    values = {"model": str(model), "dataset": {"path": str(folder / "texts.jsonl")}, **settings}
    config = TrainConfig.model_validate(values)
    opens, warm, worker = Opens(model), Warm(), Worker(0, 1, torch.device("cpu"))
    losses, opened = [], []
    with counted_texts() as texts:
        for number in range(trials):
            params = {"learning_rate": 10.0 ** -(3 + number), "optimizer": ["adamw", "sgd"][number % 2]}
            *_, last = finetune(config.with_params(params), worker, cache_dir=folder / "data", warm=warm)
            losses.append(last.metrics["eval_loss"])
            opened.append(opens.take())
    return {"losses": losses, "opened": opened, "texts": sum(texts)}


def start(model: Path, trials: int) -> subprocess.Popen[str]:
    """A process that serves trials of a model."""
    arguments = [sys.executable, "-m", "tests.benchmarks.once", "--serve", str(model), "--trials", str(trials)]
    environment = {**os.environ, **ONE_THREAD}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=REPOSITORY, env=environment, text=True)


def measure(processes: int, trials: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """All processes at once."""
    # A copy for each, so that nobody's openings are taken for another's.
    models = [folder / f"model-{number}" for number in range(processes)]
    write_model(models[0])
    for copy in models[1:]:
        shutil.copytree(models[0], copy)
    write_texts(folder / "texts.jsonl")
    started = [start(model, trials) for model in models]
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    sizes = {path.name: path.stat().st_size for path in models[0].glob(WEIGHTS)}
    model_bytes = sum(sizes.values())
    further = [sum(sizes[name] for name in opened) for result in results for opened in result["opened"][1:]]
    faults = [] if all(result["losses"] == results[0]["losses"] for result in results) else ["losses differ"]
    if not all(result["opened"][0] for result in results):
        faults.append("the first trials were not seen to open the weights")
    figures = {
        "model_mib": significant(model_bytes / 2**20),
        "texts": NUM_TEXTS,
        "texts_tokenised": sum(result["texts"] for result in results),
        "tokenizer_calls_per_example": significant(sum(result["texts"] for result in results) / NUM_TEXTS),
        "share_of_weights_read_per_further_trial": significant(max(further) / model_bytes),
    }
    return figures, faults


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--trials", type=int, default=4, help="of each process")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print(json.dumps(serve(options.serve, options.trials)))
        return
    host = machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        figures, faults = measure(options.processes, options.trials, Path(folder))
    goals = {
        "tokenizer_calls_per_example": CALLS_GOAL,
        "share_of_weights_read_per_further_trial": BYTES_GOAL,
    }
    print_result(
        "once",
        faults,
        machine=host,
        settings={"processes": options.processes, "trials": options.trials},
        **figures,
        goals=goals,
        reaches_goals={name: figures[name] <= goal for name, goal in goals.items()},
    )


if __name__ == "__main__":
    main()
