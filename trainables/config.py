"""TrainConfig: every hyperparameter and setting of a fine-tune. Imports no torch, so that reading it is cheap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator

# pydantic would take the string "1e-5" for a number; in a study file that is a mistake worth naming.
Int = Annotated[int, Strict()]
PositiveInt = Annotated[int, Strict(), Field(gt=0)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Strict(), Field(ge=0, lt=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
Name = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class DatasetConfig(_Section):
    """Where the examples come from and which of them are used."""

    path: Name
    """A Hugging Face hub id, a local .jsonl, .json, .csv, .parquet or .txt file (.txt: a line is an example), or
    `python-docstrings` (built in: those of the top-level modules of Python's standard library, some 3300)."""
    name: str | None = None
    """The hub dataset's configuration, where it has several."""
    split: Name = "train"
    """The training split, with an optional slice: `train`, `train[:8000]`, `train[10%:90%]`. A local file
    has one, train."""
    eval_split: str | None = None
    """The evaluation split, with an optional slice. Null: 5 % of the training split (1 to 2000 examples, drawn with a
    fixed seed, the same for every trial) are held out for it."""
    format: Literal["auto", "instruction", "chat", "text"] = "auto"
    """How a row becomes text. instruction: columns instruction, input (optional), output. chat: messages. text: text.
    auto: whichever of these the columns fit."""
    limit: PositiveInt | None = None
    """Use only the first this many training examples (the evaluation split is left alone)."""


class LoraConfig(_Section):
    """Low-rank adapters in place of full fine-tuning: they alone are trained and saved."""

    rank: PositiveInt = 16
    """Rank of the update."""
    alpha: Positive = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout in front of the adapters."""
    target_modules: Annotated[list[Name], Field(min_length=1)] | Name = "all-linear"
    """Names of the layers that get an adapter, as a list or, where they are searched, as text: `q_proj,v_proj`.
    all-linear: every linear layer but the output head."""

    @property
    def layers(self) -> list[str] | str:
        """target_modules as peft takes it."""
        if self.target_modules == "all-linear" or isinstance(self.target_modules, list):
            return self.target_modules
        return [name.strip() for name in self.target_modules.split(",") if name.strip()]


class FsdpConfig(_Section):
    """How weights, gradients and optimizer are divided among the workers; only for `trainable: fsdp`."""

    reshard_after_forward: Bool = True
    """Let go of a layer's gathered weights after its forward pass and gather them again for the backward pass. false:
    keep them until then, which saves communication and costs memory."""
    reduce_every_pass: Bool = False
    """Where gradients accumulate: sum them over the workers after every forward pass, so that no worker ever holds
    those of the whole model. false: once an optimizer step."""
    cpu_offload: Bool = False
    """Keep weights, gradients and optimizer in host memory, and update them there."""


class TrainConfig(_Section):
    """One fine-tune. Searched parameters are these keys, dotted for nested ones (`dataset.limit`)."""

    model: Name | dict[str, Any]
    """A hub id, a local folder, or an inline architecture: `{model_type: qwen2, hidden_size: 64, ...}` with random
    weights that are the same for every trial, whatever its seed; vocab_size is the tokenizer's when absent."""
    tokenizer: Name | None = None
    """A hub id, a local folder, or `byte-level` (built in, one token a byte). Null: the model's own; an inline
    architecture has none and gets byte-level."""
    dataset: DatasetConfig
    """The examples."""
    max_length: Annotated[int, Strict(), Field(ge=2)] = 1024
    """Longest example in tokens; what is longer is cut off at the end."""
    packing: Bool | Literal["auto"] = "auto"
    """Lay the examples of a forward pass end to end in one row, without attention between them, instead of padding
    them to the longest. Changes speed and memory, not the result. auto: where the model can be packed with its fast
    attention kernel, without compile; true: refuse a model that cannot."""
    response_only: Bool = False
    """Only the tokens of the response (instruction) or of the assistant (chat) count in the loss. Plain text has
    no prompt: all of it counts."""

    max_steps: PositiveInt = 1000
    """Optimizer steps, which is also the length of the learning rate schedule."""
    eval_every: PositiveInt = 100
    """Optimizer steps between reports, each with an evaluation. The last step always reports."""
    eval_batches: PositiveInt | None = None
    """Evaluate on at most this many batches of 32 examples (over all workers; the size is fixed, so that trials with
    different batch sizes are compared on the same examples). Null: the whole evaluation split."""
    batch_size: PositiveInt = 8
    """Examples per optimizer step over all workers."""
    micro_batch_size: PositiveInt | None = None
    """Most examples per worker and forward pass; gradients accumulate up to batch_size. Null: found. Changes speed
    and memory, not the result."""

    learning_rate: Positive = 2e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """What follows the warmup: stay, fall linearly, fall along a half cosine, or stay and then fall linearly over the
    last decay_ratio of the steps (wsd: warmup, stable, decay)."""
    warmup_ratio: Fraction = 0.0
    """Share of max_steps over which the learning rate rises linearly to its peak."""
    decay_ratio: Fraction = 0.2
    """Share of max_steps over which wsd falls; it starts no earlier than the warmup ends."""
    min_lr_ratio: Fraction = 0.0
    """Where the schedule ends, as a share of the peak."""
    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw"
    """The optimizer."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (SGD: L2) on matrices; biases and norms are left out."""
    beta1: Decay = 0.9
    """AdamW: decay of the first moment. SGD: momentum. Adafactor does not use it."""
    beta2: Decay = 0.999
    """AdamW: decay of the second moment."""
    epsilon: Positive = 1e-8
    """AdamW: added to the denominator."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradient to this global L2 norm; 0: do not clip."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: compute in bfloat16 (ddp: matrix products, by autocast; fsdp: all of a layer); weights, optimizer and sums
    of gradients in float32."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass to save memory: of every layer (full), of every second (selective)."""
    compile: Bool = False
    """Compile each layer with torch.compile."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    """Attention kernel; auto: FlashAttention where it is installed, on a GPU with precision bf16, else sdpa."""
    fsdp: FsdpConfig | None = None
    """How the model is divided among the workers, for `trainable: fsdp` alone; null: the defaults."""
    lora: LoraConfig | None = None
    """Low-rank adapters beside frozen weights; `{}` takes their defaults. Null: all weights are trained."""
    callbacks: tuple[Name, ...] = ()
    """`trainable: huggingface` only. Callbacks of transformers.Trainer, each a class that takes no arguments, as
    `package.module:Class` or `file.py:Class`."""
    seed: Annotated[int, Strict(), Field(ge=0, lt=2**63)] = 0
    """Order of the examples and dropout."""
    trust_remote_code: Bool = False
    """Run Python code that comes with the model or tokenizer."""

    @field_validator("model")
    @classmethod
    def _check_architecture(cls, model: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(model, dict) and not isinstance(model.get("model_type"), str):
            raise ValueError("an inline architecture needs model_type, e.g. {model_type: qwen2, hidden_size: 64}")
        return model

    @model_validator(mode="after")
    def _check_flash_precision(self) -> Self:
        if self.attention.startswith("flash") and self.precision == "fp32":
            raise ValueError(f"attention {self.attention} needs precision bf16, got fp32; use sdpa with fp32")
        return self

    def with_params(self, params: Mapping[str, Any]) -> TrainConfig:
        """Sets searched parameters.

        Args:
            params: Values by key; nested keys are dotted, `dataset.limit`.

        Returns:
            A validated copy.

        Raises:
            ValueError: A key is unknown or a value is illegal (pydantic's ValidationError is one).
        """
        values = self.model_dump()
        for key, value in params.items():
            set_dotted(values, key, value)
        return type(self).model_validate(values)


def parallel_faults(config: TrainConfig, parallel: str, num_workers: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings that do not go with how a model is spread over the workers.

    Args:
        config: Every setting.
        parallel: `fsdp` divides the model among the workers; with anything else each of them holds it.
        num_workers: One worker alone holds the model in any case.

    Yields:
        (path of the key, the rule and what to change).
    """
    is_divided = parallel == "fsdp" and num_workers > 1
    if parallel != "fsdp" and config.fsdp is not None:
        yield ("fsdp",), f"is for fsdp, got {parallel}, with which every worker holds the whole model; remove it"
    if parallel == "fsdp" and not is_divided and config.fsdp is not None and config.fsdp.cpu_offload:
        yield ("fsdp", "cpu_offload"), "needs at least 2 workers, got 1, which holds the whole model; remove it"
    if is_divided and config.optimizer == "adafactor":
        yield ("optimizer",), "adafactor cannot be divided among the workers of fsdp; use adamw or sgd"


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in nested dicts, making those that are missing.

    Raises:
        ValueError: What should hold the key is not a mapping.
    """
    *parents, last = key.split(".")
    for depth, name in enumerate(parents, start=1):
        if values.get(name) is None:
            values[name] = {}
        values = values[name]
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {'.'.join(parents[:depth])} is {values!r}, which has no keys to set")
    values[last] = value
