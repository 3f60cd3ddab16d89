"""How long the parts of a study take: assumed from the numbers of its model, or measured by a probe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainables.architecture import Architecture, architecture_of
from trainables.config import TrainConfig
from tuner.planning.plan import bounds
from tuner.study_file.spec import StudySpec

# Additions and multiplications a second that training gets out of a device. H100: 40 % of what its data sheet says.
FLOPS = {"bf16": 4e14, "fp32": 4e13}
CPU_FLOPS_A_CORE = 1.5e10
# Of the forward pass, and of the backward pass after it, a parameter and token; LoRA needs no gradient of weights.
FORWARD_FLOP, BACKWARD_FLOP, FROZEN_BACKWARD_FLOP = 2, 4, 2
EVAL_EXAMPLES = 2000
EVAL_BATCH = 32
START_S, TURNOVER_S, END_S = 15.0, 0.3, 3.0
READ_BYTES_A_S, COPY_BYTES_A_S = 1e9, 5e9
# Weights, and AdamW's two moments, in float32.
BYTES_PER_PARAMETER = 12


@dataclass(frozen=True)
class Assumption:
    """What a forecast rests on.

    Attributes:
        name: Of what.
        value: A number, with its unit in the name, or words.
        why: Where it comes from.
        is_measured: It was measured here, with this study.
    """

    name: str
    value: float | str
    why: str
    is_measured: bool = False


@dataclass(frozen=True)
class Pace:
    """What the parts of a study take.

    Attributes:
        start_s: From the start of the command to the first step of a slot, all workers started and data prepared.
        step_s: Of an optimizer step.
        eval_s: Of an evaluation; 0 where steps include it.
        save_s: That a checkpoint keeps the loop.
        turnover_s: From the last report of a trial to the first step of the next one in its slot.
        end_s: From the last report of the last trial to the end of the search.
        checkpoint_bytes: Of one checkpoint; None: not known.
        peak_bytes: Of memory that a worker takes of its GPU; None: not measured.
        assumptions: Where these numbers come from.
    """

    start_s: float
    step_s: float
    eval_s: float
    save_s: float
    turnover_s: float
    end_s: float
    checkpoint_bytes: int | None = None
    peak_bytes: int | None = None
    assumptions: tuple[Assumption, ...] = ()


def assumed_pace(spec: StudySpec, gpus_per_worker: float) -> Pace | None:
    """What the numbers of a study's model let one expect; None where they are not on this machine.

    Args:
        spec: The study.
        gpus_per_worker: As planned.
    """
    config = None if spec.is_custom else _typical(spec)
    architecture = None if config is None else architecture_of(config.model, config.tokenizer)
    if config is None or architecture is None:
        return None
    speed, device = _speed(spec, config, gpus_per_worker)
    step_flop = _step_flop(config, architecture)
    num_examples, which = _eval_examples(config)
    eval_flop = FORWARD_FLOP * _used_parameters(architecture) * num_examples * config.max_length
    size = checkpoint_bytes(config, architecture)
    read_s = architecture.parameters * 4 / READ_BYTES_A_S
    numbers = {
        "start_s": (START_S + read_s, "as on a small machine, and the weights read at 1 GB/s"),
        "step_s": (step_flop / speed, f"{step_flop:.2g} FLOP, every example as long as max_length, at {device}"),
        "eval_s": (eval_flop / speed, f"{eval_flop:.2g} FLOP for {which}"),
        "save_s": (size / COPY_BYTES_A_S, "the state copied at 5 GB/s, and written beside the loop"),
        "turnover_s": (TURNOVER_S, "as of a warm slot"),
        "end_s": (END_S, "as on a small machine"),
    }
    seconds = {name: value for name, (value, _) in numbers.items()}
    why = {name: words for name, (_, words) in numbers.items()}
    return Pace(**seconds, checkpoint_bytes=size, peak_bytes=None, assumptions=named(seconds, why))


WORDS = {
    "start_s": "seconds to the first step",
    "step_s": "seconds a step",
    "eval_s": "seconds an evaluation",
    "save_s": "seconds kept by a save",
    "turnover_s": "seconds between trials",
    "end_s": "seconds to close",
}


def named(seconds: Mapping[str, float], why: Mapping[str, str], *, is_measured: bool = False) -> tuple[Assumption, ...]:
    """The seconds of a pace as assumptions."""
    return tuple(Assumption(WORDS[key], value, why[key], is_measured) for key, value in seconds.items())


def checkpoint_bytes(config: TrainConfig, architecture: Architecture) -> int:
    """Of weights and optimizer; of the adapters alone where they alone are trained."""
    lora = config.lora
    trained = architecture.parameters if lora is None else architecture.lora_parameters(lora.rank)
    return trained * BYTES_PER_PARAMETER


def _typical(spec: StudySpec) -> TrainConfig | None:
    """The default trial, else one at the first bounds of the space."""
    firsts = {name: bounds(parameter)[0] for name, parameter in spec.search_space.parameters.items()}
    for params in (spec.default_params(), firsts):
        if params is None:
            continue
        try:
            return spec.train_config(params)
        except ValueError:
            continue
    return None


def _speed(spec: StudySpec, config: TrainConfig, gpus_per_worker: float) -> tuple[float, str]:
    """FLOP a second of all workers of a trial, and of what."""
    workers = spec.scaling.max_workers
    if gpus_per_worker:
        each = FLOPS[config.precision] * gpus_per_worker
        return workers * each, f"{each / 1e12:.3g} TFLOP/s a worker (an H100 at 40 %)"
    each = CPU_FLOPS_A_CORE * spec.scaling.cpus_per_worker
    return workers * each, f"{each / 1e9:.3g} GFLOP/s a worker (15 a core)"


def _step_flop(config: TrainConfig, architecture: Architecture) -> float:
    backward = BACKWARD_FLOP if config.lora is None else FROZEN_BACKWARD_FLOP
    recomputed = {"none": 0.0, "selective": FORWARD_FLOP / 2, "full": float(FORWARD_FLOP)}
    flop = FORWARD_FLOP + backward + recomputed[config.gradient_checkpointing]
    return flop * _used_parameters(architecture) * config.batch_size * config.max_length


def _used_parameters(architecture: Architecture) -> float:
    """Those that a token is multiplied with: no embedding, and of experts only those it visits."""
    attention = 2 * architecture.hidden * (architecture.queries + architecture.keys)
    layer = attention + architecture.mlp_matrices * architecture.hidden * architecture.inner
    return architecture.layers * layer + architecture.head_parameters


def _eval_examples(config: TrainConfig) -> tuple[int, str]:
    limits: list[Any] = [] if config.eval_batches is None else [config.eval_batches * EVAL_BATCH]
    sliced = re.fullmatch(r".*\[(\d*):(\d+)\]", config.dataset.eval_split or "")
    if sliced:
        limits.append(int(sliced[2]) - int(sliced[1] or 0))
    number = min(limits, default=EVAL_EXAMPLES)
    return number, f"{number} examples{'' if limits else ', the most that is held out'}"
