"""Token cross entropy from hidden states, chunk by chunk, without ever holding the logits of all tokens.

The gradient of a chunk's logits follows at once from their softmax, so that no chunk is made twice.

Shapes: N tokens, C of them in a chunk, D features, V words of the vocabulary.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from trainables.batches import IGNORED
from trainables.memory import CHUNK_BYTES


def full_cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the targets, in float32, from all logits; zero where there are no targets."""
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    factor: float = 1.0,
    cap: float = 0.0,
) -> torch.Tensor:
    """What `full_cross_entropy` makes of the logits `factor * (hidden @ weight.T + bias)`, capped, in less memory.

    Args:
        hidden_ND: The last hidden states.
        weight_VD: Of the output head.
        bias_V: Of the output head, if it has one.
        targets_N: The word after each token, or IGNORED.
        factor: What the logits are multiplied by.
        cap: Logits become cap * tanh(logits / cap); 0: they stay.

    Returns:
        The sum of the losses, a float32 scalar. Its gradient can be asked for once.
    """
    if hidden_ND.device.type == "cpu":
        # On a CPU to look costs nothing; a GPU would have to be waited for.
        places = (targets_N != IGNORED).nonzero().squeeze(1)
        if len(places) < len(targets_N):
            hidden_ND, targets_N = hidden_ND.index_select(0, places), targets_N[places]
    if torch.is_autocast_enabled(hidden_ND.device.type):
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
    else:
        dtype = hidden_ND.dtype
    if hidden_ND.device.type == "cuda" and factor == 1 and _HAS_LIGER:
        return _liger_cross_entropy(hidden_ND.to(dtype), weight_VD.to(dtype), bias_V, targets_N, cap)
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, targets_N, dtype, factor, cap, torch.is_grad_enabled()
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunk by chunk: logits, loss, gradient of the logits, and from it that of hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        dtype: torch.dtype,
        factor: float,
        cap: float,
        has_grad: bool,
    ) -> torch.Tensor:
        inputs = (hidden_ND, weight_VD, bias_V)
        needs = [has_grad and need for need in ctx.needs_input_grad[:3]]
        grads = [_zeros(tensor) if need else None for tensor, need in zip(inputs, needs, strict=True)]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight_VD = weight_VD.to(dtype)
            loss = torch.zeros((), dtype=_exact(dtype), device=hidden_ND.device)
            for chunk in _chunks(len(hidden_ND), weight_VD):
                hidden_CD = hidden_ND[chunk].to(dtype)
                loss += _do_chunk(chunk, hidden_CD, weight_VD, bias_V, targets_N[chunk], factor, cap, grads)
        ctx.grads = grads
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        assert grads is not None, "the gradient of the loss can be asked for once"
        return *(None if grad is None else grad.mul_(grad_loss) for grad in grads), *[None] * 5


def _zeros(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor, dtype=_exact(tensor.dtype))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_tokens: int, weight_VD: torch.Tensor) -> list[slice]:
    limit = CHUNK_BYTES.get(weight_VD.device.type, CHUNK_BYTES["cuda"])
    longest = max(1, limit // (4 * len(weight_VD)))
    num = -(-num_tokens // longest)
    size = -(-num_tokens // max(num, 1))
    return [slice(start, start + size) for start in range(0, num_tokens, max(size, 1))]


def _loss_and_gradient(logits_CV: torch.Tensor, targets_C: torch.Tensor, factor: float, cap: float) -> torch.Tensor:
    """Returns the sum of the losses and leaves its gradient in the place of the logits."""
    if factor != 1:
        logits_CV.mul_(factor)
    slope_CV = None
    if cap:
        slope_CV = 1 - logits_CV.div_(cap).tanh_().square()
        logits_CV.mul_(cap)
    counts_C1 = (targets_C != IGNORED).unsqueeze(1)
    targets_C1 = targets_C.unsqueeze(1).clamp(min=0)
    chosen_C1 = logits_CV.gather(1, targets_C1)
    highest_C1 = logits_CV.amax(1, keepdim=True)
    total_C1 = logits_CV.sub_(highest_C1).exp_().sum(1, keepdim=True)
    loss = ((total_C1.log() + highest_C1 - chosen_C1) * counts_C1).sum()
    logits_CV.mul_(counts_C1 / total_C1)
    logits_CV.scatter_add_(1, targets_C1, -counts_C1.to(logits_CV.dtype))
    if slope_CV is not None:
        logits_CV.mul_(slope_CV)
    if factor != 1:
        logits_CV.mul_(factor)
    return loss


def _do_chunk(
    chunk: slice,
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_C: torch.Tensor,
    factor: float,
    cap: float,
    grads: list[torch.Tensor | None],
) -> torch.Tensor:
    # A function of its own, so that its logits are gone before those of the next chunk are made.
    dtype = hidden_CD.dtype
    logits_CV = F.linear(hidden_CD, weight_VD, None if bias_V is None else bias_V.to(dtype)).to(_exact(dtype))
    loss = _loss_and_gradient(logits_CV, targets_C, factor, cap)
    if any(grad is not None for grad in grads):
        _add_gradients(grads, chunk, logits_CV.to(dtype), hidden_CD, weight_VD)
    return loss


def _add_gradients(
    grads: list[torch.Tensor | None],
    chunk: slice,
    grad_logits_CV: torch.Tensor,
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
) -> None:
    grad_hidden_ND, grad_weight_VD, grad_bias_V = grads
    if grad_hidden_ND is not None:
        grad_hidden_ND[chunk] = grad_logits_CV @ weight_VD
    if grad_weight_VD is not None and grad_weight_VD.dtype == hidden_CD.dtype:
        grad_weight_VD.addmm_(grad_logits_CV.T, hidden_CD)
    elif grad_weight_VD is not None:
        grad_weight_VD += grad_logits_CV.T @ hidden_CD
    if grad_bias_V is not None:
        grad_bias_V += grad_logits_CV.sum(0)


_HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


def _liger_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", softcap=cap or None, accum_dtype=torch.float32
    )
    result: torch.Tensor = loss(weight_VD, hidden_ND, targets_N, bias_V)
    return result.float()
