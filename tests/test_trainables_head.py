"""The loss head: what full logits give, in loss and gradients, without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.benchmarks.head import Head, peak_bytes
from tests.tiny import CPU
from trainables import cross_entropy
from trainables.batches import IGNORED
from trainables.cross_entropy import full_cross_entropy, linear_cross_entropy
from trainables.head import add_token_loss

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2 tied": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": SMALL | {"model_type": "llama"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 97},
    "phi, with a bias": SMALL | {"model_type": "phi"},
    "gemma2, capped": SMALL | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.3},
    "cohere, scaled": SMALL | {"model_type": "cohere", "logit_scale": 0.3, "eos_token_id": 1},
    "granite, scaled": SMALL | {"model_type": "granite", "logits_scaling": 4.0},
}
Gradients = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 7 * 97 * 4)


def build(architecture: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(**architecture)
    )
    return model.eval()


def with_gradients(loss: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
    return loss.detach(), torch.autograd.grad(3 * loss, tensors, allow_unused=True)


def full(tensors: list[torch.Tensor], targets_N: torch.Tensor, factor: float, cap: float) -> torch.Tensor:
    logits_NV = F.linear(tensors[0], *tensors[1:]) * factor
    logits_NV = cap * torch.tanh(logits_NV / cap) if cap else logits_NV
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("num_tokens", [0, 1, 23])
@pytest.mark.parametrize(("factor", "cap"), [(1.0, 0.0), (0.3, 0.0), (2.0, 5.0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_loss_and_gradients_are_those_of_full_logits(
    num_tokens: int, factor: float, cap: float, has_bias: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(num_tokens, 8), (97, 8), *([(97,)] if has_bias else [])]
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    targets_N = torch.randint(0, 97, (num_tokens,))
    targets_N[3:6] = IGNORED
    hidden_ND, weight_VD, bias_V = (*tensors, None)[:3]
    assert hidden_ND is not None
    assert weight_VD is not None
    loss = linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N, factor, cap)
    expected = full(tensors, targets_N, factor, cap)
    with torch.no_grad():
        alone = linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N, factor, cap)
    torch.testing.assert_close(alone, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(with_gradients(loss, tensors), with_gradients(expected, tensors), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_returns_the_loss_of_its_own_logits(name: str) -> None:
    model = build(ARCHITECTURES[name])
    names, kind = list(model.state_dict()), type(model)
    assert add_token_loss(model, CPU.device, is_bf16=False) == ""
    assert (list(model.state_dict()), type(model).__name__) == (names, kind.__name__)
    tokens_BT, targets_BT = torch.randint(0, 97, (2, 3, 11))
    targets_BT[0, :4] = IGNORED
    weights = list(model.parameters())
    expected = full_cross_entropy(model(input_ids=tokens_BT).logits.flatten(0, 1), targets_BT.flatten())
    loss = model(input_ids=tokens_BT, targets_BT=targets_BT)
    torch.testing.assert_close(with_gradients(loss, weights), with_gradients(expected, weights), rtol=1e-4, atol=2e-5)


def test_a_model_whose_logits_are_made_in_another_way_keeps_making_them(caplog: pytest.LogCaptureFixture) -> None:
    model = build(ARCHITECTURES["llama"])

    class Shifted(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **inputs: Any) -> Any:
            outputs = super().forward(*args, **inputs)
            outputs.logits = outputs.logits.roll(1, -1)
            return outputs

    model.__class__ = Shifted
    assert "in a way that is not known here" in add_token_loss(model, CPU.device, is_bf16=False)
    assert "Shifted makes the logits of all tokens at once" in caplog.text
    tokens_BT = torch.randint(0, 97, (3, 11))
    logits = model(input_ids=tokens_BT).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens_BT.flatten(), reduction="sum")
    torch.testing.assert_close(model(input_ids=tokens_BT, targets_BT=tokens_BT), expected)


def half_precision_attention(module: nn.Module, query: torch.Tensor, *others: Any, **options: Any) -> Any:
    """Attention that takes what FlashAttention takes, behind the casts of transformers."""
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = get_target_dtype(query, module) or query.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    key, value, mask = others
    return sdpa_attention_forward(module, query.to(dtype), key.to(dtype), value.to(dtype), mask, **options)


def test_a_model_whose_attention_takes_half_precision_alone_makes_no_logits() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("half_precision", half_precision_attention)
    model: Any = build(ARCHITECTURES["llama"])
    model.set_attn_implementation("half_precision")
    assert add_token_loss(model, CPU.device, is_bf16=True) == ""
    assert not model.keeps_logits


def test_a_head_with_an_adapter_is_not_passed_over() -> None:
    model: Any = build(ARCHITECTURES["llama"])
    add_token_loss(model, CPU.device, is_bf16=False)
    plain = model.lm_head
    model.lm_head = nn.Sequential(plain, nn.Linear(97, 97))
    tokens_BT = torch.randint(0, 97, (3, 11))
    expected = F.cross_entropy(model(input_ids=tokens_BT).logits.flatten(0, 1), tokens_BT.flatten(), reduction="sum")
    torch.testing.assert_close(model(input_ids=tokens_BT, targets_BT=tokens_BT), expected)


def test_in_bfloat16_it_is_as_near_to_the_truth_as_full_logits() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(64, 32, requires_grad=True), torch.randn(97, 32, requires_grad=True)]
    targets_N = torch.randint(0, 97, (64,))
    exact = with_gradients(full([tensor.double() for tensor in tensors], targets_N, 1.0, 0.0), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_gradients(linear_cross_entropy(*tensors, None, targets_N), tensors)
        theirs = with_gradients(full_cross_entropy(F.linear(*tensors), targets_N), tensors)
    assert {gradient.dtype for gradient in ours[1]} == {torch.float32}
    for one, other, truth in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), (exact[0], *exact[1]), strict=True):
        assert (one - truth).norm() <= 1.1 * (other - truth).norm() + 1e-3 * truth.norm()


def test_gradients_are_made_only_where_they_are_asked_for() -> None:
    hidden_ND, weight_VD = torch.randn(20, 8, requires_grad=True), torch.randn(97, 8)
    loss = linear_cross_entropy(hidden_ND, weight_VD, None, torch.randint(0, 97, (20,)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight_VD.grad is None
    with pytest.raises(AssertionError, match="can be asked for once"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_the_logits_of_all_tokens_are_never_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 1 << 20)
    measured = Head(num_tokens=256, num_features=8, vocabulary=20_000)
    full_bytes = 256 * 20_000 * 4
    with torch.no_grad():
        assert peak_bytes(lambda: measured.loss("ours")) < full_bytes / 8
    assert peak_bytes(lambda: measured.run("ours")) < full_bytes / 4
    assert peak_bytes(lambda: measured.run("full")) > full_bytes
