"""Examples laid end to end in one row: no padding, and no token sees another example.

Positions restart with each example and attention stays within it. Where the model uses torch's attention (sdpa), ours
takes its place: the same kernel on the row's examples one by one, or on those of like length together, so that no
mask of row by row is ever made; on a GPU in half precision one kernel for sequences of unlike length. FlashAttention
is told where examples begin. For other kernels transformers makes a mask from the positions.

Whether a model can be packed is not read off its name: it is shown two short examples, in one row and apart.

Shapes: B rows, H heads, T positions of a row, D features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trainables.config import TrainConfig
from trainables.errors import is_out_of_memory
from trainables.parallel import Worker, least_over_ranks, reshard

IMPLEMENTATION = "packed_sdpa"
# Examples of a group are at least this long, as a share of its longest: less costs padding, more costs calls.
_MIN_FILL = 0.75
_PROBE_LENGTHS = (9, 4)


@dataclass(frozen=True)
class Packed:
    """Where the examples of one row lie.

    Attributes:
        lengths: Tokens of each, the longest first.
        starts: Where each begins and the last one ends (int32, on the row's device).
        positions_BT: Position of each token in its example.
    """

    lengths: tuple[int, ...]
    starts: torch.Tensor
    positions_BT: torch.Tensor

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model of transformers takes beside the tokens."""
        return {
            "position_ids": self.positions_BT,
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": self.lengths[0],
            "max_length_k": self.lengths[0],
        }


@dataclass(frozen=True)
class Group:
    """Examples that attention takes at once, each filled up to the longest.

    Attributes:
        num_tokens: Of all of them.
        count: How many.
        longest: Tokens of the longest.
        spread: For each place of the filled-up examples one of the group's tokens; None: none is filled up.
        gather: The places that hold a token of their own.
    """

    num_tokens: int
    count: int
    longest: int
    spread: torch.Tensor | None
    gather: torch.Tensor | None


def pack(lengths: Sequence[int], device: torch.device) -> Packed:
    """Lays examples of these lengths, the longest first, end to end."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    return Packed(tuple(lengths), to_device(starts, device), to_device(positions[None], device))


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lru_cache(maxsize=8)
def _groups(lengths: tuple[int, ...], device: torch.device) -> tuple[Group, ...]:
    """Neighbours of like length; asked for by every layer."""
    return tuple(_make_groups(lengths, device))


def _make_groups(lengths: Sequence[int], device: torch.device) -> Iterator[Group]:
    first = 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths) and lengths[end] >= _MIN_FILL * lengths[first]:
            continue
        members, longest = np.array(lengths[first:end])[:, None], lengths[first]
        spread = gather = None
        if members[-1] < longest:
            places, begins = np.arange(longest)[None], np.cumsum(members)[:, None] - members
            # Filled up with its last token; causal attention keeps that from all that is read.
            spread = torch.from_numpy((begins + np.minimum(places, members - 1)).ravel()).to(device)
            gather = torch.from_numpy(np.flatnonzero(places < members)).to(device)
        yield Group(int(members.sum()), len(members), longest, spread, gather)
        first = end


def packed_attention(
    module: nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention `sdpa` of transformers within each example of a row; as it is where there is one a row.

    Returns:
        The outputs, (B, T, H, D), and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    states = (query_BHTD, key_BHTD, value_BHTD)
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, *states, attention_mask, **options)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query_BHTD.dtype
    is_half = dtype in (torch.bfloat16, torch.float16)
    if query_BHTD.is_cuda and is_half and not options.get("dropout") and _has_varlen():
        states_in_half = tuple(state.to(dtype) for state in states)
        return _varlen(states_in_half, cu_seq_lens_q, max_length_q, options.get("scaling")), None
    return _by_groups(module, states, cu_seq_lens_q, options), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_groups(
    module: nn.Module, states_BHTD: tuple[torch.Tensor, ...], starts: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups = _groups(tuple(starts.diff().tolist()), starts.device)
    outputs = []
    parts_of = (torch.split(state, [group.num_tokens for group in groups], dim=2) for state in states_BHTD)
    for group, *parts in zip(groups, *parts_of, strict=True):
        query, key, value = (_spread(part, group) for part in parts)
        output, _ = sdpa_attention_forward(module, query, key, value, None, **options)
        output = output.flatten(0, 1)[None]
        outputs.append(output if group.gather is None else output.index_select(1, group.gather))
    return torch.cat(outputs, dim=1)


def _spread(part_BHTD: torch.Tensor, group: Group) -> torch.Tensor:
    """A group's examples, which lie in one row, as rows of their own."""
    part_HTD = part_BHTD[0] if group.spread is None else part_BHTD[0].index_select(1, group.spread)
    num_heads, _, num_features = part_HTD.shape
    return part_HTD.reshape(num_heads, group.count, group.longest, num_features).transpose(0, 1)


@lru_cache(maxsize=1)
def _has_varlen() -> bool:
    # Older versions of torch have no such kernel, or one that knows no grouped queries.
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= signature(varlen_attn).parameters.keys()


def _varlen(
    states_BHTD: tuple[torch.Tensor, ...], starts: torch.Tensor, longest: int, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (state[0].transpose(0, 1) for state in states_BHTD)
    output = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(output, torch.Tensor)
    return output[None]


# -- whether to pack --------------------------------------------------------------------------------------------


def set_packing(model: nn.Module, config: TrainConfig, worker: Worker) -> bool:
    """Prepares a model for rows of several examples, or for one example a row.

    Args:
        model: A causal language model of transformers, in one piece or sharded alike on all ranks.
        config: `packing`: auto packs where that is exact and saves more than it costs.
        worker: This rank.

    Returns:
        Whether examples are to be packed; the same on every rank.

    Raises:
        ValueError: `packing` is true and the model cannot be packed.
    """
    model_config: Any = model.config
    kernel = model_config._attn_implementation
    is_sdpa = kernel in ("sdpa", IMPLEMENTATION)
    is_ours = is_sdpa and config.packing is not False and _attends_to_all(model_config, config.max_length)
    if is_sdpa and kernel != (wanted := IMPLEMENTATION if is_ours else "sdpa"):
        _use(model, wanted)
    is_quick = (is_ours and not config.compile) or kernel.startswith("flash")
    if config.packing is False or (config.packing == "auto" and not is_quick):
        return False
    reason = _cannot_pack(model, config)
    can_be_packed = bool(least_over_ranks(int(not reason), worker))
    if config.packing is True and not can_be_packed:
        reason = reason or "not on another worker"
        raise ValueError(f"packing: {type(model).__name__} cannot be packed: {reason}; set packing to auto or false")
    return can_be_packed


def _use(model: Any, kernel: str) -> None:
    from transformers import AttentionInterface

    # No mask is registered with it: transformers then makes none.
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    model.set_attn_implementation(kernel)


def _attends_to_all(model_config: Any, max_length: int) -> bool:
    """Whether each token sees all before it, in examples up to this length: ours knows neither windows nor chunks."""
    text = model_config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    has_chunks = getattr(text, "attention_chunk_size", None) is not None
    return not has_chunks and kinds <= {"full_attention", "sliding_attention"} and (not window or window >= max_length)


_CANNOT: WeakKeyDictionary[nn.Module, dict[tuple[str, str], str]] = WeakKeyDictionary()


def _cannot_pack(model: Any, config: TrainConfig) -> str:
    known = _CANNOT.setdefault(model, {})
    key = (model.config._attn_implementation, config.precision)
    if key not in known:
        known[key] = _try_packing(model, config.precision == "bf16")
    return known[key]


@torch.no_grad()
def _try_packing(model: Any, is_bf16: bool) -> str:
    """Shows a model two examples in one row, with either of two first ones, and the second alone."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    first, second = _PROBE_LENGTHS
    row = torch.arange(first + second, device=device)[None] % 100
    other = torch.cat([row[:, :first].flip(1), row[:, first:]], dim=1)
    packed = pack(_PROBE_LENGTHS, device)
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
            # Not `model(...)`, which would be compiled for these.
            alone = model._call_impl(input_ids=row[:, first:]).logits.float()
            after, after_other = (
                model._call_impl(input_ids=tokens, **packed.inputs).logits[:, first:].float() for tokens in (row, other)
            )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        model.train(was_training)
        reshard(model)
    scale = alone.abs().max()
    if (after - after_other).abs().max() > (1e-3 if is_bf16 else 1e-5) * scale:
        return "its tokens see those of other examples in their row"
    return "" if (after - alone).abs().max() <= (3e-2 if is_bf16 else 1e-3) * scale else "an example depends on its row"
