"""Hugging Face's GPT2LMHeadModel and LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mega_ckpt.layouts import Alias
from mega_schema.spec import ModelSpec

_GPT2: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "ln_1",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "ffn_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
)
_NORMS = ("attn_norm", "ffn_norm")


def aliases(spec: ModelSpec) -> list[Alias]:
    """Every tensor of the model in Hugging Face's names; a tied head has none of its own."""
    return list({"gpt": gpt2, "llama": llama}[spec.family](spec))


def gpt2(spec: ModelSpec) -> Iterator[Alias]:
    """Linears are OpenAI's Conv1D there: (in, out), the transpose of ours. Q|K|V are three runs, as here."""
    yield Alias("transformer.wte.weight", "embed.weight")
    yield Alias("transformer.wpe.weight", "position.weight")
    for i in range(spec.layers):
        for us, them in _GPT2.items():
            hf, ours = f"transformer.h.{i}.{them}.", f"layers.{i}.{us}."
            yield Alias(hf + "weight", ours + "weight", transpose=us not in _NORMS)
            yield Alias(hf + "bias", ours + "bias")
    yield Alias("transformer.ln_f.weight", "final_norm.weight")
    yield Alias("transformer.ln_f.bias", "final_norm.bias")
    if not spec.tied:
        yield Alias("lm_head.weight", "head.weight")


def llama(spec: ModelSpec) -> Iterator[Alias]:
    """Rotary pairs are (i, i + half a head) there too, so no row moves."""
    yield Alias("model.embed_tokens.weight", "embed.weight")
    for i in range(spec.layers):
        hf, us = f"model.layers.{i}.", f"layers.{i}."
        yield Alias(hf + "input_layernorm.weight", us + "attn_norm.weight")
        for block, part in enumerate(("q_proj", "k_proj", "v_proj")):
            yield Alias(hf + f"self_attn.{part}.weight", us + "qkv.weight", block)
        yield Alias(hf + "self_attn.o_proj.weight", us + "out.weight")
        yield Alias(hf + "post_attention_layernorm.weight", us + "ffn_norm.weight")
        for block, part in enumerate(("gate_proj", "up_proj")):
            yield Alias(hf + f"mlp.{part}.weight", us + "gate_up.weight", block)
        yield Alias(hf + "mlp.down_proj.weight", us + "down.weight")
    yield Alias("model.norm.weight", "final_norm.weight")
    if not spec.tied:
        yield Alias("lm_head.weight", "head.weight")
