"""Training speed on one GPU, without Ray: tokens a second, share of the peak, memory, turnover, checkpoint stall.

    python -m tests.benchmarks.gpu --shape qwen2.5-3b          # 1024 tokens a sequence, packed, bf16
    python -m tests.benchmarks.gpu --shape llama-3.1-8b        # FSDP2, 8192 tokens a sequence
    python -m tests.benchmarks.gpu --shape tiny --device cpu   # the very same code where there is no GPU

The product's own loop, through a warm trial after a first one, on models of random weights and sequences of random
letters that are all of full length. `tokens_per_s` is over the steps after the first report. `turnover_s` is what lies
between the last report of a trial and the first one of the next beyond its steps and its evaluation; a first step that
waits for the weights counts too. `stall_s` is for how long a save keeps device and loop, the second one, when its pages
are there; `torch_save_s` is torch.save at the same point. With FSDP on one GPU the model is divided among one.
Exit code 3: there is no GPU.

Model FLOPs are those of Chowdhery et al., 2022 (PaLM, https://arxiv.org/abs/2204.02311, appendix B): a token takes
6 N + 12 L Q T, with N parameters in matrices (the output head among them, the embedding not), L layers, Q features of
all query heads and T tokens of a sequence. Recomputed activations do not count. `share_of_peak_causal` counts half of
the attention, which is what a causal kernel has to compute.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.checkpoint import plain
from tests.benchmarks.common import MODEL, NO_GPU, machine, no_gpu, print_result, significant
from trainables.architecture import architecture_of
from trainables.config import TrainConfig
from trainables.finetune import Report, Warm, Worker, finetune
from trainables.parallel import Parallelism, leave_group, shard_of
from trainables.saver import CheckpointSaver

# Of an H200 or H100 SXM, dense bfloat16.
PEAK_TFLOPS = 989.0
QWEN = {
    "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model and how it is trained.

    Attributes:
        model: Its architecture.
        length: Tokens of a sequence.
        batch_size: Sequences of an optimizer step.
        parallel: ddp holds the model whole.
        train: Further keys of `train`.
    """

    model: dict[str, Any]
    length: int
    batch_size: int
    parallel: Parallelism
    train: dict[str, Any]


SHAPES = {
    "qwen2.5-3b": Shape(QWEN, 1024, 64, "ddp", {"gradient_checkpointing": "selective"}),
    "llama-3.1-8b": Shape(LLAMA, 8192, 4, "fsdp", {"gradient_checkpointing": "full", "micro_batch_size": 1}),
    "tiny": Shape(MODEL, 64, 4, "ddp", {}),
}


class OneGroup(Warm):
    """As a Warm; with fsdp the model is divided also where there is one rank, which then needs a process group."""

    def _build(self, config: TrainConfig, worker: Worker, is_divided: bool) -> nn.Module:
        return super()._build(config, worker, is_divided or dist.is_initialized())


def make_config(shape: Shape, options: argparse.Namespace, folder: Path) -> TrainConfig:
    """The fine-tune; its examples are written to the folder."""
    length, batch_size = options.length or shape.length, options.batch_size or shape.batch_size
    source, path = random.Random(0), folder / "texts.jsonl"
    # A letter is a token, and the end of the text one more, which is only predicted.
    texts = ("".join(source.choices("abcdefgh", k=length)) for _ in range(4 + round(1.1 * batch_size)))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    model = {**shape.model, "max_position_embeddings": max(length, 2048)}
    values = {
        **shape.train,
        "model": model,
        "tokenizer": "byte-level",
        "dataset": {"path": str(path)},
        "max_length": length + 1,
        "batch_size": batch_size,
        "max_steps": 2 * options.steps,
        "eval_every": options.steps,
        "eval_batches": 1,
        "learning_rate": 1e-5,
        "precision": "bf16",
    }
    given = {"optimizer": options.optimizer, "micro_batch_size": options.micro_batch_size, "compile": options.compile}
    given["gradient_checkpointing"] = options.checkpointing
    return TrainConfig.model_validate(values | {key: value for key, value in given.items() if value})


def flops_per_token(config: TrainConfig, *, is_causal: bool) -> float:
    """Of a training step; see above."""
    architecture = architecture_of(config.model, config.tokenizer)
    assert architecture is not None
    matrices = architecture.layers * architecture.layer_parameters + architecture.head_parameters
    attention = architecture.layers * architecture.queries * (config.max_length - 1)
    return 6 * matrices + (6 if is_causal else 12) * attention


class Device:
    """What differs between a GPU and the CPU."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        self.is_gpu = kind == "cuda"
        self.name = torch.cuda.get_device_name(0) if self.is_gpu else "none"

    def wait(self) -> None:
        """Until all that was asked of it is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def peak_gib(self) -> float:
        """The most memory that was in use at a time."""
        if self.is_gpu:
            return significant(torch.cuda.max_memory_allocated(self.device) / 2**30)
        return significant(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


@contextmanager
def worker_of(device: Device, parallel: Parallelism, folder: Path) -> Iterator[Worker]:
    """The only rank; with fsdp in a process group."""
    worker = Worker(rank=0, world_size=1, device=device.device)
    if parallel != "fsdp":
        yield worker
        return
    backend = "cpu:gloo,cuda:nccl" if device.is_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield worker
    finally:
        leave_group()


def measure(
    config: TrainConfig, parallel: Parallelism, device: Device, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Two trials in a row; a checkpoint at the end of the second."""
    with worker_of(device, parallel, folder) as worker:
        trials = Trials(config, worker, parallel, folder)
        first = trials.run(lambda report: {})
        second = trials.run(
            lambda report: {
                "peak_gib": device.peak_gib(),
                **(checkpoints(report, worker, device, folder) if parallel == "ddp" else {}),
            }
        )
        del trials
    tolerance = 1e-3 * abs(first.losses[0])
    is_same = all(abs(one - other) <= tolerance for one, other in zip(first.losses, second.losses, strict=True))
    faults = [] if is_same else [f"the second trial's losses are not the first one's: {second.losses}, {first.losses}"]
    step_s = second.interval_s[-1] / (config.max_steps // 2)
    figures = {
        "step_s": step_s,
        "tokens_per_s": config.batch_size * (config.max_length - 1) / step_s,
        # The copy of the weights may run on while the first step waits for it.
        "turnover_s": second.began - first.ended + max(0.0, second.interval_s[0] - second.interval_s[-1]),
    }
    return figures | second.at_the_end, faults


@dataclass
class Course:
    """When a trial trained.

    Attributes:
        began: Its first step.
        ended: Its last report.
        interval_s: Seconds in the steps before each report.
        losses: Of each report.
        at_the_end: What was measured at its last report.
    """

    began: float = 0.0
    ended: float = 0.0
    interval_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    at_the_end: dict[str, Any] = field(default_factory=dict)


class Trials:
    """One trial after another through one warm model."""

    def __init__(self, config: TrainConfig, worker: Worker, parallel: Parallelism, folder: Path) -> None:
        self._config, self._worker, self._parallel = config, worker, parallel
        self._cache_dir = folder / "data"
        self._warm = OneGroup()

    def run(self, at_the_end: Callable[[Report], dict[str, Any]]) -> Course:
        """The next trial; nothing of it outlives it but the model."""
        course = Course()
        options: dict[str, Any] = {"cache_dir": self._cache_dir, "parallel": self._parallel, "warm": self._warm}
        for report in finetune(self._config, self._worker, **options):
            course.ended = time.perf_counter()
            course.began = course.began or course.ended - report.train_s - report.eval_s
            course.interval_s.append(report.train_s)
            course.losses.append(report.metrics["eval_loss"])
            if report.is_last:
                course.at_the_end = at_the_end(report)
                course.ended = time.perf_counter()
        return course


def checkpoints(report: Report, worker: Worker, device: Device, folder: Path) -> dict[str, Any]:
    """How long a save keeps the loop; one checkpoint is on the disk at a time."""
    state = report.state
    state_bytes = sum(tensor.nbytes for tensor in state.model.parameters())
    moments = (value for values in state.optimizer.state.values() for value in values.values())
    state_bytes += sum(shard_of(value).nbytes for value in moments if isinstance(value, torch.Tensor))
    figures: dict[str, Any] = {"state_gib": significant(state_bytes / 2**30)}
    if shutil.disk_usage(folder).free < 1.1 * state_bytes:
        return figures | {"stall_s": None, "torch_save_s": None}
    saver, stalls, place = CheckpointSaver(worker), [], folder / "checkpoints" / "step_00000001"
    for _ in range(2):
        device.wait()
        started = time.perf_counter()
        saver.save(state, place)
        device.wait()
        stalls.append(time.perf_counter() - started)
        saver.wait()
        shutil.rmtree(place)
    saver.close()
    started = time.perf_counter()
    torch.save(plain(state), folder / "plain.pt")
    figures |= {"first_stall_s": stalls[0], "stall_s": stalls[1], "torch_save_s": time.perf_counter() - started}
    (folder / "plain.pt").unlink()
    return figures


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help="default: the shape's")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: the shape's")
    parser.add_argument("--batch-size", type=int, help="sequences of a step; default: the shape's")
    parser.add_argument("--micro-batch-size", type=int, help="sequences of a forward pass; default: found")
    parser.add_argument("--steps", type=int, default=8, help="steps between reports; two reports a trial")
    parser.add_argument("--optimizer", choices=("adamw", "adafactor", "sgd"))
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), help="default: the shape's")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="of the card; default: H200's 989")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, then print one line."""
    options = parsed(arguments)
    if reason := no_gpu(options.device):
        print(f"{reason}, with `--shape tiny` in seconds", file=sys.stderr)
        return NO_GPU
    shape, device, host = SHAPES[options.shape], Device(options.device), machine()
    parallel: Parallelism = options.parallel or shape.parallel
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as folder:
        config = make_config(shape, options, Path(folder))
        figures, faults = measure(config, parallel, device, Path(folder))
    shares = {
        name: figures["tokens_per_s"] * flops_per_token(config, is_causal=is_causal) / (1e12 * options.peak_tflops)
        for name, is_causal in (("share_of_peak", False), ("share_of_peak_causal", True))
    }
    settings = {"shape": options.shape, "parallel": parallel, "peak_tflops": options.peak_tflops}
    settings |= config.model_dump(include={"batch_size", "micro_batch_size", "max_steps", "optimizer", "compile"})
    settings |= {"length": config.max_length - 1, "gradient_checkpointing": config.gradient_checkpointing}
    numbers = {name: None if value is None else significant(value) for name, value in (figures | shares).items()}
    print_result("gpu", faults, machine=host, card=device.name, settings=settings, **numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
