"""One fine-tune from the `train` section of a study file alone: `torchrun -m trainables train.yaml`, no Ray.

Exit codes: 0 done, 1 diverged, out of memory or a checkpoint failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainables.checkpoint_dir import clean, newest_complete, step_dir
from trainables.config import TrainConfig
from trainables.errors import CheckpointError, Diverged, OutOfMemory
from trainables.hub import check_access
from trainables.progress import heard_by

if TYPE_CHECKING:
    from trainables.finetune import Report
    from trainables.parallel import Worker

EPILOG = """examples:
  python -m trainables train.yaml
  torchrun --nproc-per-node 8 -m trainables train.yaml --checkpoint-dir checkpoints --checkpoint-every 100
  torchrun --nproc-per-node 8 -m trainables train.yaml --checkpoint-dir checkpoints --resume
  torchrun --nproc-per-node 8 -m trainables train.yaml --parallel fsdp"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, trains, prints; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        config = read_config(options.file)
        train(config, options)
    except ValueError as error:
        return _fail(str(error), 2)
    except (Diverged, CheckpointError, OutOfMemory) as error:
        return _fail(str(error), 1)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainables",
        description="Fine-tune one model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="YAML file with the keys of a study's train section")
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="every process holds the model (ddp), or a part of it (fsdp); default: ddp",
    )
    parser.add_argument("--checkpoint-dir", type=Path, help="where checkpoints go; none are made without it")
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="save at reports whose step this divides; default: all"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--until", type=int, metavar="STEP", help="end at the first report from this step on")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="append each report's metrics, a line of JSON")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"), help="where tokenised data is kept")
    return parser


def read_config(path: Path) -> TrainConfig:
    """Reads a YAML 1.2 file.

    Raises:
        ValueError: The file cannot be read or a key is wrong; the message names all of them.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        values: Any = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected keys and values, such as model: and dataset:")
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        problems = [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError("\n".join(problems)) from error


def train(config: TrainConfig, options: argparse.Namespace) -> None:
    """Trains on this process's share of the workers that torchrun started, or alone."""
    if options.checkpoint_dir is None and (options.resume or options.checkpoint_every):
        raise ValueError("--resume and --checkpoint-every need --checkpoint-dir")
    if options.checkpoint_every is not None and options.checkpoint_every < 1:
        raise ValueError(f"--checkpoint-every must be at least 1, got {options.checkpoint_every}")
    if config.callbacks:
        raise ValueError("callbacks are for studies with trainable: huggingface; remove them")
    check_access((config.model, config.tokenizer))
    with joined_worker() as worker, heard_by(_show_progress):
        _train(config, options, worker)


def _train(config: TrainConfig, options: argparse.Namespace, worker: Worker) -> None:
    from trainables.finetune import finetune

    resume_from = _resume_from(options, worker)
    kind, cache_dir = options.parallel, options.cache_dir
    for report in finetune(config, worker, cache_dir=cache_dir, parallel=kind, resume_from=resume_from):
        if worker.rank == 0:
            _show_progress("")
            print(format_report(report), flush=True)
            _keep_metrics(report, options.metrics)
        _checkpoint(report, options, worker)
        if options.until is not None and report.step >= options.until:
            break


def _show_progress(line: str) -> None:
    # In place, and only where somebody looks.
    if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        print(f"\r\033[K{line[: os.get_terminal_size(sys.stderr.fileno()).columns - 1]}", end="", file=sys.stderr)


def _resume_from(options: argparse.Namespace, worker: Worker) -> Path | None:
    from trainables.parallel import barrier

    if options.checkpoint_dir is None:
        return None
    if worker.rank == 0:
        clean(options.checkpoint_dir)
    barrier(worker)
    newest = newest_complete(options.checkpoint_dir)
    if newest is not None and not options.resume:
        raise ValueError(f"{options.checkpoint_dir} holds checkpoints already; add --resume to go on from them")
    return newest


def _checkpoint(report: Report, options: argparse.Namespace, worker: Worker) -> None:
    from trainables.checkpoint import save_checkpoint

    if options.checkpoint_dir is None or (report.is_last and not report.history):
        return
    if report.is_last or report.step % (options.checkpoint_every or 1) == 0:
        save_checkpoint(report.state, step_dir(options.checkpoint_dir, report.step), worker)


def _keep_metrics(report: Report, path: Path | None) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.metrics) + "\n")


def format_report(report: Report) -> str:
    """One line of a report's metrics."""
    numbers = {name: value for name, value in report.metrics.items() if name != "step"}
    return f"step {report.step}  " + "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())


@contextmanager
def joined_worker() -> Iterator[Worker]:
    """This process as a worker: one of torchrun's, in a process group, or the only one."""
    import torch
    import torch.distributed as dist

    from trainables.parallel import Worker, leave_group

    rank, world_size, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        # Tensors on a GPU travel by NCCL, everything else by gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Worker(rank, world_size, device, local_rank)
    finally:
        if world_size > 1:
            leave_group()


def _fail(message: str, exit_code: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
