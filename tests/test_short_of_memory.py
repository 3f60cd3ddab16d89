"""A study with two workers a trial, one of which has too little memory for its passes: it completes all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.studies import Recorder, study_spec
from tests.tiny import CPU, train
from trainables.config import TrainConfig
from trainables.micro_batch import NOTES
from trainables.model import build_model
from trainables.tokenizer import byte_level_tokenizer
from tuner.execution import search

# On rank 1 a pass asks for 64 KiB to the power of its examples: 4 GiB for two of them, of which none is touched, and
# more than any machine has for three.
MODELING = """
import torch
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

def ask(module, args, kwargs):
    rows = len(kwargs["input_ids"])
    print(f"a pass over {rows}")
    if dist.is_initialized() and dist.get_rank() == 1:
        torch.empty((1 << 16) ** min(rows, 3), dtype=torch.uint8)

class GreedyForCausalLM(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(ask, with_kwargs=True)
"""


def write_greedy_model(folder: Path, config: TrainConfig) -> Path:
    """A model whose code comes with it, and its tokenizer."""
    build_model(config, byte_level_tokenizer(), CPU.device).save_pretrained(folder)  # type: ignore[operator]
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "modeling_greedy.py").write_text(MODELING)
    numbers = json.loads((folder / "config.json").read_text())
    numbers["auto_map"] = {"AutoModelForCausalLM": "modeling_greedy.GreedyForCausalLM"}
    (folder / "config.json").write_text(json.dumps(numbers))
    return folder


def passes_of(study_dir: Path, number: int, rank: int) -> list[int]:
    """Examples of each pass of a trial, of one apart: those are also made to look at a new model."""
    lines = (study_dir / "logs" / f"{number}.rank{rank}.log").read_text().splitlines()
    passes = (int(line.rpartition(" ")[2]) for line in lines if line.startswith("a pass over "))
    return [size for size in passes if size > 1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_without_memory_halves_the_passes_of_all_and_costs_no_trial_and_no_further_attempt(
    tmp_path: Path,
) -> None:
    settings = {"batch_size": 8, "packing": False, "max_steps": 4, "trust_remote_code": True}
    plain = study_spec(tmp_path, train=settings).train_config()
    model = write_greedy_model(tmp_path / "greedy", plain)
    recorder = Recorder()
    spec = study_spec(
        tmp_path,
        train=settings | {"model": str(model)},
        search={"num_trials": 3},
        scheduler={"type": "none"},
        scaling={"num_workers": 2, "slots": 1},
        failures={"max_failures": 0},
    )
    study = search.run(spec, source_text="study: tiny\n", root=tmp_path / "studies", observer=recorder)
    assert [trial.state for trial in study.trials()] == ["COMPLETE"] * 3
    assert len(recorder.warnings) == 1
    assert "passes too large" in recorder.warnings[0]
    [size] = json.loads(next(tmp_path.rglob(NOTES)).read_text()).values()
    assert size == 2
    for rank in (0, 1):
        first, *others = (passes_of(study.dir, number, rank) for number in range(3))
        assert first[0] == 4
        assert {max(passes) for passes in (first[1:], *others)} == {2}
        # Each of four steps takes two passes of each rank instead of one.
        assert others[0] == others[1]
    alone = train(plain, tmp_path / "alone")
    reports = study.trials()[0].reports
    assert list(reports.values()) == pytest.approx([report.metrics["eval_loss"] for report in alone], rel=1e-5)
