"""Tensor names of Hugging Face's classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mega_ckpt.formats.huggingface.config_json import class_of
from mega_ckpt.formats.huggingface.t5_names import t5_aliases
from mega_ckpt.name_maps.alias import TensorAlias
from mega_ckpt.name_maps.qkv import qkv_order
from mega_schema.arch import table
from mega_schema.spec import ModelSpec
from mega_schema.task_heads import HEAD

NameParts = str | tuple[str, ...]
"""A name, or the names of the blocks of a fused weight."""


@dataclass(frozen=True, slots=True)
class HfNames:
    """The tensor names of one class.

    Attributes:
        inner: prefix of every name but the head's; absent if only the inner model was saved.
        layers: name of the list of layers in the inner model.
        whole: names outside the layers.
        layer: names inside a layer.
        outer: names outside the inner model, by a parameter's name or without its last part.
        norms_after: names of the norm of the embeddings and of the norm at the end of a layer, in a model
            whose norms follow the sums: Mega's are the ones before the next layer, and the last.
        head: name of an untied output matrix.
        other_head: its name in transformers 5.
        transposed: linear layers stored as OpenAI's Conv1D: (in, out).
        by_head: rows of the fused weight are q, k and v per head, as in Megatron.
    """

    inner: str
    layers: str
    whole: Mapping[str, str]
    layer: Mapping[str, NameParts]
    outer: Mapping[str, str] = field(default_factory=dict)
    norms_after: tuple[str, str] | None = None
    head: str = "lm_head"
    other_head: str | None = None
    transposed: frozenset[str] = frozenset()
    by_head: bool = False


# buffers in files of some versions: masks and angles, which are computed
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
    "embeddings.position_ids",
    "EncDecAttention.relative_attention_bias.weight",  # of T5's first files; no version reads it
)

_GPT2 = HfNames(
    "transformer.",
    "h",
    {"embed": "wte", "position": "wpe", "final_norm": "ln_f"},
    {
        "attn_norm": "ln_1",
        "qkv": "attn.c_attn",  # q, k and v are three runs, as in Mega
        "out": "attn.c_proj",
        "ffn_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    transposed=frozenset({"qkv", "out", "up", "down"}),
)
# rotary pairs are (i, i + half a head) too, so the row order is the same
_LLAMA = HfNames(
    "model.",
    "layers",
    {"embed": "embed_tokens", "final_norm": "norm"},
    {
        "attn_norm": "input_layernorm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "out": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": "mlp.down_proj",
    },
)
_BLOOM = HfNames(
    "transformer.",
    "h",
    {"embed": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "final_norm": "ln_f"},
    {
        "attn_norm": "input_layernorm",
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    by_head=True,
)
_NEOX = HfNames(
    "gpt_neox.",
    "layers",
    {"embed": "embed_in", "final_norm": "final_layer_norm"},
    {
        "attn_norm": "input_layernorm",
        "qkv": "attention.query_key_value",
        "out": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    head="embed_out",
    other_head="lm_head",
    by_head=True,
)
_BERT_EMBEDDINGS: Mapping[str, str] = MappingProxyType(
    {
        "embed": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "token_type": "embeddings.token_type_embeddings",
        "pooler": "pooler.dense",
    }
)
_BERT_LAYER: Mapping[str, NameParts] = MappingProxyType(
    {
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "out": "attention.output.dense",
        "up": "intermediate.dense",
        "down": "output.dense",
    }
)
_BERT_HEADS: Mapping[str, str] = MappingProxyType(
    {
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.bias": "cls.predictions",
        "binary_head": "cls.seq_relationship",
    }
)
_TASK_HEADS: Mapping[str, str] = MappingProxyType({"span": "qa_outputs"})  # others: classifier
_BERT = HfNames(
    "bert.",
    "encoder.layer",
    _BERT_EMBEDDINGS,
    {**_BERT_LAYER, "ffn_norm": "attention.output.LayerNorm"},
    outer=_BERT_HEADS,
    norms_after=("embeddings.LayerNorm", "output.LayerNorm"),
    head="cls.predictions.decoder",
)
_MEGATRON_BERT = HfNames(
    "bert.",
    "encoder.layer",
    {**_BERT_EMBEDDINGS, "final_norm": "encoder.ln"},
    {**_BERT_LAYER, "attn_norm": "attention.ln", "ffn_norm": "ln"},
    outer=_BERT_HEADS,
    head="cls.predictions.decoder",
)
# Wqkv and Wi are runs of rows as in Mega: queries, keys and values; the activated rows, and their factor
_MODERN_BERT = HfNames(
    "model.",
    "layers",
    {"embed": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"},
    {
        "attn_norm": "attn_norm",
        "qkv": "attn.Wqkv",
        "out": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "gate_up": "mlp.Wi",
        "down": "mlp.Wo",
    },
    outer={"head.dense": "head.dense", "head.norm": "head.norm", "head.bias": "decoder"},
    head="decoder",
)
_T5 = HfNames("", "", {"embed": "shared"}, {})  # the others are in `t5_names`
_NAMES: Mapping[str, HfNames] = MappingProxyType(
    {"gpt2": _GPT2, "bloom": _BLOOM, "gpt_neox": _NEOX}
    | {"bert": _BERT, "megatron-bert": _MEGATRON_BERT, "modernbert": _MODERN_BERT}
    | dict.fromkeys(("t5", "umt5"), _T5)
    | dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA)
)


def names_of(spec: ModelSpec) -> HfNames:
    """Return the tensor names of the class that supports the model.

    Raises:
        ConfigError: there is no such class.
    """
    return _NAMES[class_of(spec, "the checkpoint").model_type]


def aliases(spec: ModelSpec) -> list[TensorAlias]:
    """Return every tensor of the model under Hugging Face's names; a tied head has none.

    Raises:
        ConfigError: no class supports every feature of the model.
    """
    names = names_of(spec)
    return list(t5_aliases(spec) if names is _T5 else _aliases(spec, names))


def _aliases(spec: ModelSpec, names: HfNames) -> Iterator[TensorAlias]:
    order = qkv_order(spec) if names.by_head else None
    for row in table(spec):
        if row.tied_to is not None:
            continue
        foreign: NameParts
        module, _, kind = row.name.rpartition(".")
        part = module.rpartition(".")[2]
        outer = names.outer.get(row.name, names.outer.get(module))
        if module == HEAD:
            outer = _TASK_HEADS.get(spec.task_head, "classifier")
        if outer is not None:
            before, foreign = "", outer
        elif names.norms_after is not None and part in ("attn_norm", "final_norm"):
            number = int(module.split(".")[1]) if part == "attn_norm" else spec.layers
            before = names.inner
            embeddings, layer_end = names.norms_after
            foreign = f"{names.layers}.{number - 1}.{layer_end}" if number else embeddings
        elif module.startswith("layers."):
            foreign = names.layer[part]
            before = f"{names.inner}{names.layers}.{module.split('.')[1]}."
        elif module == "head":
            before = ""
            foreign = names.head
        else:
            before = names.inner
            foreign = names.whole[module]
        transposed = part in names.transposed and kind == "weight"
        if isinstance(foreign, tuple):
            for block, name in enumerate(foreign):
                yield TensorAlias(f"{before}{name}.{kind}", row.name, block)
        else:
            rows = order if part == "qkv" else None
            yield TensorAlias(f"{before}{foreign}.{kind}", row.name, transpose=transposed, order=rows)
