"""Useful tokens a second: padded to 1024, padded to the longest of the batch, and ours, packed.

    python -m tests.benchmarks.packing [--batch-size 32] [--hidden-size 64] [--steps 4] [--pairs 5] [--device cpu]

A small Qwen2 with the same examples in each optimizer step, of lengths as in alpaca: lognormal, 92 tokens on average,
at most 1024. Only the layout differs: the padded ones go through the same loop with the same head, and without an
attention mask, which padding on the right does not need. `tokens_per_cpu_s` are tokens that are not padding, by
processor time. The gate: loss and norm of the gradient are equal. The goals are 7 times the first and 1.6 times the
second.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.benchmarks.common import MODEL, NO_GPU, in_turn, machine, medians, no_gpu, print_result, ratio
from trainables.batches import IGNORED, Batch, MicroBatch, make_batch
from trainables.config import TrainConfig
from trainables.data import TokenStore
from trainables.finetune import Worker, train_step
from trainables.model import build_model
from trainables.optim import make_optimizer
from trainables.packing import set_packing
from trainables.tokenizer import byte_level_tokenizer

MEAN_LENGTH, SIGMA, MAX_LENGTH = 92, 0.7, 1024
NAMES = ("ours", "longest", "1024")
GOALS = {"1024": 7.0, "longest": 1.6}
EQUAL, EQUAL_IN_BF16 = 1e-5, 1e-2


def alpaca_like(num_examples: int) -> TokenStore:
    """Random tokens of such lengths."""
    source = np.random.default_rng(0)
    drawn = source.lognormal(np.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, num_examples)
    lengths = np.clip(drawn.round().astype(np.int64), 2, MAX_LENGTH)
    tokens = source.integers(0, 256, int(lengths.sum())).astype(np.uint32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return TokenStore(tokens, np.ones(len(tokens), dtype=np.uint8), starts, lengths - 1)


class Loop:
    """The same optimizer steps, laid out in three ways."""

    def __init__(self, batch_size: int, hidden_size: int, num_steps: int, device: str = "cpu") -> None:
        self._worker = Worker(rank=0, world_size=1, device=torch.device(device))
        model = {**MODEL, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
        data = {"path": "python-docstrings"}
        # A kernel for rows of several examples knows no float32 on a GPU.
        precision = "fp32" if device == "cpu" else "bf16"
        values = {"model": model, "dataset": data, "precision": precision, "learning_rate": 1e-12}
        self._config = TrainConfig.model_validate(values)
        self._model: Any = build_model(self._config, byte_level_tokenizer(), self._worker.device).train()
        self._optimizer = make_optimizer(self._model, self._config)
        store = alpaca_like(batch_size * num_steps)
        steps = np.split(np.arange(len(store)), num_steps)
        self._batches = {
            "ours": [self._batch(store, step, is_packed=True) for step in steps],
            "longest": [self._batch(store, step) for step in steps],
            "1024": [padded(self._batch(store, step)) for step in steps],
        }
        self.mean_length = float(store.lengths.mean())

    def _batch(self, store: TokenStore, indices: Any, *, is_packed: bool = False) -> Batch:
        return make_batch(store, indices, 0, 1, len(indices), self._worker.device, is_packed=is_packed)

    def run(self, name: str) -> dict[str, float]:
        """All steps; losses and gradients beside the speed."""
        config = self._config.with_params({"packing": name == "ours"})
        assert set_packing(self._model, config, self._worker) == (name == "ours")
        self._model.train()
        started, cpu_started = time.perf_counter(), time.process_time()
        loss_sum = norm = 0.0
        for batch in self._batches[name]:
            loss, grad_norm = train_step(self._model, self._optimizer, batch, config, self._worker)
            loss_sum, norm = loss_sum + float(loss), norm + float(grad_norm)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        num_tokens = sum(batch.num_targets for batch in self._batches[name])
        return {
            "tokens_per_s": num_tokens / seconds,
            "tokens_per_cpu_s": num_tokens / cpu_s,
            "loss": loss_sum / num_tokens,
            "grad_norm": norm / len(self._batches[name]),
        }

    def padding(self, name: str) -> float:
        """Positions of the rows to tokens in them."""
        positions = sum(part.tokens_BT.numel() for batch in self._batches[name] for part in batch.micro_batches)
        return positions / sum(batch.num_targets for batch in self._batches[name])


def padded(batch: Batch) -> Batch:
    """The same with rows of the greatest length."""
    return replace(batch, micro_batches=[_padded(micro_batch) for micro_batch in batch.micro_batches])


def _padded(micro_batch: MicroBatch) -> MicroBatch:
    missing = MAX_LENGTH - micro_batch.tokens_BT.shape[1]
    return MicroBatch(
        F.pad(micro_batch.tokens_BT, (0, missing)), F.pad(micro_batch.targets_BT, (0, missing), value=IGNORED)
    )


def main() -> int:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="examples per optimizer step")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options, host = parser.parse_args(), machine()
    if reason := no_gpu(options.device):
        print(reason, file=sys.stderr)
        return NO_GPU
    torch.set_num_threads(1)
    loop = Loop(options.batch_size, options.hidden_size, options.steps, options.device)
    equal = EQUAL if options.device == "cpu" else EQUAL_IN_BF16
    first = {name: loop.run(name) for name in NAMES}
    faults = [
        f"{name}: another {key}: {first[name][key]} instead of {first['ours'][key]}"
        for name in NAMES[1:]
        for key in ("loss", "grad_norm")
        if abs(first[name][key] - first["ours"][key]) > equal * first["ours"][key]
    ]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    in_turn(NAMES, options.pairs, lambda name: runs[name].append(loop.run(name)))
    figures = {name: {**medians(runs[name]), "positions_per_token": round(loop.padding(name), 2)} for name in NAMES}
    times = {name: ratio(figures["ours"], figures[name], "tokens_per_cpu_s") for name in GOALS}
    print_result(
        "packing",
        faults,
        machine=host,
        settings={**vars(options), "mean_length": round(loop.mean_length, 1)},
        layouts=figures,
        times_as_fast_as=times,
        goals=GOALS,
        reaches_goals={name: (times[name] or 0) >= goal for name, goal in GOALS.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
