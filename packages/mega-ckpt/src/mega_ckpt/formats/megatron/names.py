"""Megatron-LM's tensor names for GPT, BERT and T5 models in every release, nested keys joined with dots.

The legacy class: "transformer" and "attention" became "encoder" and "self_attention" in 2021, and
"input_layernorm" became "input_norm" after release 23.08. The core class (since 0.5) has other names, and
TransformerEngine's linear layers contain the norm before them. A rank numbers its layers from 0; of T5 those
of the encoder and those of the decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from mega_ckpt.name_maps.alias import ForeignTensor, TensorAlias
from mega_ckpt.name_maps.qkv import qkv_order
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Layout
from mega_schema.params import Param
from mega_schema.spec import ModelSpec

# part of a parameter's name, or the whole -> Megatron's, in module order: an optimizer numbers them by it
Names = Mapping[str, str]
COPY = "copy"  # copy of a tied embedding on the last pipeline stage
_DECODER = "decoder."  # begins the part names of a T5's decoder


def _names(layer: str, parts: Mapping[str, str], others: Mapping[str, str]) -> Names:
    of_layer = {part: f"{layer}.layers.{{layer}}.{name}.{{kind}}" for part, name in parts.items()}
    begin: dict[str, str] = {}
    end: dict[str, str] = {}
    for part, name in others.items():
        (begin if part in ("embed", "embed_norm", "position", "token_type") else end)[part] = name + ".{kind}"
    return MappingProxyType(begin | of_layer | end)


def _legacy(encoder: str = "encoder", attention: str = "self_attention", norm: str = "layernorm") -> Names:
    top = "language_model."
    decoder = {
        "attn_norm": f"input_{norm}",
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "cross.norm": f"post_attention_{norm}",
        "cross.q": "inter_attention.query",
        "cross.kv": "inter_attention.key_value",
        "cross.out": "inter_attention.dense",
        "ffn_norm": f"post_inter_attention_{norm}",
        "up": "mlp.dense_h_to_4h",
        "gate_up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    names = _names(
        top + encoder,
        {
            "attn_norm": f"input_{norm}",
            "qkv": f"{attention}.query_key_value",
            "out": f"{attention}.dense",
            "ffn_norm": f"post_attention_{norm}",
            "up": "mlp.dense_h_to_4h",
            "gate_up": "mlp.dense_h_to_4h",  # gate first, as in Mega
            "down": "mlp.dense_4h_to_h",
        },
        {
            "embed": top + "embedding.word_embeddings",
            "embed_norm": top + "embedding.word_embeddings.norm",  # BigScience's
            "position": top + "embedding.position_embeddings",
            "token_type": top + "embedding.tokentype_embeddings",
            "encoder_norm": f"{top}{encoder}.final_{norm}",
            "final_norm": f"{top}{encoder}.final_{norm}",
            "pooler": top + "pooler.dense",
            "head": top + "output_layer",
            "head.bias": "lm_head",
            "head.dense": "lm_head.dense",
            "head.norm": f"lm_head.{norm}",
            "binary_head": "binary_head",
            "copy": "word_embeddings_for_head",
        },
    )
    of_decoder = {
        _DECODER + part: f"{top}decoder.layers.{{layer}}.{name}.{{kind}}" for part, name in decoder.items()
    }
    of_decoder[_DECODER + "final_norm"] = f"{top}decoder.final_{norm}.{{kind}}"
    return MappingProxyType(_insert_before("pooler", names, of_decoder))


def _insert_before(part: str, names: Names, others: Names) -> dict[str, str]:
    """Insert names before another one: the order is that of the modules."""
    begin = [*names].index(part)
    items = [*names.items()]
    return dict([*items[:begin], *others.items(), *items[begin:]])


def _core(
    attn_norm: str = "input_layernorm.", ffn_norm: str = "pre_mlp_layernorm.", block: str = "decoder"
) -> Names:
    heads = {"head": "output_layer", "copy": "output_layer"}
    if block == "encoder":  # of a BERT, the bias of whose head is that of the output layer
        heads = {
            "token_type": "embedding.tokentype_embeddings",
            "head.dense": "lm_head.dense",
            "head.norm": "lm_head.layer_norm",
            "copy": "output_layer",
            "head": "output_layer",
            "binary_head": "binary_head",
            "pooler": "pooler.dense",
        }
    names = _names(
        block,
        {
            "attn_norm": "input_layernorm",
            "out": "self_attention.linear_proj",
            "qkv": "self_attention.linear_qkv",
            "q_norm": "self_attention.q_layernorm",
            "k_norm": "self_attention.k_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "up": "mlp.linear_fc1",
            "gate_up": "mlp.linear_fc1",
            "down": "mlp.linear_fc2",
        },
        {
            "embed": "embedding.word_embeddings",
            "position": "embedding.position_embeddings",
            "final_norm": f"{block}.final_layernorm",
            **heads,
        },
    )
    fused = {"attn_norm": ("input_layernorm.", attn_norm), "ffn_norm": ("pre_mlp_layernorm.", ffn_norm)}
    first = [part for part in ("embed", "position", "token_type") if part in names]
    first += ["out"] if attn_norm == _QKV_NORM else []  # the norm is within "qkv"
    order = [*first, *(part for part in names if part not in first)]
    return MappingProxyType({part: names[part].replace(*fused.get(part, ("", ""))) for part in order})


_QKV_NORM, _FC1_NORM = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
LEGACY, LEGACY_NORM = _legacy(), _legacy(norm="norm")
CORE, CORE_FUSED = _core(), _core(_QKV_NORM, _FC1_NORM)
CORE_BERT, CORE_BERT_FUSED = _core(block="encoder"), _core(_QKV_NORM, _FC1_NORM, "encoder")
NAMING_SCHEMES: tuple[Names, ...] = (
    *(
        _legacy(*words)
        for words in product(
            ("encoder", "transformer"), ("self_attention", "attention"), ("layernorm", "norm")
        )
    ),
    CORE,
    CORE_FUSED,
    _core(attn_norm=_QKV_NORM),
    _core(ffn_norm=_FC1_NORM),
    CORE_BERT,
    CORE_BERT_FUSED,
    _core(attn_norm=_QKV_NORM, block="encoder"),
    _core(ffn_norm=_FC1_NORM, block="encoder"),
)


def naming_scheme(foreign: Collection[str]) -> Names | None:
    """Detect the naming scheme from the names of the first layer; None if it is unknown."""
    marks = ("attn_norm", "qkv", "ffn_norm")
    for names in NAMING_SCHEMES:
        if all(names[part].format(layer=0, kind="weight") in foreign for part in marks):
            return names
    return None


def is_core(names: Names) -> bool:
    """Return whether the names are those of the core class."""
    return names["final_norm"] == CORE["final_norm"] or is_core_bert(names)


def is_core_bert(names: Names) -> bool:
    """Return whether the names are those of the core class's BERT."""
    return names["final_norm"] == CORE_BERT["final_norm"]


def core_names(spec: ModelSpec) -> tuple[Names, Names]:
    """Return the core class's names of a GPT or BERT: of the local modules, and of TransformerEngine's."""
    return (CORE, CORE_FUSED) if spec.causal else (CORE_BERT, CORE_BERT_FUSED)


def aliases(spec: ModelSpec, names: Names = LEGACY) -> Iterator[TensorAlias]:
    """Yield every tensor of the model, unsharded and without padding; a tied head has no tensor.

    Raises:
        ConfigError: the names have none for a part of the model.
    """
    for row in _module_order(spec, names):
        name = foreign_name(names, row.name, encoder_layers=spec.encoder_layers)
        yield TensorAlias(name, row.name, order=_row_order(spec, row, 1, 3.0))


def chunk_tensors(
    spec: ModelSpec,
    names: Names,
    layout: Layout,
    *,
    tp: int,
    pp: int,
    chunk: int = 0,
    version: float = 3.0,
    rows: int | None = None,
) -> Iterator[ForeignTensor]:
    """Yield the tensors of one rank's model chunk, a tied embedding's copy with the heads.

    Args:
        version: version of the checkpoint, which determines the row order of Q, K and V.
        rows: vocabulary rows of one rank, padding included; None: as the spec pads.

    Raises:
        ConfigError: the names have none for a part of the model.
        LayoutError: the model cannot be split this way.
    """
    stage = layout.stage(pp, spec.layers, chunk)
    # the first stage of a T5's decoder has copies of the embeddings of tokens and positions
    has_copies = spec.encoder_layers in stage.layers and not stage.is_first
    stage_rows = [
        row for row in _module_order(spec, names) if row.is_on(stage) or (has_copies and row.stage == "first")
    ]
    tensors: list[ForeignTensor] = []
    for row in stage_rows:
        local = foreign_name(names, row.name, stage.layers.start, spec.encoder_layers)
        alias = TensorAlias(local, row.name, order=_row_order(spec, row, layout.tp, version))
        tensors.append(alias.rank_shard(pad_vocab(row, rows), tp, layout.tp))
    if spec.tied and stage.is_last and not stage.is_first and layout.pp > 1 and not has_copies:
        row = table(spec)[0]
        copy = TensorAlias(names[COPY].format(kind="weight"), row.name)
        parts = [*names]
        after = parts[parts.index(COPY) + 1 :]
        place = sum(_name_key(names, row.name, spec.encoder_layers)[0] not in after for row in stage_rows)
        tensors.insert(place, copy.rank_shard(pad_vocab(row, rows), tp, layout.tp))
    yield from tensors


def foreign_name(names: Names, ours: str, first: int = 0, encoder_layers: int | None = None) -> str:
    """Return Megatron's name of a parameter.

    Args:
        first: the first layer of the chunk.
        encoder_layers: `ModelSpec.encoder_layers`.

    Raises:
        ConfigError: the naming scheme has no such parameter.
    """
    key, layer, kind = _name_key(names, ours, encoder_layers)
    if key not in names:
        raise ConfigError(ours, "has no name there", wanted="the names of another release of Megatron")
    if key.startswith(_DECODER):
        first = max(first, encoder_layers or 0)
    return names[key].format(layer=layer - first, kind=kind)


def _name_key(names: Names, ours: str, encoder_layers: int | None) -> tuple[str, int, str]:
    """Return the key of a parameter in a naming scheme, its layer, and weight or bias."""
    part, layer, kind = _split_name(ours)
    key = ours if ours in names else part
    is_layer = ours.startswith("layers.")
    if encoder_layers is not None and (layer >= encoder_layers if is_layer else part == "final_norm"):
        key = _DECODER + part
    return key, layer, kind


def _split_name(name: str) -> tuple[str, int, str]:
    module, _, kind = name.rpartition(".")
    _, layer, part = module.split(".", 2) if module.startswith("layers.") else ("", "0", module)
    return part, int(layer), kind


def _module_order(spec: ModelSpec, names: Names) -> list[Param]:
    """Sort rows in the order of Megatron's modules."""
    numbers = {part: number for number, part in enumerate(names)}

    def place(row: Param) -> tuple[bool, bool, int, int]:
        key, _, _ = _name_key(names, row.name, spec.encoder_layers)
        layer = row.stage if isinstance(row.stage, int) else 0
        return row.stage == "last", row.stage != "first", layer, numbers.get(key, 0)

    return sorted((row for row in table(spec) if row.tied_to is None), key=place)


def pad_vocab(row: Param, rows: int | None) -> Param:
    """Pad a rank's vocabulary shard to `rows` rows; None: as the spec pads it."""
    if rows is None or row.split is None or not row.split.pad:
        return row
    return replace(row, split=replace(row.split, pad=rows))


def _row_order(spec: ModelSpec, row: Param, tp: int, version: float) -> tuple[int, ...] | None:
    """Return the row order of a rank's fused weight, see `rank_order`; None if the order is the same."""
    if ".qkv." in row.name:
        return rank_order(spec, tp, version)
    if ".cross.kv." not in row.name or version < 1:
        return None
    rows = spec.kv_rows // tp
    if version < 2:
        return tuple(2 * number + part for part in range(2) for number in range(rows))
    width = spec.head_dim
    heads = range(0, 2 * rows, 2 * width)  # the keys of a head, then its values
    return tuple(head + part * width + i for part in range(2) for head in heads for i in range(width))


def rank_order(spec: ModelSpec, tp: int, version: float) -> tuple[int, ...] | None:
    """Return the row order of a rank's fused Q, K and V weight in a checkpoint of this version.

    Version 0 has [3, heads, width]: all Q, all K, all V, as in Mega; version 1 has [heads, width, 3]; since
    version 2 rows are ordered by group, see `qkv_order`.

    Raises:
        ConfigError: there are fewer groups than ranks.
    """
    if spec.kv_heads % tp:
        raise ConfigError(
            "--tp",
            "Megatron splits between groups of heads",
            found=tp,
            wanted=f"a divisor of {spec.kv_heads}",
        )
    if version < 1:
        return None
    if version < 2:
        rows = spec.q_rows // tp
        return tuple(3 * row + part for part in range(3) for row in range(rows))
    return qkv_order(replace(spec, heads=spec.heads // tp, kv_heads=spec.kv_heads // tp))
