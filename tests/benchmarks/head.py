"""What the output head and the loss take: ours, chunk by chunk, and the logits of all tokens at once.

    python -m tests.benchmarks.head [--tokens 2048] [--features 512] [--pairs 5] [--device cpu]

Forward and backward pass of the head alone, for the vocabulary of Qwen2.5 (151,936 words). `peak_mib` is the most
memory that torch held at a time beyond what was there before; the gradient of the head's weight, which either way
needs, is part of it. The gate: loss and gradients are equal. The goals are at most 0.25 times the bytes and 1.05 times
the time. Exit code 3: there is no GPU for `--device cuda`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.common import (
    NO_GPU,
    in_turn,
    machine,
    medians,
    no_gpu,
    print_result,
    ratio,
    significant,
    wait_for,
)
from trainables.cross_entropy import full_cross_entropy, linear_cross_entropy

MIB = 1 << 20
VOCABULARY = 151_936
BYTES_GOAL, TIME_GOAL = 0.25, 1.05
NAMES = ("ours", "full")


class Head:
    """One head and some hidden states."""

    def __init__(self, num_tokens: int, num_features: int, vocabulary: int = VOCABULARY, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self._device = device
        self.hidden_ND = torch.randn(num_tokens, num_features, device=device, requires_grad=True)
        self.weight_VD = (0.02 * torch.randn(vocabulary, num_features, device=device)).requires_grad_()
        self.targets_N = torch.randint(0, vocabulary, (num_tokens,), device=device)

    def loss(self, name: str) -> torch.Tensor:
        """Ours, or of full logits."""
        if name == "full":
            return full_cross_entropy(F.linear(self.hidden_ND, self.weight_VD), self.targets_N)
        loss: torch.Tensor = linear_cross_entropy(self.hidden_ND, self.weight_VD, None, self.targets_N)
        return loss

    def run(self, name: str) -> torch.Tensor:
        """Forward and backward pass."""
        self.hidden_ND.grad = self.weight_VD.grad = None
        loss = self.loss(name)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def measure(self, name: str) -> dict[str, float]:
        """Seconds of a run."""
        wait_for(self._device)
        started, cpu_started = time.perf_counter(), time.process_time()
        self.run(name)
        wait_for(self._device)
        return {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_started}

    def faults(self) -> list[str]:
        """Where loss or gradients differ."""
        results = {}
        for name in NAMES:
            loss = self.run(name)
            results[name] = (loss, self.hidden_ND.grad, self.weight_VD.grad)
        faults = []
        for what, one, other in zip(("loss", "hidden", "weight"), results["ours"], results["full"], strict=True):
            assert one is not None
            assert other is not None
            if float((one - other).norm()) > 1e-5 * float(other.norm()):
                faults.append(f"the gradient of {what} differs" if what != "loss" else "the loss differs")
        return faults


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that torch has on the CPU at a time beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    del result
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def peak_gpu_bytes(run: Callable[[], Any]) -> int:
    """As `peak_bytes`, on a GPU."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    del result
    return torch.cuda.max_memory_allocated() - before


def main() -> int:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options, host = parser.parse_args(), machine()
    if reason := no_gpu(options.device):
        print(reason, file=sys.stderr)
        return NO_GPU
    torch.set_num_threads(1)
    head = Head(options.tokens, options.features, device=options.device)
    peak = peak_bytes if options.device == "cpu" else peak_gpu_bytes
    faults = head.faults()
    peaks = {}
    for name in NAMES:
        head.hidden_ND.grad = head.weight_VD.grad = None
        peaks[name] = peak(lambda name=name: head.run(name))  # type: ignore[misc]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    in_turn(NAMES, options.pairs, lambda name: runs[name].append(head.measure(name)))
    figures: dict[str, dict[str, Any]] = {
        name: {**medians(runs[name]), "peak_mib": significant(peaks[name] / MIB)} for name in NAMES
    }
    # A GPU's time is not the host's.
    time_key = "cpu_s" if options.device == "cpu" else "wall_s"
    ratios = {key: ratio(figures["ours"], figures["full"], key) for key in ("peak_mib", "wall_s", "cpu_s")}
    print_result(
        "head",
        faults,
        machine=host,
        settings=vars(options),
        **figures,
        ratios=ratios,
        goals={"peak_mib": BYTES_GOAL, time_key: TIME_GOAL},
        reaches_goals=(ratios["peak_mib"] or 9) <= BYTES_GOAL and (ratios[time_key] or 9) <= TIME_GOAL,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
