"""Tokenised data: made once under a lock by whoever comes first, memory-mapped by all.

A prepared folder holds three flat files: the token ids of all examples end to end, whether each of them counts in the
loss, and where each example ends. The folder's name is a digest of everything the contents depend on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from trainables.config import TrainConfig
from trainables.progress import Stage
from trainables.render import Rendered, detect_format, render
from trainables.rows import Row, load_rows, source_identity
from trainables.tokenizer import tokenizer_identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Role = Literal["train", "eval"]
ROLES: tuple[Role, ...] = ("train", "eval")

HELD_OUT_FRACTION = 0.05
HELD_OUT_MAX = 2000
_HELD_OUT_SEED = 0
_FORMAT_VERSION = 2
_ROWS_PER_TOKENIZER_CALL = 1000


@dataclass(frozen=True)
class TokenStore:
    """Tokenised examples on disk.

    Attributes:
        tokens: Token ids of all examples, end to end (uint32, memory-mapped).
        counts: 1 where the token counts in the loss, else 0 (uint8, memory-mapped).
        starts: Example i is tokens[starts[i]:starts[i + 1]] (int64).
        num_targets: Tokens of each example that count as targets; the first token never does (int64).
    """

    tokens: NDArray[np.uint32]
    counts: NDArray[np.uint8]
    starts: NDArray[np.int64]
    num_targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.num_targets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example."""
        return np.diff(self.starts)

    def example(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Token ids and loss counts of one example."""
        place = slice(self.starts[index], self.starts[index + 1])
        return self.tokens[place], self.counts[place]


def prepare(
    config: TrainConfig, role: Role, cache_dir: Path, load_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> TokenStore:
    """Opens the tokenised data of a config; makes it first where no process has yet.

    Args:
        config: The dataset, the tokenizer, max_length and response_only count.
        role: Training or evaluation examples.
        cache_dir: Prepared data is kept in `prepared/` below it.
        load_tokenizer: Called only when there is something to tokenise.

    Raises:
        ValueError: The data cannot be read, or holds nothing to train on.
    """
    folders: dict[Role, Path] = {each: cache_dir / "prepared" / _digest(config, each) for each in ROLES}
    if not folders[role].is_dir():
        _write_missing(config, folders, load_tokenizer)
    return _open_store(folders[role])


def _write_missing(
    config: TrainConfig, folders: dict[Role, Path], load_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> None:
    """Tokenises both roles in one go: they are often two parts of one file, which is then read once."""
    folders["train"].parent.mkdir(parents=True, exist_ok=True)
    load = lru_cache(maxsize=1)(partial(_read_rows, config))
    # Configs that share only their evaluation data must not write it at once either.
    with FileLock(folders["train"].parent / "prepared.lock"):
        for role, folder in folders.items():
            if not folder.is_dir():
                _write_store(config, role, folder, load_tokenizer(), load)


def _read_rows(config: TrainConfig, split: str) -> Sequence[Row]:
    Stage(f"reads {config.dataset.path} {split}")
    return load_rows(config.dataset, split)


def _digest(config: TrainConfig, role: Role) -> str:
    dataset = config.dataset.model_dump()
    if role == "eval":
        # The limit is for training examples: trials that search over it are compared on the same evaluation data.
        del dataset["limit"]
    depends_on = {
        "version": _FORMAT_VERSION,
        "role": role,
        "dataset": dataset,
        "source": source_identity(config.dataset),
        "tokenizer": tokenizer_identity(config),
        "max_length": config.max_length,
        "response_only": config.response_only,
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:32]


def _open_store(folder: Path) -> TokenStore:
    return TokenStore(
        tokens=np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r"),
        counts=np.memmap(folder / "counts.bin", dtype=np.uint8, mode="r"),
        starts=np.load(folder / "starts.npy"),
        num_targets=np.load(folder / "num_targets.npy"),
    )


def _write_store(
    config: TrainConfig,
    role: Role,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    load: Callable[[str], Sequence[Row]],
) -> None:
    rows, chosen = _select_rows(config, role, load)
    draft = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    lengths: list[int] = []
    num_targets: list[int] = []
    with (draft / "tokens.bin").open("wb") as tokens_file, (draft / "counts.bin").open("wb") as counts_file:
        for tokens, counts in _tokenise(rows, chosen, config, tokenizer):
            if counts[1:].any():
                tokens_file.write(tokens.tobytes())
                counts_file.write(counts.tobytes())
                lengths.append(len(tokens))
                num_targets.append(int(counts[1:].sum()))
    _check_kept(len(lengths), len(chosen), config, role)
    np.save(draft / "starts.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(draft / "num_targets.npy", np.array(num_targets, dtype=np.int64))
    draft.rename(folder)


def _check_kept(num_kept: int, num_rows: int, config: TrainConfig, role: Role) -> None:
    if num_kept == 0:
        raise ValueError(
            f"dataset {config.dataset.path}: none of the {num_rows} {role} examples has a token to learn from within "
            f"max_length {config.max_length}; raise max_length or check the dataset"
        )
    if num_kept < num_rows:
        logger.warning(
            "%s: left out %d of %d %s examples: no token to learn from within max_length %d",
            config.dataset.path,
            num_rows - num_kept,
            num_rows,
            role,
            config.max_length,
        )


def _select_rows(
    config: TrainConfig, role: Role, load: Callable[[str], Sequence[Row]]
) -> tuple[Sequence[Row], NDArray[np.int64]]:
    # Rows of the hub stay on disk: only their numbers are chosen here.
    dataset = config.dataset
    if role == "eval" and dataset.eval_split is not None:
        rows = load(dataset.eval_split)
        return rows, np.arange(len(rows))
    rows = load(dataset.split)
    if dataset.eval_split is not None:
        return rows, np.arange(len(rows))[: dataset.limit]
    held_out = held_out_rows(len(rows))
    kept = np.setdiff1d(np.arange(len(rows)), held_out)[: dataset.limit]
    return rows, held_out if role == "eval" else kept


def held_out_rows(num_rows: int) -> NDArray[np.int64]:
    """Which rows of a training split are held out for evaluation: 5 %, at least 1 and at most 2000, seeded.

    Raises:
        ValueError: There are fewer than two rows.
    """
    if num_rows < 2:
        raise ValueError(f"the training split has {num_rows} examples; holding some out for evaluation needs two")
    num = min(max(round(HELD_OUT_FRACTION * num_rows), 1), HELD_OUT_MAX)
    return np.sort(np.random.default_rng(_HELD_OUT_SEED).permutation(num_rows)[:num])


def _tokenise(
    rows: Sequence[Row], chosen: NDArray[np.int64], config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.uint8]]]:
    stage = Stage(f"tokenises {len(chosen)} examples", len(chosen))
    for start in range(0, len(chosen), _ROWS_PER_TOKENIZER_CALL):
        indices = chosen[start : start + _ROWS_PER_TOKENIZER_CALL].tolist()
        rendered = [_render_numbered(rows[index], index, config, tokenizer) for index in indices]
        yield from encode(rendered, tokenizer, config.max_length, config.response_only)
        stage.reach(start + len(indices))


def _render_numbered(row: Row, index: int, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    wanted = config.dataset.format
    try:
        data_format = detect_format(row) if wanted == "auto" else wanted
        rendered = render(row, data_format, tokenizer, response_only=config.response_only)
        # Half of a surrogate pair, which JSON can hold and no tokenizer takes, is a ValueError here.
        rendered.text.encode()
    except ValueError as error:
        raise ValueError(f"dataset {config.dataset.path}, example {index}: {error}") from error
    return rendered


def encode(
    rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase, max_length: int, response_only: bool
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.uint8]]]:
    """Tokenises texts and closes each with the end-of-text token.

    Args:
        rendered: The texts; all have special tokens of their own, or none has.
        tokenizer: It must know character offsets when response_only is set.
        max_length: Tokens kept of each; a cut example has no end-of-text token.
        response_only: Count only what lies in a response.

    Yields:
        Token ids, and 1 for each that counts in the loss.
    """
    if response_only and not tokenizer.is_fast:
        raise ValueError("response_only needs a tokenizer that knows character offsets; set response_only to false")
    encoded = tokenizer(
        [example.text for example in rendered],
        add_special_tokens=not rendered[0].has_special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        verbose=False,
    )
    offsets = encoded["offset_mapping"] if response_only else [None] * len(rendered)
    for example, ids, places in zip(rendered, encoded["input_ids"], offsets, strict=True):
        tokens, counts = np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.uint8)
        if places is not None:
            counts = _in_responses(np.array(places, dtype=np.int64).reshape(-1, 2), example.responses)
        tokens, counts = _with_end(tokens, counts, example, tokenizer.eos_token_id, response_only)
        yield tokens[:max_length], counts[:max_length]


def _in_responses(places: NDArray[np.int64], responses: Iterable[tuple[int, int]]) -> NDArray[np.uint8]:
    # A token counts when it begins in a response; the special tokens a tokenizer adds have an empty range.
    counts = np.zeros(len(places), dtype=np.uint8)
    for start, end in responses:
        counts |= ((places[:, 0] >= start) & (places[:, 0] < end) & (places[:, 1] > places[:, 0])).astype(np.uint8)
    return counts


def _with_end(
    tokens: NDArray[np.uint32], counts: NDArray[np.uint8], example: Rendered, eos: int | None, response_only: bool
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    answered = bool(example.responses) and example.responses[-1][1] >= len(example.text.rstrip())
    end_counts = np.uint8(answered or not response_only)
    if eos is None:
        return tokens, counts
    # The tokenizer or the chat template may have put it there; a template may add a line break behind it.
    if eos in tokens[-2:]:
        place = len(tokens) - 1 - int(np.argmax(tokens[-2:][::-1] == eos))
        counts[place] |= end_counts
        return tokens, counts
    return np.append(tokens, np.uint32(eos)), np.append(counts, end_counts)
