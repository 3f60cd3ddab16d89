"""A tiny model and tiny data: what the tests of the training loop share."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from trainables.config import TrainConfig
from trainables.finetune import Report, Warm, Worker, finetune
from trainables.parallel import Parallelism

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CPU = Worker(rank=0, world_size=1, device=torch.device("cpu"))
WORDS = ["loss", "step", "rate", "layer", "token", "batch", "seed", "warm", "slot", "trial", "rung", "decay", "norm"]


def write_texts(path: Path, num: int = 64, seed: int = 0, max_words: int = 20) -> Path:
    """Writes a .jsonl of texts of unlike length."""
    source = random.Random(seed)
    rows = [{"text": " ".join(source.choices(WORDS, k=source.randint(2, max_words)))} for _ in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_config(data: Path, **settings: Any) -> TrainConfig:
    """A fine-tune of a second or less."""
    values = {
        "model": MODEL,
        "dataset": {"path": str(data)},
        "max_length": 128,
        "max_steps": 6,
        "eval_every": 3,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "precision": "fp32",
    }
    return TrainConfig.model_validate(values | settings)


def train(
    config: TrainConfig,
    cache_dir: Path,
    warm: Warm | None = None,
    worker: Worker = CPU,
    parallel: Parallelism = "ddp",
) -> list[Report]:
    """Runs a fine-tune to its end."""
    return list(finetune(config, worker, cache_dir=cache_dir, parallel=parallel, warm=warm))


def processes() -> multiprocessing.context.ForkServerContext:
    """Starts new processes from one that has imported the libraries and done nothing else: importing takes seconds."""
    multiprocessing.set_forkserver_preload(["trainables.finetune", "transformers.models.qwen2.modeling_qwen2"])
    return multiprocessing.get_context("forkserver")


def run_ranks(
    function: Callable[[Worker, Path], Any], world_size: int, folder: Path, timeout_s: float = 45
) -> list[Any]:
    """Runs a module-level function on real gloo ranks, each a process of its own.

    Args:
        function: Gets its worker and the folder.
        world_size: How many ranks.
        folder: What they share.
        timeout_s: How long a rank waits for the others.

    Returns:
        What it returned, by rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rendezvous_{world_size}").unlink(missing_ok=True)
    processes()
    start_processes(  # type: ignore[no-untyped-call]
        _run_rank, args=(function, world_size, folder, timeout_s), nprocs=world_size, start_method="forkserver"
    )
    return [torch.load(folder / f"result_{world_size}_{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_rank(
    rank: int, function: Callable[[Worker, Path], Any], world_size: int, folder: Path, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        rendezvous = f"file://{folder.resolve()}/rendezvous_{world_size}"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
    result = function(Worker(rank, world_size, torch.device("cpu"), rank), folder)
    torch.save(result, folder / f"result_{world_size}_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


def weights_of(report: Report) -> dict[str, torch.Tensor]:
    """A copy of a report's weights, whole where a rank has a part of them."""
    weights = report.state.model.state_dict().items()
    return {name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone() for name, w in weights}


def without_speed(reports: list[Report]) -> list[tuple[dict[str, float], tuple[dict[str, float], ...]]]:
    """Metrics and histories, all but what a clock measured."""
    return [
        ({name: value for name, value in report.metrics.items() if name != "tokens_per_s"}, report.history)
        for report in reports
    ]


@contextmanager
def limited_file_size(num_bytes: int | None) -> Iterator[None]:
    """A file that grows beyond this fails as on a full disk; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
