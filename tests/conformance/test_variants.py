"""The model's options against models of `transformers` that have them: logits and every gradient, 1e-5.

Weights are random. The test has its own mapping of each model's weights, used for values and gradients alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from mega_ckpt.name_maps.qkv import qkv_order
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.runtime import Runtime
from mega_schema.spec import ModelSpec, gpt, llama

WORDS, LENGTH = 61, 24
OURS = {"layers": 2, "hidden": 32, "heads": 4, "vocab": WORDS, "max_seq_len": LENGTH, "vocab_multiple": 1}
WIDE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Get = Callable[[str], Tensor]
Names = Callable[[ModelSpec, Get], Iterator[tuple[str, Tensor]]]


def _pair(ours: str, theirs: str, get: Get, *, bias: bool) -> Iterator[tuple[str, Tensor]]:
    yield ours + ".weight", get(theirs + ".weight")
    if bias:
        yield ours + ".bias", get(theirs + ".bias")


def _llama(m: ModelSpec, get: Get) -> Iterator[tuple[str, Tensor]]:
    yield "embed.weight", get("model.embed_tokens.weight")
    for i in range(m.layers):
        us, foreign = f"layers.{i}.", f"model.layers.{i}."
        normed = m.norm == "layernorm"
        yield from _pair(us + "attn_norm", foreign + "input_layernorm", get, bias=normed)
        for kind in ("weight", "bias") if m.qkv_bias else ("weight",):
            parts = [get(f"{foreign}self_attn.{part}_proj.{kind}") for part in "qkv"]
            yield f"{us}qkv.{kind}", torch.cat(parts)
        if m.qk_norm:
            yield us + "q_norm.weight", get(foreign + "self_attn.q_norm.weight")
            yield us + "k_norm.weight", get(foreign + "self_attn.k_norm.weight")
        yield us + "out.weight", get(foreign + "self_attn.o_proj.weight")
        yield from _pair(us + "ffn_norm", foreign + "post_attention_layernorm", get, bias=normed)
        if m.is_gated:
            parts = [get(f"{foreign}mlp.{part}_proj.weight") for part in ("gate", "up")]
            yield us + "gate_up.weight", torch.cat(parts)
        else:
            yield us + "up.weight", get(foreign + "mlp.up_proj.weight")
        yield us + "down.weight", get(foreign + "mlp.down_proj.weight")
    yield from _pair("final_norm", "model.norm", get, bias=m.norm == "layernorm")
    if not m.tied:
        yield "head.weight", get("lm_head.weight")


def _gpt2(m: ModelSpec, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Linears of OpenAI's are (in, out)."""
    yield "embed.weight", get("transformer.wte.weight")
    yield "position.weight", get("transformer.wpe.weight")
    linears = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for i in range(m.layers):
        us, foreign = f"layers.{i}.", f"transformer.h.{i}."
        yield from _pair(us + "attn_norm", foreign + "ln_1", get, bias=True)
        yield from _pair(us + "ffn_norm", foreign + "ln_2", get, bias=True)
        for ours, theirs in linears.items():
            for name, values in _pair(us + ours, foreign + theirs, get, bias=True):
                yield name, values.T if values.ndim == 2 else values
    yield from _pair("final_norm", "transformer.ln_f", get, bias=True)


def _megatron(prefix: str, attention: str, embedding: str, final: str, head: str) -> Names:
    """Names of Megatron's own, as BLOOM and GPT-NeoX keep them: q, k and v of one head after another."""

    def names(m: ModelSpec, get: Get) -> Iterator[tuple[str, Tensor]]:
        order = list(qkv_order(m))
        yield "embed.weight", get(embedding + ".weight")
        if m.embed_norm:
            yield from _pair("embed_norm", embedding + "_layernorm", get, bias=True)
        for i in range(m.layers):
            us, foreign = f"layers.{i}.", f"{prefix}.{i}."
            yield from _pair(us + "attn_norm", foreign + "input_layernorm", get, bias=True)
            for name, rows in _pair(us + "qkv", f"{foreign}{attention}.query_key_value", get, bias=True):
                yield name, rows[order]
            yield from _pair(us + "out", f"{foreign}{attention}.dense", get, bias=True)
            yield from _pair(us + "ffn_norm", foreign + "post_attention_layernorm", get, bias=True)
            yield from _pair(us + "up", foreign + "mlp.dense_h_to_4h", get, bias=True)
            yield from _pair(us + "down", foreign + "mlp.dense_4h_to_h", get, bias=True)
        yield from _pair("final_norm", final, get, bias=True)
        if not m.tied:
            yield "head.weight", get(head + ".weight")

    return names


_bloom = _megatron(
    "transformer.h", "self_attention", "transformer.word_embeddings", "transformer.ln_f", "lm_head"
)
_neox = _megatron("gpt_neox.layers", "attention", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "lm_head")


@dataclass(frozen=True)
class Case:
    """A model of theirs, the same in our words, and how the weights of the one lie in the other."""

    config: Callable[[], Any]
    spec: ModelSpec
    names: Names = _llama


def _like_llama(**options: Any) -> ModelSpec:
    return llama(**OURS, **{"ffn": 40, "kv_heads": 2, "norm_eps": 1e-6, **options})


def _of_bloom(**options: Any) -> Any:
    return transformers.BloomConfig(
        vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, **options, **NONE
    )


CASES: dict[str, Case] = {
    "gpt-2": Case(
        lambda: transformers.GPT2Config(
            vocab_size=WORDS,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **NONE,
        ),
        gpt(**OURS),
        _gpt2,
    ),
    "llama": Case(lambda: transformers.LlamaConfig(**WIDE, **NONE), _like_llama()),
    "scaled rotary positions of llama 3.1": Case(
        lambda: transformers.LlamaConfig(**WIDE, **NONE, rope_parameters=SCALED),
        _like_llama(rope_scaling=8.0, rope_scaling_context=64),
    ),
    "interpolated rotary positions": Case(
        lambda: transformers.LlamaConfig(
            **WIDE, **NONE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        ),
        _like_llama(rope_interpolation=4.0),
    ),
    "sliding window of mistral": Case(
        lambda: transformers.MistralConfig(**WIDE, **NONE, sliding_window=5), _like_llama(sliding_window=5)
    ),
    "biases of queries, keys and values of qwen 2": Case(
        lambda: transformers.Qwen2Config(**WIDE, **NONE), _like_llama(qkv_bias=True)
    ),
    "head norms of qwen 3": Case(
        lambda: transformers.Qwen3Config(**WIDE, **NONE, head_dim=8), _like_llama(qk_norm=True)
    ),
    "alibi and a normed embedding of bloom": Case(
        _of_bloom, gpt(**OURS, positions="alibi", embed_norm=True), _bloom
    ),
    "residuals after the norm of bloom": Case(
        lambda: _of_bloom(apply_residual_connection_post_layernorm=True),
        gpt(**OURS, positions="alibi", embed_norm=True, post_norm_residual=True),
        _bloom,
    ),
    "a share of rotary components of gpt-neox": Case(
        lambda: transformers.GPTNeoXConfig(
            **{key: value for key, value in WIDE.items() if key != "num_key_value_heads"},
            **NONE,
            use_parallel_residual=False,
            rotary_pct=0.5,
        ),
        gpt(**OURS, ffn=40, positions="rope", rotary_fraction=0.5, activation="gelu_erf", tied=False),
        _neox,
    ),
    "two branches beside each other of pythia": Case(
        lambda: transformers.GPTNeoXConfig(
            **{key: value for key, value in WIDE.items() if key != "num_key_value_heads"},
            **NONE,
            use_parallel_residual=True,
        ),
        gpt(
            **OURS,
            ffn=40,
            positions="rope",
            rotary_fraction=0.25,
            activation="gelu_erf",
            parallel_residual=True,
            tied=False,
        ),
        _neox,
    ),
    "norms of 1 + weight and squared relu of nemotron": Case(
        lambda: transformers.NemotronConfig(**WIDE, **NONE, partial_rotary_factor=0.5, norm_eps=1e-5),
        gpt(
            **OURS,
            ffn=40,
            kv_heads=2,
            norm_1p=True,
            activation="squared_relu",
            positions="rope",
            rotary_fraction=0.5,
            bias=False,
            qkv_bias=False,
            tied=False,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(case.config(), attn_implementation="eager").train()
    for weight in theirs.parameters():  # norms of ones and biases of zeros would hide an exchange
        torch.nn.init.normal_(weight, mean=0.1, std=0.2)
    found = dict(theirs.named_parameters())
    model = build_model(Runtime.single_process(case.spec))
    values = dict(case.names(case.spec, lambda key: found[key].detach()))
    assert sum(tensor.numel() for tensor in values.values()) == theirs.num_parameters()
    fill_weights(model, lambda key, slab: values[key][slab.in_global])
    token_BS = torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    wanted = theirs(token_BS).logits
    place_T = torch.arange(LENGTH).repeat(3)
    logits = model(token_BS.flatten(), place_T, PackedAttention(3, LENGTH)).unflatten(0, (3, LENGTH))
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    for scores in (wanted, logits):
        F.cross_entropy(scores[:, :-1].flatten(0, 1), token_BS[:, 1:].flatten()).backward()
    gradients = dict(case.names(case.spec, lambda key: _gradient(found[key])))
    ours = dict(model.named_parameters())
    assert ours.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            ours[key].grad, gradient, atol=1e-5, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad
