"""How messages name keys and values, and which known name a wrong one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

KeyPath = tuple[str | int, ...]

# Names that other tools use for the same thing, none of them near enough in spelling.
SYNONYMS = {
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "epsilon",
    "bf16": "precision",
    "bs": "batch_size",
    "eval_steps": "eval_every",
    "eta": "reduction_factor",
    "fp16": "precision",
    "gradient_accumulation_steps": "batch_size",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "max": "high",
    "max_seq_length": "max_length",
    "min": "low",
    "model_name_or_path": "model",
    "n_trials": "num_trials",
    "num_samples": "num_trials",
    "optim": "optimizer",
    "per_device_train_batch_size": "micro_batch_size",
    "time_budget_s": "max_hours",
    "uri": "tracking_uri",
    "values": "choices",
}


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """`; did you mean X?` for the nearest known words, or nothing when none is near."""
    close = near(str(word), [str(name) for name in known])
    return f"; did you mean {' or '.join(close)}?" if close else ""


def near(word: str, known: Sequence[str]) -> list[str]:
    """Up to two known words that `word` may stand for, the nearest first."""
    if SYNONYMS.get(word.lower()) in known:
        return [SYNONYMS[word.lower()]]
    plain = {_plain(name): name for name in known}
    close = difflib.get_close_matches(_plain(word), plain, n=2, cutoff=0.65)
    scores = [difflib.SequenceMatcher(None, _plain(word), name).ratio() for name in close]
    # The second one only where it is as likely: beta is beta1 or beta2, learning_rat is learning_rate.
    return [plain[name] for name, score in zip(close, scores, strict=True) if score > scores[0] - 0.02]


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def dotted(key: KeyPath) -> str:
    """`("search", "initial", 0)` as `search.initial.0`, the form that `--set` takes."""
    return ".".join(map(str, key))


def kind_of(value: object) -> str:
    """What a user calls the kind of `value`: `a list`, `the text 'x'`, `12`."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {shorten(repr(value))}"
    return shorten(repr(value).lower() if isinstance(value, bool) else repr(value))


def shorten(text: str, width: int = 60) -> str:
    """`text`, cut to `width` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def yaml(value: object) -> str:
    """A scalar as a study file would have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, str) else repr(value)
