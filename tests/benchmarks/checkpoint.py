"""How long a checkpoint holds up the loop: beside the loop, at once, and Ray's documented way.

    python -m tests.benchmarks.checkpoint [--sizes tiny,small,large] [--pairs 5] [--saves 4]

The stock way is torch.save to a temporary folder and the synchronous `ray.train.report` of it, in a worker of a
TorchTrainer, where all of them are measured; unlike ours it does not wait for the disk, but for Ray's controller to
have taken the report before. All save the same training loop at the same pace. `blocked_ms` is the time inside the
call; `cost_ms` is by how much a save lengthens the loop in all, by the clock, which also counts what the writing
thread takes from it; `cpu_ms` is in seconds of processor time. The goal is blocked_ms of at most a tenth of stock's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import AutoConfig, AutoModelForCausalLM

from tests.benchmarks.common import MODEL, in_turn, machine, print_result, ratio, significant
from trainables.checkpoint import load_checkpoint, save_checkpoint
from trainables.checkpoint_dir import keep_last, newest_complete, step_dir
from trainables.parallel import Worker
from trainables.saver import CheckpointSaver
from trainables.train_state import TrainState

GOAL = 0.1
WORKER = Worker(rank=0, world_size=1, device=torch.device("cpu"))
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048},
    "large": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "vocab_size": 2048},
}
NAMES = ("beside", "at once", "stock", "torch.save", "none")
# Between saves, so that the one before is written: a report of the studies measured is about this far from the next.
INTERVAL_S = 0.4
TOKENS_BT = (4, 64)
RESULTS = "results.json"


class Loop:
    """A small training loop of one model; each way of saving writes to a folder of its own."""

    def __init__(self, size: str, folder: Path) -> None:
        settings = {"vocab_size": 260, **MODEL, **SIZES[size]}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))  # type: ignore[no-untyped-call]
        self.state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        self._tokens_BT = torch.randint(0, 256, TOKENS_BT)
        self._folder = folder
        self._saver = CheckpointSaver(WORKER)
        self._step()
        started = time.perf_counter()
        self._step()
        self._steps_between = max(1, round(INTERVAL_S / (time.perf_counter() - started)))

    @property
    def state_mib(self) -> float:
        return significant(sum(tensor.nbytes for tensor in tensors_of(plain(self.state))) / 2**20)

    def _step(self) -> None:
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.model(input_ids=self._tokens_BT, labels=self._tokens_BT).loss.backward()
        self.state.optimizer.step()
        self.state.step += 1

    def _save(self, name: str) -> None:
        path = step_dir(self._folder / name, self.state.step)
        if name == "beside":
            self._saver.save(self.state, path, keep_last=1)
        elif name == "at once":
            save_checkpoint(self.state, path, WORKER)
            keep_last(path.parent, 1)
        elif name == "stock":
            report(self.state)
        elif name == "torch.save":
            torch.save(plain(self.state), self._folder / "plain.pt")

    def run(self, name: str, num_saves: int) -> dict[str, float]:
        """Trains, and saves every so many steps; milliseconds a save."""
        blocked: list[float] = []
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(num_saves):
            for _ in range(self._steps_between):
                self._step()
            before = time.perf_counter()
            self._save(name)
            blocked.append(time.perf_counter() - before)
        for _ in range(self._steps_between):
            self._step()
        self._saver.wait()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        return {
            "blocked_ms": 1e3 * median(blocked),
            "longest_ms": 1e3 * max(blocked),
            "wall_ms": 1e3 * seconds / num_saves,
            "cpu_ms": 1e3 * cpu_s / num_saves,
        }

    def faults(self) -> list[str]:
        """What is wrong with what was written last beside the loop, compared with what torch.save writes then."""
        self._save("torch.save")
        self._save("beside")
        expected = torch.load(self._folder / "plain.pt", weights_only=True)
        self._step()
        self._saver.wait()
        newest = newest_complete(self._folder / "beside")
        if newest is None:
            return ["there is no complete checkpoint"]
        load_checkpoint(self.state, newest, WORKER)
        read = tensors_of(plain(self.state))
        same = all(torch.equal(one, other) for one, other in zip(read, tensors_of(expected), strict=True))
        return [] if same else ["the checkpoint differs from what torch.save wrote"]


def plain(state: TrainState) -> dict[str, Any]:
    """What a training script gives to torch.save."""
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "step": state.step,
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested mappings, in order."""
    if isinstance(value, dict):
        return [tensor for key in value for tensor in tensors_of(value[key])]
    return [value] if isinstance(value, torch.Tensor) else []


def report(state: TrainState) -> None:
    """Ray's documented way to save."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(plain(state), Path(folder, "checkpoint.pt"))
        ray.train.report({"step": state.step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def measure(size: str, folder: Path, pairs: int, num_saves: int) -> tuple[dict[str, Any], list[str]]:
    """All ways of saving one size."""
    loop = Loop(size, folder)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for name in NAMES:
        loop.run(name, 1)
    in_turn(NAMES, pairs, lambda name: runs[name].append(loop.run(name, num_saves)))
    figures: dict[str, Any] = {"state_mib": loop.state_mib, "ms_between": significant(runs["none"][0]["wall_ms"])}
    for name in NAMES[:-1]:
        bare = zip(runs[name], runs["none"], strict=True)
        costs = [{key: one[key] - other[key] for key in ("wall_ms", "cpu_ms")} for one, other in bare]
        figures[name] = {
            "blocked_ms": significant(median(run["blocked_ms"] for run in runs[name])),
            "longest_ms": significant(max(run["longest_ms"] for run in runs[name])),
            "cost_ms": significant(median(cost["wall_ms"] for cost in costs)),
            "cpu_ms": significant(median(cost["cpu_ms"] for cost in costs)),
        }
    figures["blocked_ratio"] = ratio(figures["beside"], figures["stock"], "blocked_ms")
    figures["blocked_beside_torch_save"] = ratio(figures["beside"], figures["torch.save"], "blocked_ms")
    figures["cost_ratio"] = ratio(figures["beside"], figures["stock"], "cost_ms")
    return figures, [f"{size}: {fault}" for fault in loop.faults()]


def measure_all(config: dict[str, Any]) -> None:
    """The `train_loop_per_worker`: measures every size, and leaves the results in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    faults: list[str] = []
    for size in config["sizes"]:
        folder = Path(config["folder"], size)
        folder.mkdir()
        results[size], found = measure(size, folder, config["pairs"], config["saves"])
        faults += found
    Path(config["folder"], RESULTS).write_text(json.dumps([results, faults]), encoding="utf-8")


def in_worker(folder: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure in the one worker of a TorchTrainer."""
    ray.init(address="local", include_dashboard=False, log_to_driver=True)
    try:
        TorchTrainer(
            measure_all,
            train_loop_config={
                "folder": folder,
                "sizes": options.sizes.split(","),
                "pairs": options.pairs,
                "saves": options.saves,
            },
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(
                name="checkpoint",
                storage_path=str(Path(folder, "ray")),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
    finally:
        ray.shutdown()
    results, faults = json.loads(Path(folder, RESULTS).read_text(encoding="utf-8"))
    return results, faults


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--saves", type=int, default=4, help="checkpoints of each kind in each pair")
    options, host = parser.parse_args(), machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        results, faults = in_worker(folder, options)
    print_result(
        "checkpoint",
        faults,
        machine=host,
        settings={"pairs": options.pairs, "saves": options.saves, "goal": GOAL},
        reaches_goal={size: result["blocked_ratio"] <= GOAL for size, result in results.items()},
        sizes=results,
    )


if __name__ == "__main__":
    main()
