"""The loss inside the model: token cross entropy from hidden states, without ever holding the logits of all tokens.

`add_token_loss` teaches a causal language model to answer `model(input_ids=..., targets_BT=...)` with the sum
of its token losses. It happens inside the model's own forward, so that whatever wraps the model (DDP, FSDP, compile)
sees it, and no parameter changes its name.

Shapes: B examples, T positions, N = B * T tokens, D features, V words of the vocabulary.
"""

from __future__ import annotations

import logging
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainables.cross_entropy import full_cross_entropy, linear_cross_entropy
from trainables.errors import is_out_of_memory

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 5
# Both ways round alike; a factor or a cap that was overlooked is far beyond this.
_PROBE_TOLERANCE = 2e-2


def add_token_loss(model: nn.Module, device: torch.device, *, is_bf16: bool) -> str:
    """Has a causal language model of transformers return the summed loss where it is given `targets_BT`.

    What the model does behind its output head (a factor, soft capping) is read from its config, and compared with the
    model's own logits of a few tokens. A model that differs keeps making logits, all at once.

    Args:
        model: With its weights; peft's wrapper may be around it.
        device: Where it computes, which is not always where its weights are.
        is_bf16: It will run under autocast: some attention kernels take nothing but half precision.

    Returns:
        Why the model makes all logits at once; empty where it does not.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    plain: Any = type(inner)
    head = inner.get_output_embeddings()
    inner.__class__ = _class_with_loss(plain)
    reason = _unsuitable(inner, head)
    if not reason:
        head.__class__ = type("LossHead", (_LossHead, type(head)), {})
        head.factor, head.cap = _factor(inner.config), _cap(inner.config)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
            reason = _differs(model, device)
    inner.keeps_logits = bool(reason)
    if reason:
        logger.warning("%s makes the logits of all tokens at once: %s", plain.__name__, reason)
    return reason


@lru_cache(maxsize=8)
def _class_with_loss(plain: Any) -> type:
    """A model class whose `forward` knows `targets_BT`; what saves or inspects a model sees the plain one."""

    @wraps(plain.forward)
    def forward(
        self: Any, *args: Any, targets_BT: torch.Tensor | None = None, only_body: bool = False, **inputs: Any
    ) -> Any:
        head = self.get_output_embeddings()
        if only_body:
            return head.logits(self.base_model(*args, **inputs).last_hidden_state)
        if targets_BT is None:
            return plain.forward(self, *args, **inputs)
        # An adapter on the head would be passed over.
        if self.keeps_logits or not isinstance(head, _LossHead):
            logits_BTV = plain.forward(self, *args, **inputs).logits
            return full_cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        hidden_BTD = self.base_model(*args, **inputs).last_hidden_state
        return head(hidden_BTD.flatten(0, 1), targets_BT.flatten())

    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": forward})


class _LossHead(nn.Linear):
    """An output head that returns the loss where it is given targets: called, not looked into, so that hooks run."""

    factor: float
    cap: float

    def forward(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor | None = None) -> torch.Tensor:
        if targets_N is None:
            return F.linear(hidden_ND, self.weight, self.bias)
        loss: torch.Tensor = linear_cross_entropy(hidden_ND, self.weight, self.bias, targets_N, self.factor, self.cap)
        return loss

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the loss takes for the model's logits."""
        logits: torch.Tensor = self(hidden) * self.factor
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


# -- what a model does behind its head --------------------------------------------------------------------------


def _factor(config: Any) -> float:
    config = config.get_text_config()
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None):
            return float(getattr(config, name))
    return 1 / float(getattr(config, "logits_scaling", None) or 1)


def _cap(config: Any) -> float:
    config = config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return float(next((value for name in names if (value := getattr(config, name, None))), 0))


def _unsuitable(model: Any, head: Any) -> str:
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        return "its output head is not a plain linear layer"
    if model.base_model is model:
        return "its body cannot be called without its head"
    return "its weights are not there yet" if head.weight.is_meta else ""


@torch.no_grad()
def _differs(model: Any, device: torch.device) -> str:
    """What distinguishes the model's logits from the head's; a model that has been shown a few tokens is as before."""
    tokens_BT = torch.arange(_PROBE_TOKENS, device=device)[None]
    was_training = model.training
    model.eval()
    try:
        expected = model(input_ids=tokens_BT).logits.float()
        found = model(input_ids=tokens_BT, only_body=True).float()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return f"its body alone does not give hidden states ({type(error).__name__})"
    finally:
        model.train(was_training)
    tolerance = _PROBE_TOLERANCE * expected.abs().max()
    is_equal = expected.shape == found.shape and bool((expected - found).abs().max() <= tolerance)
    return "" if is_equal else "it changes them behind its output head in a way that is not known here"
