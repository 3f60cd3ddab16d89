"""A study file in, a StudySpec or every fault with its line out."""

# A row a fault: broken over lines the tables cannot be read.
# ruff: noqa: E501

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tuner.errors import SpecError
from tuner.study_file.spec import StudySpec, load_spec, make_spec, override_spec

LR = "{type: float, low: 1e-5, high: 1e-2, log: true}"
OPTIMIZER = "{type: categorical, choices: [adamw, adafactor]}"
STUDY = f"""\
study: demo
train:
  model: {{model_type: qwen2, hidden_size: 64}}
  dataset: {{path: python-docstrings}}
  learning_rate: 1e-3
  max_steps: 27
  eval_every: 3
search_space:
  learning_rate: {LR}
  optimizer: {OPTIMIZER}
search: {{num_trials: 8}}
scheduler: {{grace_period: 3}}
"""


def load(tmp_path: Path, text: str, overrides: Sequence[str] = ()) -> StudySpec:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path, overrides)


def faults(tmp_path: Path, text: str, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text, overrides)
    *lines, last = str(caught.value).splitlines()
    assert last == f"{len(lines)} error{'s' if len(lines) > 1 else ''}; nothing was started."
    return [line.replace(f"{tmp_path}/", "") for line in lines]


def changed(old: str, new: str) -> str:
    assert STUDY.count(old) >= 1, old
    return STUDY.replace(old, new, 1)


def lr(definition: str) -> str:
    return changed(LR, definition)


def optimizer(definition: str) -> str:
    return changed(OPTIMIZER, definition)


def train(line: str) -> str:
    return changed("  eval_every: 3\n", f"  eval_every: 3\n  {line}\n")


def search(keys: str) -> str:
    return changed("num_trials: 8", keys)


def scheduler(keys: str) -> str:
    return changed("grace_period: 3", keys)


def extra(lines: str) -> str:
    return f"{STUDY}{lines}\n"


# Each file has one fault: `line: key: message`, or a part of the message.
FAULTS = {
    # Numbers.
    "quoted bound": (lr('{type: float, low: "1e-5", high: 1e-2}'), "9: search_space.learning_rate.low: must be a number, got the text '1e-5'; remove the quotes: 1e-5"),
    "quoted constant": (changed("learning_rate: 1e-3", 'learning_rate: "1e-3"'), "5: train.learning_rate: must be a number, got the text '1e-3'; remove the quotes"),
    "quoted setting": (search('num_trials: "8"'), "11: search.num_trials: must be a whole number, got the text '8'; remove the quotes: 8"),
    "quoted choice": (changed("optimizer: " + OPTIMIZER, 'batch_size: {type: categorical, choices: ["8", 16]}'), "10: search_space.batch_size.choices.0: must be a whole number, got the text '8'; remove the quotes"),
    "leading zero": (changed("max_steps: 27", "max_steps: 027"), "6: train.max_steps: must be a whole number, got the text '027'; write 27"),
    "underscore": (changed("max_steps: 27", "max_steps: 1_000"), "6: train.max_steps: must be a whole number, got the text '1_000'; write 1000"),
    "sexagesimal": (changed("max_steps: 27", "max_steps: 1:30"), "6: train.max_steps: must be a whole number, got the text '1:30'"),
    "date": (changed("max_steps: 27", "max_steps: 2024-01-01"), "6: train.max_steps: must be a whole number, got the text '2024-01-01'"),
    "float steps": (changed("max_steps: 27", "max_steps: 1e3"), "6: train.max_steps: must be a whole number, got 1000.0; write 1000"),
    "yes": (train("compile: yes"), "8: train.compile: must be true or false, got the text 'yes'; write true"),
    "infinite constant": (train("epsilon: .inf"), "8: train.epsilon: must be a finite number, got inf"),
    "overflow": (train("epsilon: 1e400"), "8: train.epsilon: must be a finite number, got inf"),
    # Ranges.
    "low above high": (lr("{type: float, low: 1e-2, high: 1e-5}"), "9: search_space.learning_rate.low: must be <= high (1e-05), got 0.01; swap them"),
    "zero with log": (lr("{type: float, low: 0.0, high: 1e-2, log: true}"), "9: search_space.learning_rate.low: must be > 0 when log is true, got 0.0"),
    "nan": (lr("{type: float, low: .nan, high: 1e-2}"), "9: search_space.learning_rate.low: must be a finite number, got nan"),
    "inf": (lr("{type: float, low: 1e-5, high: .inf}"), "9: search_space.learning_rate.high: must be a finite number, got inf"),
    "uneven step": (lr("{type: float, low: 0.001, high: 0.01, step: 0.004}"), "9: search_space.learning_rate.high: must be low plus a multiple of step (0.004), got 0.01; nearest legal: 0.009 or 0.013"),
    "log with step": (lr("{type: float, low: 1e-5, high: 1e-2, log: true, step: 1e-5}"), "9: search_space.learning_rate.step: cannot be combined with log: true"),
    "log as number": (lr("{type: float, low: 1e-5, high: 1e-2, log: 1}"), "9: search_space.learning_rate.log: must be true or false, got 1"),
    "no bounds": (lr("{type: float, low: 1e-5}"), "9: search_space.learning_rate.high: missing"),
    "huge": (lr("{type: float, low: 1e-5, high: 1" + 400 * "0" + "}"), "9: search_space.learning_rate.high: must be a number, got 1000000000"),
    # Choices.
    "no choice": (optimizer("{type: categorical, choices: []}"), "10: search_space.optimizer.choices: must not be empty"),
    "same choice": (optimizer("{type: categorical, choices: [sgd, adamw, sgd]}"), "10: search_space.optimizer.choices.2: sgd is listed twice"),
    "range in a choice": (optimizer("{type: categorical, choices: [sgd, {type: float, low: 0, high: 1}]}"), "10: search_space.optimizer.choices.1: a choice cannot hold a range or a mapping: make the range a parameter of its own with a condition, as in beta2: {type: float, low: 0.9, high: 0.999, when: {optimizer: adamw}}"),
    "nested range": (optimizer("{type: categorical, choices: [sgd, {adamw: {beta2: {low: 0, high: 1}}}]}"), "10: search_space.optimizer.choices.1: a choice cannot hold a range"),
    "list as choice": (optimizer("{type: categorical, choices: [[sgd], adamw]}"), "10: search_space.optimizer.choices.0: a choice must be text, a number, true, false or null, got a list"),
    "illegal choice": (optimizer("{type: categorical, choices: [adamw, adafactr]}"), "10: search_space.optimizer.choices.1: must be one of adamw, adafactor, sgd, got the text 'adafactr'; did you mean adafactor?"),
    "many choices": (changed("optimizer: " + OPTIMIZER, f"seed: {{type: categorical, choices: {list(range(1001))}}}"), "10: search_space.seed.choices: must be at most 1000 values, got 1001"),
    # Definitions.
    "list for a definition": (optimizer("[adamw, sgd]"), "10: search_space.optimizer: must be a mapping, got a list; write optimizer: {type: categorical, choices: [adamw, sgd]}"),
    "constant for a definition": (lr("1e-3"), "9: search_space.learning_rate: must be a mapping, got 0.001; a constant belongs in train: write learning_rate there"),
    "nothing for a definition": (lr(""), "9: search_space.learning_rate: has no definition; write learning_rate: {type: float"),
    "no type": (lr("{low: 1e-5, high: 1e-2}"), "9: search_space.learning_rate.type: missing; write type: float"),
    "misspelt type": (lr("{type: flaot, low: 1e-5, high: 1e-2}"), "9: search_space.learning_rate.type: must be one of float, int, categorical, got the text 'flaot'; did you mean float?"),
    "Ray's type": (lr("{type: loguniform, low: 1e-5, high: 1e-2}"), "9: search_space.learning_rate.type: must be one of float, int, categorical, got the text 'loguniform'; write type: float with log: true"),
    "misspelt key type": (lr("{tpye: float, low: 1e-5, high: 1e-2}"), "9: search_space.learning_rate.tpye: unknown field; did you mean type?"),
    "another tool's key": (lr("{type: float, min: 1e-5, high: 1e-2}"), "9: search_space.learning_rate.min: unknown field; did you mean low?"),
    "key of another type": (optimizer("{type: categorical, choices: [adamw, sgd], log: true}"), "10: search_space.optimizer.log: unknown field; known: when, type, choices"),
    "nested key": (changed("optimizer: " + OPTIMIZER, "dataset: {limit: {type: int, low: 1, high: 8}}"), "10: search_space.dataset: holds mappings; write a nested key with a dot: dataset.limit: {type: int, low: 1, high: 8}"),
    "float for a whole number": (changed("optimizer: " + OPTIMIZER, "batch_size: {type: float, low: 8, high: 64}"), "10: search_space.batch_size.type: the key is a whole number; use type: int"),
    "bound the trainable refuses": (changed("optimizer: " + OPTIMIZER, "beta2: {type: float, low: 0.9, high: 1.5}"), "10: search_space.beta2.high: must be < 1.0, got 1.5"),
    "choice that is none": (changed("optimizer: " + OPTIMIZER, "packing: {type: categorical, choices: [false, often]}"), "10: search_space.packing.choices.1: must be true or false or auto, got the text 'often'"),
    # Conditions.
    "unknown parent": (lr("{type: float, low: 1e-5, high: 1e-2, when: {optimzer: adamw}}"), "9: search_space.learning_rate.when.optimzer: optimzer is not in search_space; did you mean optimizer?"),
    "impossible value": (lr("{type: float, low: 1e-5, high: 1e-2, when: {optimizer: adam}}"), "9: search_space.learning_rate.when.optimizer: optimizer never has this value: must be one of adamw, adafactor; got adam"),
    "cycle": (lr("{type: float, low: 1e-5, high: 1e-2, when: {learning_rate: 1e-3}}"), "9: search_space.learning_rate.when: conditions form a cycle"),
    "condition as list": (lr("{type: float, low: 1e-5, high: 1e-2, when: [optimizer]}"), "9: search_space.learning_rate.when: must be a mapping from another parameter to its value, got a list; write when: {optimizer: adamw}"),
    # Keys.
    "searched key misspelt": (changed("  optimizer: {", "  optimiser: {"), "10: search_space.optimiser: unknown field; did you mean optimizer?"),
    "searched key near two": (changed("optimizer: " + OPTIMIZER, "beta: {type: float, low: 0.9, high: 0.99}"), "10: search_space.beta: unknown field; did you mean beta2 or beta1?"),
    "nested searched key misspelt": (changed("optimizer: " + OPTIMIZER, "dataset.limt: {type: int, low: 1, high: 8}"), "10: search_space.dataset.limt: unknown field; did you mean dataset.limit?"),
    "keys of a plain value": (changed("optimizer: " + OPTIMIZER, "seed.x: {type: int, low: 1, high: 8}"), "10: search_space.seed.x: seed has no keys of its own"),
    "train key misspelt": (train("max_lenght: 8"), "8: train.max_lenght: unknown field; did you mean max_length?"),
    "train key misspelt beside the right one": (train("max_step: 9"), "8: train.max_step: unknown field; did you mean max_steps?"),
    "Hugging Face's name": (train("lr_scheduler_type: linear"), "8: train.lr_scheduler_type: unknown field; did you mean lr_schedule?"),
    "nested train key misspelt": (changed("{path: python-docstrings}", "{path: python-docstrings, evalsplit: x}"), "4: train.dataset.evalsplit: unknown field; did you mean eval_split?"),
    "section misspelt": (changed("scheduler: ", "schedular: "), "12: schedular: unknown field; did you mean scheduler?"),
    "setting misspelt": (scheduler("grace_perod: 3"), "12: scheduler.grace_perod: unknown field; did you mean grace_period?"),
    "setting in the wrong place": (extra("sampler: tpe"), "13: sampler: unknown field; it belongs in search"),
    "constant in the wrong place": (extra("batch_size: 8"), "13: batch_size: unknown field; it belongs in train"),
    "setting in train": (train("num_workers: 2"), "8: train.num_workers: unknown field; it belongs in scaling"),
    "searched length": (changed("optimizer: " + OPTIMIZER, "max_steps: {type: int, low: 9, high: 27}"), "10: search_space.max_steps: cannot be searched: it is the length of every trial"),
    "duplicate": (train("max_steps: 9"), "8: train.max_steps: the key is given twice, on lines 6 and 8; keep one of them"),
    "no value": (changed("max_steps: 27", "max_steps:"), "6: train.max_steps: has no value; give it one, or remove the key"),
    # Missing things.
    "no parameter": (STUDY[: STUDY.index("  learning_rate: {")] + STUDY[STUDY.index("search: ") :], "8: search_space: has no parameter to search; add at least one, such as learning_rate: {type: float"),
    "no study": (changed("study: demo\n", ""), "study.yaml: study: missing"),
    "no search": (changed("search: {num_trials: 8}\n", ""), "study.yaml: search.num_trials: missing"),
    "no model": (changed("  model: {model_type: qwen2, hidden_size: 64}\n", ""), "2: train.model: missing"),
    "scalar section": (changed("search: {num_trials: 8}", "search: 8"), "11: search: must be a mapping, got 8"),
    "list section": (changed("{grace_period: 3}", "[3]"), "12: scheduler: must be a mapping, got a list"),
    # The scheduler.
    "grace_period above max_t": (scheduler("grace_period: 30"), "12: scheduler.grace_period: must be <= max_t (27), got 30"),
    "grace_period 0": (scheduler("grace_period: 0"), "12: scheduler.grace_period: must be >= 1, got 0"),
    "reduction_factor 1": (scheduler("reduction_factor: 1"), "12: scheduler.reduction_factor: must be >= 2, got 1"),
    "reduction_factor 2.5": (scheduler("reduction_factor: 2.5"), "12: scheduler.reduction_factor: must be a whole number, got 2.5"),
    "max_t beyond max_steps": (scheduler("max_t: 81"), "12: scheduler.max_t: must be <= train.max_steps (27), got 81; lower it or raise train.max_steps"),
    "max_t between reports": (scheduler("max_t: 13"), "12: scheduler.max_t: must be a multiple of train.eval_every (3), since trials report only there, got 13; use 12 or 15, or set train.eval_every: 1"),
    "rung between reports": (scheduler("grace_period: 5"), "12: scheduler.grace_period: must be a multiple of train.eval_every (3), since trials report only there, got 5; use 3 or 6"),
    "reports that meet no rung": (changed("eval_every: 3", "eval_every: 100"), "12: scheduler.grace_period: must be a multiple of train.eval_every (100), since trials report only there, got 3; set train.eval_every: 1"),
    "too many brackets": (scheduler("brackets: 3"), "12: scheduler.brackets: must be <= the number of rungs (2), got 3"),
    "unknown type": (scheduler("type: ahsa"), "12: scheduler.type: must be one of asha, hyperband, median, none, got the text 'ahsa'; did you mean asha?"),
    "checkpoint between reports": (extra("checkpoint: {every: 4}"), "13: checkpoint.every: must be a multiple of train.eval_every (3)"),
    # The rest.
    "unknown metric": (extra("objective: {metric: eval_los}"), "13: objective.metric: no such metric in the reports: eval_los; did you mean eval_loss?"),
    "unknown mode": (extra("objective: {mode: minimize}"), "13: objective.mode: must be one of min, max, got the text 'minimize'"),
    "unknown sampler": (search("num_trials: 8, sampler: tpee"), "11: search.sampler: must be one of tpe, gp, cmaes, qmc, random, grid, got the text 'tpee'; did you mean tpe?"),
    "endless grid": (search("num_trials: 8, sampler: grid"), "9: search_space.learning_rate: sampler grid needs a list of values, and a float without step has none; give it a step"),
    "no trial": (search("num_trials: 0"), "11: search.num_trials: must be >= 1, got 0"),
    "share of a GPU for several workers": (extra("scaling: {num_workers: 2, gpus_per_worker: 0.5}"), "13: scaling.gpus_per_worker: must be a whole number where a trial has several workers (num_workers: 2), got 0.5; NCCL cannot share a GPU between the workers of a trial: use 1, or num_workers: 1"),
    "kind of no GPU": (extra("scaling: {gpus_per_worker: 0, accelerator_type: H100}"), "13: scaling.accelerator_type: names GPUs (H100), and gpus_per_worker is 0; remove one of them"),
    "unknown placement": (extra("scaling: {placement_strategy: PAK}"), "13: scaling.placement_strategy: must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got the text 'PAK'; did you mean PACK?"),
    "elastic from more to fewer": (extra("scaling: {num_workers: {min: 3, max: 2}}"), "13: scaling.num_workers.min: must be <= max (2), got 3"),
    "elastic from none": (extra("scaling: {num_workers: {min: 0, max: 2}}"), "13: scaling.num_workers.min: must be >= 1, got 0"),
    "elastic without an end": (extra("scaling: {num_workers: {min: 1}}"), "13: scaling.num_workers.max: missing; it has no default, so give it a value"),
    "elastic misspelt": (extra("scaling: {num_workers: {min: 1, maxx: 2}}"), "13: scaling.num_workers.maxx: unknown field; did you mean max?"),
    "elastic with a share of a GPU": (extra("scaling: {num_workers: {min: 1, max: 2}, gpus_per_worker: 0.5}"), "13: scaling.gpus_per_worker: must be a whole number where a trial has several workers (num_workers: 2), got 0.5; NCCL cannot share a GPU between the workers of a trial: use 1, or num_workers: 1"),
    "elastic down to one worker": (changed(f"optimizer: {OPTIMIZER}", "fsdp.cpu_offload: {type: categorical, choices: [true, false]}") + "trainable: fsdp\nscaling: {num_workers: {min: 1, max: 2}}\n", "10: search_space.fsdp.cpu_offload.choices.0: needs at least 2 workers, got 1"),
    "no worker": (extra("scaling: {num_workers: 0}"), "13: scaling.num_workers: must be >= 1, got 0"),
    "negative GPUs": (extra("scaling: {gpus_per_worker: -1}"), "13: scaling.gpus_per_worker: must be >= 0.0 or auto, got -1"),
    "one GPU and a half": (extra("scaling: {gpus_per_worker: 1.5}"), "13: scaling.gpus_per_worker: must be a whole number above 1, got 1.5"),
    "slots in words": (extra("scaling: {slots: many}"), "13: scaling.slots: must be a whole number or auto, got the text 'many'"),
    "callback not there": (extra("trainable: huggingface").replace("train:", 'train:\n  callbacks: ["mine.py:Callback"]', 1), "3: train.callbacks.0: no file mine.py in the working directory or beside the study file"),
    "callbacks without a Trainer": (train('callbacks: ["a:B"]'), "8: train.callbacks: only with trainable: huggingface; set that, or remove the callbacks"),
    "misspelt trainable": (extra("trainable: dpp"), "13: trainable: must be ddp, fsdp, huggingface, or your own as package.module:function or file.py:function; got 'dpp'; did you mean ddp?"),
    "shards without shards": (changed("  max_steps: 27", "  fsdp: {cpu_offload: true}\n  max_steps: 27"), "6: train.fsdp: is for fsdp, got ddp, with which every worker holds the whole model; remove it"),
    "shards searched without shards": (changed(f"optimizer: {OPTIMIZER}", "fsdp.cpu_offload: {type: categorical, choices: [true, false]}"), "10: search_space.fsdp.cpu_offload: is for fsdp, got ddp"),
    "shards of one worker": (changed(f"optimizer: {OPTIMIZER}", "fsdp.cpu_offload: {type: categorical, choices: [true, false]}") + "trainable: fsdp\n", "10: search_space.fsdp.cpu_offload.choices.0: needs at least 2 workers, got 1, which holds the whole model; remove it"),
    "optimizer that shards do not have": (extra("trainable: fsdp\nscaling: {num_workers: 2}"), "10: search_space.optimizer.choices.1: adafactor cannot be divided among the workers of fsdp; use adamw or sgd"),
    "constant outside the space": (changed("learning_rate: 1e-3", "learning_rate: 0.5"), "5: train.learning_rate: must be between 1e-05 and 0.01, got 0.5. The default trial would run with this value: change it, remove it, or widen search_space.learning_rate"),
    "initial point unknown": (search("num_trials: 8, initial: [{learning_rat: 1e-3, learning_rate: 1e-3, optimizer: adamw}]"), "11: search.initial.0.learning_rat: is not in search_space; did you mean learning_rate?"),
    "initial point missing": (search("num_trials: 8, initial: [{learning_rate: 1e-3}]"), "11: search.initial.0.optimizer: is missing; give it a value"),
    "initial point outside": (search("num_trials: 8, initial: [{learning_rate: 1.0, optimizer: adamw}]"), "11: search.initial.0.learning_rate: must be between 1e-05 and 0.01, got 1.0"),
    "initial point quoted": (search('num_trials: 8, initial: [{learning_rate: "1e-3", optimizer: adamw}]'), "11: search.initial.0.learning_rate: must be a number, got '1e-3'"),
    "initial point not a mapping": (search("num_trials: 8, initial: [1e-3]"), "11: search.initial.0: must be a mapping, got 0.001"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_gives_its_line_key_rule_and_remedy(tmp_path: Path, text: str, expected: str) -> None:
    prefix = "study.yaml:" if expected[0].isdigit() else ""
    (message,) = faults(tmp_path, text)
    assert message.startswith(prefix + expected)


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "a b", ".hidden", "", "-x", "x" * 101, "mlflow.db", "a\\nb", "ä"]
)
def test_a_study_name_that_is_no_folder_name_is_refused_with_one_that_is(tmp_path: Path, name: str) -> None:
    (message,) = faults(tmp_path, changed("study: demo", f'study: "{name}"'))
    assert message.startswith("study.yaml:1: study: must be a folder name of at most 100 letters")
    load(tmp_path, changed("study: demo", f"study: {message.rpartition('; try ')[2]}"))


def test_all_faults_are_listed_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = scheduler("grace_perod: 3, reduction_factor: 1").replace("low: 1e-5", "low: 0.0").replace("27", "2_7")
    text = text.replace("study: demo", "study: demo\nstudy: demo") + 'scaling: {num_workers: "2"}\n'
    assert [message.split(": ")[:2] for message in faults(tmp_path, text)] == [
        ["study.yaml:2", "study"],
        ["study.yaml:7", "train.max_steps"],
        ["study.yaml:10", "search_space.learning_rate.low"],
        ["study.yaml:13", "scheduler.grace_perod"],
        ["study.yaml:13", "scheduler.reduction_factor"],
        ["study.yaml:14", "scaling.num_workers"],
    ]


def test_a_misspelt_key_has_its_value_checked_too(tmp_path: Path) -> None:
    assert faults(tmp_path, changed("max_steps: 27", "max_stps: x")) == [
        "study.yaml:6: train.max_stps: unknown field; did you mean max_steps?",
        "study.yaml:6: train.max_steps: must be a whole number, got the text 'x'",
    ]


def test_a_wrong_constant_does_not_hide_a_fault_of_the_scheduler(tmp_path: Path) -> None:
    text = changed("learning_rate: 1e-3", 'learning_rate: "1e-3"').replace("grace_period: 3", "grace_period: 5")
    assert len(faults(tmp_path, text)) == 2


def test_thousands_of_faults_are_cut_at_a_hundred_in_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    text = changed("  eval_every: 3\n", "  eval_every: 3\n" + "".join(f"  learning_rte{i}: 1\n" for i in range(4000)))
    assert len(faults(tmp_path, text)) == 100
    assert time.monotonic() - began < 10


def test_a_study_survives_json_unchanged(tmp_path: Path) -> None:
    text = search("num_trials: 8, initial: [{learning_rate: 1e-3, optimizer: adamw}], target: 1, max_hours: 2")
    spec = load(tmp_path, text + "scaling: {gpus_per_worker: 0.5, slots: 2}\n")
    assert StudySpec.model_validate_json(spec.model_dump_json()) == spec
    assert make_spec(spec.model_dump(mode="json")) == spec


def test_defaults_that_depend_on_train_are_written_out(tmp_path: Path) -> None:
    spec = load(tmp_path, scheduler("type: asha"))
    assert (spec.scheduler.grace_period, spec.scheduler.max_t, spec.max_t, spec.checkpoint.every) == (3, 27, 27, 3)


def test_max_t_is_the_length_of_training_where_train_does_not_say(tmp_path: Path) -> None:
    spec = load(tmp_path, scheduler("max_t: 81").replace("  max_steps: 27\n", ""))
    assert spec.train_config({"optimizer": "adamw"}).max_steps == spec.max_t == 81


def test_a_study_of_plain_objects_resolves_max_t(tmp_path: Path) -> None:
    spec = load(tmp_path, STUDY)
    bare = StudySpec(study="x", train=spec.train, search_space=spec.search_space, search=spec.search)
    assert (bare.max_t, bare.scheduler.max_t) == (27, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STUDY, {"learning_rate": 1e-3, "optimizer": "adamw"}),
        (changed("  learning_rate: 1e-3\n", ""), {"learning_rate": 2e-5, "optimizer": "adamw"}),
        (lr("{type: float, low: 1e-4, high: 1}").replace("  learning_rate: 1e-3\n", ""), None),
        (optimizer("{type: categorical, choices: [sgd]}"), {"learning_rate": 1e-3, "optimizer": "sgd"}),
        (optimizer("{type: categorical, choices: [sgd, adafactor]}"), None),
        (extra("").replace("search: ", "  dataset.limit: {type: int, low: 1, high: 9}\nsearch: "), None),
    ],
)  # fmt: skip
def test_the_default_trial_is_the_constants_then_the_trainables_defaults(
    tmp_path: Path, text: str, expected: dict[str, Any] | None
) -> None:
    assert load(tmp_path, text).default_params() == expected


def test_the_default_trial_has_only_active_parameters_and_values_of_the_right_kind(tmp_path: Path) -> None:
    beta2 = "  beta2: {type: float, low: 0.5, high: 0.9, when: {optimizer: adafactor}}\nsearch: "
    text = (
        changed("search: ", beta2)
        .replace("1e-2, log: true", "1.0, log: true")
        .replace("learning_rate: 1e-3", "learning_rate: 1")
    )
    default = load(tmp_path, text).default_params()
    assert default == {"learning_rate": 1.0, "optimizer": "adamw"}
    assert type(default["learning_rate"]) is float


def test_params_override_train_and_dots_reach_into_it(tmp_path: Path) -> None:
    spec = load(tmp_path, STUDY)
    params = {"learning_rate": 5e-3, "dataset.limit": 7}
    assert spec.train_values(params)["dataset"] == {"path": "python-docstrings", "limit": 7}
    assert spec.train_config(params).dataset.limit == 7
    assert spec.train_config(params).learning_rate == 5e-3
    assert spec.train["dataset"] == {"path": "python-docstrings"}
    with pytest.raises(ValueError, match="learning_rate"):
        spec.train_config({"learning_rate": -1.0})


def test_a_searched_key_may_be_required_and_absent_from_train(tmp_path: Path) -> None:
    text = changed("  model: {model_type: qwen2, hidden_size: 64}\n", "")
    text = text.replace("search: ", "  model: {type: categorical, choices: [a/small, a/large]}\nsearch: ")
    assert load(tmp_path, text).default_params() is None


def test_a_key_inside_an_inline_architecture_can_be_searched(tmp_path: Path) -> None:
    text = changed("search: ", "  model.hidden_size: {type: int, low: 32, high: 64, step: 32}\nsearch: ")
    spec = load(tmp_path, text)
    assert spec.default_params() == {"learning_rate": 1e-3, "optimizer": "adamw", "model.hidden_size": 64}
    assert spec.train_values({"model.hidden_size": 32})["model"] == {"model_type": "qwen2", "hidden_size": 32}


def test_bounds_are_checked_under_the_condition_that_makes_them_active(tmp_path: Path) -> None:
    both = (
        "  precision: {type: categorical, choices: [fp32, bf16]}\n"
        "  attention: {type: categorical, choices: [flash_attention_2, sdpa], when: {precision: bf16}}\nsearch: "
    )
    load(tmp_path, changed("search: ", both))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STUDY, []),
        (lr("{type: float, low: 1e-3, high: 1e-3}"), ["search_space has only 2 distinct configurations and search.num_trials is 8: the study ends after 2"]),
        (scheduler("grace_period: 27"), ["scheduler asha has no rung before max_t (27): no trial is stopped early"]),
        (search("num_trials: 1, initial: [{learning_rate: 1e-3, optimizer: adamw}, {learning_rate: 1e-4, optimizer: adamw}]"), ["search.initial has 2 configurations, of which num_trials (1) run"]),
        (search("num_trials: 8, sampler: cmaes"), ["sampler cmaes draws optimizer at random"]),
    ],
)  # fmt: skip
def test_what_is_legal_but_probably_not_meant_is_a_warning(tmp_path: Path, text: str, expected: list[str]) -> None:
    warnings = load(tmp_path, text).warnings()
    assert len(warnings) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(warnings, expected, strict=True))


@pytest.mark.parametrize(
    "keys", ["type: none", "type: none, grace_period: 4", "type: median, grace_period: 4", "type: hyperband"]
)
def test_keys_that_a_scheduler_does_not_use_are_not_held_against_it(tmp_path: Path, keys: str) -> None:
    load(tmp_path, scheduler(keys))


def test_empty_sections_mean_their_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, changed("scheduler: {grace_period: 3}", "scheduler:\nmlflow:\nobjective:"))
    assert (spec.scheduler.type, spec.mlflow.enabled, spec.objective.metric) == ("asha", True, "eval_loss")


def test_null_is_kept_where_it_is_a_value(tmp_path: Path) -> None:
    assert load(tmp_path, train("eval_batches: null")).train["eval_batches"] is None


OWN = """\
study: own
trainable: {trainable}
train: {{anything: [1, 2], nested: {{deep: 1}}}}
search_space:
  width: {{type: int, low: 1, high: 64, log: true}}
  nested.deep: {{type: float, low: 0.0, high: 1.0}}
objective: {{metric: accuracy, mode: max}}
search: {{num_trials: 4}}
scheduler: {{max_t: 9}}
"""


def test_a_trainable_of_ones_own_is_free_in_train_and_search_space(tmp_path: Path) -> None:
    spec = load(tmp_path, OWN.format(trainable="package.module:function"))
    assert spec.is_custom
    assert (spec.max_t, spec.scheduler.grace_period, spec.checkpoint.every) == (9, 1, None)
    assert spec.train_values({"nested.deep": 0.5, "new.key": 1}) == {
        "anything": [1, 2], "nested": {"deep": 0.5}, "new": {"key": 1},
    }  # fmt: skip
    assert spec.default_params() is None
    assert StudySpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_trainable_of_ones_own_must_give_max_t(tmp_path: Path) -> None:
    text = OWN.format(trainable="package.module:function").replace("max_t: 9", "type: asha")
    assert faults(tmp_path, text)[0].startswith(
        "study.yaml:9: scheduler.max_t: missing; a trainable of your own needs it"
    )


def test_the_file_of_a_trainable_is_found_beside_the_study_and_its_function_in_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def fit(config):\n    raise AssertionError('never run')\n")
    assert load(tmp_path, OWN.format(trainable="loop.py:fit")).trainable == f"{tmp_path}/loop.py:fit"
    for trainable, expected in [
        ("loop.py:fitt", "loop.py defines no fitt; did you mean fit?"),
        ("lop.py:fit", "no file lop.py in the working directory or beside the study file"),
    ]:
        (message,) = faults(tmp_path, OWN.format(trainable=trainable))
        assert message.startswith("study.yaml:2: trainable: ")
        assert expected in message


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("train.max_steps=9", "max_t", 9),
        ("search.num_trials=128", "search.num_trials", 128),
        ("search.max_hours=0.5", "search.max_hours", 0.5),
        ("scaling.num_workers=2", "scaling.num_workers", 2),
        ("scaling.num_workers={min: 1, max: 4}", "scaling.max_workers", 4),
        ("scheduler.type=none", "scheduler.type", "none"),
        ("scheduler.grace_period=null", "scheduler.grace_period", 3),
        ("study=other", "study", "other"),
        ("search_space.learning_rate.low=1e-4", "search_space.parameters.learning_rate.low", 1e-4),
        ("search_space.optimizer.choices.1=sgd", "search_space.parameters.optimizer.choices", ("adamw", "sgd")),
    ],
)
def test_set_changes_one_value_of_a_study(tmp_path: Path, override: str, where: str, value: Any) -> None:
    found: Any = load(tmp_path, STUDY, [override])
    for part in where.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value


def test_set_null_clears_a_constant_or_takes_a_parameter_out(tmp_path: Path) -> None:
    spec = load(tmp_path, STUDY, ["search_space.optimizer=null", "train.optimizer=sgd", "train.learning_rate=null"])
    assert list(spec.search_space.parameters) == ["learning_rate"]
    assert spec.train_config(spec.default_params()).optimizer == "sgd"
    assert spec.default_params() == {"learning_rate": 2e-5}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_step=9", "--set: train.max_step: unknown field; did you mean max_steps?"),
        ("train.max_step=null", "--set: train.max_step: unknown field; did you mean max_steps?"),
        ("search_space.optimiser=null", "--set: search_space.optimiser: no such parameter to remove; did you mean optimizer?"),
        ("train.max_steps=x", "--set: train.max_steps: must be a whole number, got the text 'x'"),
        ('train.max_steps="9"', "--set: train.max_steps: must be a whole number, got the text '9'; remove the quotes: 9"),
        ("search_space.learning_rate.low=0.0", "--set: search_space.learning_rate.low: must be > 0 when log is true, got 0.0"),
        ("train.learning_rate=0.5", "--set: train.learning_rate: must be between 1e-05 and 0.01, got 0.5"),
        ("nonsense", "--set: nonsense: must be KEY=VALUE, as in --set train.max_steps=20"),
        ("study=../x", "--set: study: must be a folder name"),
    ],
)  # fmt: skip
def test_a_set_value_is_checked_like_the_file_and_named_by_its_source(
    tmp_path: Path, override: str, expected: str
) -> None:
    (message,) = faults(tmp_path, STUDY, [override])
    assert message.startswith(expected)


def test_a_later_set_may_replace_what_an_earlier_one_set(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        STUDY,
        ["scheduler.type=none", "scheduler={type: median}", "search.initial.0=null", "search={num_trials: 3}"],
    )
    assert (spec.scheduler.type, spec.search.num_trials) == ("median", 3)


def test_initial_configurations_have_values_of_their_parameters_kind(tmp_path: Path) -> None:
    text = lr("{type: float, low: 0.0, high: 1.0, step: 0.1}").replace("learning_rate: 1e-3\n", "learning_rate: 0.1\n")
    text = text.replace("low: 0.0", "low: 0.1").replace(
        "num_trials: 8", "num_trials: 8, initial: [{learning_rate: 1, optimizer: adamw}]"
    )
    (point,) = load(tmp_path, text).search.initial
    assert type(point["learning_rate"]) is float


def test_a_study_can_be_extended_after_it_was_made(tmp_path: Path) -> None:
    spec = load(tmp_path, STUDY)
    extended = override_spec(spec, ["search.num_trials=128"])
    assert extended.search.num_trials == 128
    assert extended.model_copy(update={"search": spec.search}) == spec
    with pytest.raises(SpecError, match=r"--set: search\.num_trials: must be >= 1, got 0"):
        override_spec(spec, ["search.num_trials=0"])


def test_a_spec_cannot_be_changed(tmp_path: Path) -> None:
    spec = load(tmp_path, STUDY)
    with pytest.raises(ValueError, match="frozen"):
        spec.study = "other"  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "search_spaces").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_loads_has_a_default_trial_and_no_warning(path: Path) -> None:
    spec = load_spec(path)
    assert spec.study == path.stem
    assert spec.default_params() is not None
    assert spec.warnings() == []


def test_reading_a_study_imports_none_of_the_large_libraries() -> None:
    code = (
        "import sys, time; began = time.perf_counter(); import tuner.study_file.spec, tuner.planning.plan;"
        "heavy = {'ray', 'torch', 'transformers', 'optuna', 'mlflow', 'numpy', 'datasets', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
