"""Read and write Megatron core's `torch_dist` folders; read flat DCP folders under core's names.

    RUN/iter_0000010/.metadata, *.distcp    tensors: see `dcp_reader`
                     metadata.json          names of the backends that wrote it
                     common.pt              arguments, iteration, schedule
    RUN/latest_checkpointed_iteration.txt

Tensors are unsharded. Layer tensors are stacked, with the layer as the first dimension; the feed-forward's
gate precedes its up projection; queries, keys and values are ordered by group. The parts of a BERT are
those in the folder: its arguments are those of a GPT.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource, MatchedTensors, check_width, gather_boxes
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import Format, ReadOptions
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.formats.megatron.names import Names, foreign_name, is_core_bert, naming_scheme
from mega_ckpt.formats.megatron.optimizer import trainer_state
from mega_ckpt.formats.megatron.rank_files import RankFile
from mega_ckpt.formats.megatron.run_dir import (
    find_checkpoint_dir,
    is_release,
)
from mega_ckpt.formats.torch_dist import dcp_reader, distributed_optimizer
from mega_ckpt.formats.torch_dist.dcp_reader import DcpTensor
from mega_ckpt.formats.torch_dist.names import (
    BACKENDS,
    COMMON,
    EXTRA_STATE,
    MAIN_KIND,
    STACKED,
    STATE_KINDS,
    UNSHARDED_KIND,
    WRITTEN_BY,
    expected_tensors,
)
from mega_ckpt.formats.torch_dist.writer import check_target, write
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.name_maps.boxes import select_box
from mega_ckpt.tensors import dtypes
from mega_ckpt.torch_files.pickle_reader import Unpickler
from mega_schema.checkpoint.foreign_files import MAX_JSON_BYTES, read_foreign
from mega_schema.checkpoint.reader import MODEL
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(?P<kind>[a-z0-9_]+)\.(?P<of>.+)|.*)")
Tensors = Mapping[str, DcpTensor]


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Read the folder and check all boxes of all tensors against the model.

    Raises:
        FormatError: a file is missing or damaged, or the model is not supported.
    """
    folder = find_checkpoint_dir(load, lambda f: (f / dcp_reader.METADATA).is_file(), dcp_reader.METADATA)
    ours_to_read = _check_backends(folder)
    with Unpickler() as unpickler:
        common = _common(folder, unpickler) if ours_to_read else {}
        opened = dcp_reader.open_dcp_folder(folder, unpickler)
    model, state, others = _sort_tensors(opened.tensors)
    names = naming_scheme(model)
    if names is None:
        first = next(iter(model), "no tensor")
        raise FormatError(folder, "has no tensor names of a Megatron core GPT or BERT", found=first)
    embedding = model.get(names["embed"].format(kind="weight"))
    padded = embedding.shape[0] if embedding is not None and embedding.shape else 0
    shard = RankFile(folder / COMMON, 0, 0, common, ())
    spec = _add_bert_parts(folder, _spec(folder, shard.args, reading, padded), shard.args, model, names)
    if spec.vocab > padded:
        raise FormatError(
            f"{folder}: vocabulary", "has fewer rows", found=padded, wanted=f"{spec.vocab} or more"
        )
    if spec.layers > len(model):  # otherwise the table of a wrong layer count could exhaust the memory
        raise FormatError(folder, "has fewer tensors than the model has layers", found=len(model))
    stored = [math.prod(piece.stored.shape) for tensor in model.values() for piece in tensor.pieces]
    check_width(folder, spec, sum(stored))
    expected = list(expected_tensors(spec, names, padded))
    spaces = {MODEL: _match_tensors(folder, expected, model)}
    dropped = _describe_others(opened.others)
    if others:
        bucketed = distributed_optimizer.read_optimizer(
            folder, spec, others, shard.args, padded, spaces[MODEL]
        )
        spaces |= bucketed
        if not bucketed:
            dropped.append("the optimizer's state, whose sharding is unknown")
    if spec.vocab < padded:
        dropped.append(f"{padded - spec.vocab:,} rows of padding")
    if state:
        reason = _why_unusable(state, model)
        unsharded = MAIN_KIND not in state and UNSHARDED_KIND in state
        by_kind = {
            kind: _match_tensors(folder, expected, tensors) for kind, tensors in state.items() if not reason
        }
        if (
            not reason
            and unsharded
            and not distributed_optimizer.weights_match(folder, spec, spaces[MODEL], by_kind[UNSHARDED_KIND])
        ):
            reason = "whose main weights do not match the model's"
        if reason:
            dropped.append(f"the optimizer's state, {reason}")
        else:
            if unsharded and _dtypes(model) != {"F32"}:  # otherwise they are the model's
                by_kind[MAIN_KIND] = by_kind[UNSHARDED_KIND]
            spaces |= {space: by_kind[kind] for kind, space in STATE_KINDS.items() if kind in by_kind}
    stored_dtypes, box, verify = gather_boxes(folder, spec, spaces)
    trained, dropped_state = trainer_state(shard, released=is_release(folder))
    return CheckpointSource(
        folder,
        spec,
        stored_dtypes,
        box,
        trained,
        _tokenizer(shard.args, spec, reading),
        dropped=(*dropped, *dropped_state),
        verify=verify,
    )


def _check_backends(folder: Path) -> bool:
    """Return whether Megatron wrote the folder; False if only torch did.

    Raises:
        FormatError: the folder is of another backend or a later version.
    """
    file = folder / BACKENDS
    if not file.is_file():
        return False
    content = read_foreign(file, MAX_JSON_BYTES)
    try:
        metadata = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(file, "is not a JSON object", found=error) from error
    for key, wanted in WRITTEN_BY.items():
        if metadata.get(key, wanted) != wanted:
            raise FormatError(f"{file}: {key}", "is not known", found=metadata[key], wanted=wanted)
    return True


def _common(folder: Path, unpickler: Unpickler) -> Mapping[str, Any]:
    tree = unpickler.open(folder / COMMON).tree
    if not isinstance(tree, dict):
        raise FormatError(folder / COMMON, "content", found=type(tree).__name__, wanted="a dictionary")
    return tree


def _spec(folder: Path, args: Mapping[str, Any], reading: ReadOptions, padded: int) -> ModelSpec:
    """Build the model spec from the training arguments, or from --model: plain DCP folders have none."""
    if args:
        vocab = reading.vocab or megatron_args.true_vocab(args) or padded
        return megatron_args.to_spec(args, vocab, folder / COMMON, core=True)
    if reading.model is None:
        wanted = f"args in {COMMON}"
        raise FormatError(folder, "does not describe its model", wanted=wanted, hint="--model llama2-7b")
    return replace(reading.model, vocab=reading.vocab or reading.model.vocab)


def _add_bert_parts(
    folder: Path, spec: ModelSpec, args: Mapping[str, Any], tensors: Tensors, names: Names
) -> ModelSpec:
    """Complete the spec of a BERT with the parts in the folder; one of --model has them.

    Raises:
        FormatError: a BERT has options that are not supported.
    """
    if not is_core_bert(names):
        return spec

    def shape_of(row: str) -> Shape | None:
        tensor = tensors.get(foreign_name(names, row))
        return None if tensor is None else tensor.shape

    if args:
        spec = megatron_args.bert_spec(spec, args, shape_of, core=True)
    elif spec.causal:
        raise FormatError(folder, "is of a BERT", found="model.causal = true", wanted="--model of a BERT")
    megatron_args.check_core_bert(spec, folder)
    return spec


def _tokenizer(args: Mapping[str, Any], spec: ModelSpec, reading: ReadOptions) -> Tokenizer | None:
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    if args.get("tokenizer_type") == "NullTokenizer" and spec.vocab > 1 and not reading.no_tokenizer:
        return open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1)
    return None


def _sort_tensors(tensors: Tensors) -> tuple[Tensors, dict[str, dict[str, DcpTensor]], Tensors]:
    """Unstack the tensors and divide them into those of the model, of the optimizer by kind, and others."""
    prefix = "model." if all(name.startswith(("model.", "optimizer.")) for name in tensors) else ""
    model: dict[str, DcpTensor] = {}
    state: dict[str, dict[str, DcpTensor]] = {kind: {} for kind in (*STATE_KINDS, UNSHARDED_KIND)}
    others: dict[str, DcpTensor] = {}
    for name, whole in tensors.items():
        match = _OF_OPTIMIZER.fullmatch(name)
        if match is None:
            model |= _unstack(name.removeprefix(prefix), whole)
        elif match["kind"] in state:
            state[match["kind"]].update(_unstack(match["of"], whole))
        else:
            others[name] = whole
    return model, {kind: entries for kind, entries in state.items() if entries}, others


def _unstack(name: str, whole: DcpTensor) -> dict[str, DcpTensor]:
    if not STACKED.search(name) or not whole.shape:
        return {name: whole}
    return {STACKED.sub(f".layers.{i}.", name, 1): layer for i, layer in enumerate(whole.unstack())}


def _describe_others(names: Sequence[str]) -> list[str]:
    """Describe the entries that are not tensors, a few words each."""
    kinds = {name.partition("/")[0] for name in names if EXTRA_STATE not in name}
    distributed = {kind for kind in kinds if "optimizer.distributed." in kind}
    scaled = any(kind.endswith(".grad_scaler") for kind in distributed)
    kinds = kinds - distributed | ({"the loss scale"} if scaled else set())
    return ["the random number generator states" if kind == "rng_state" else kind for kind in sorted(kinds)]


def _dtypes(tensors: Tensors) -> set[str]:
    return {piece.stored.dtype for tensor in tensors.values() for piece in tensor.pieces}


def _why_unusable(state: Mapping[str, Mapping[str, DcpTensor]], model: Mapping[str, DcpTensor]) -> str:
    """Return the reason why the optimizer's state is dropped; empty if it is not."""
    kinds = {kind for entries in state.values() for kind in _dtypes(entries)}
    main = {MAIN_KIND, UNSHARDED_KIND} & state.keys() or _dtypes(model) == {"F32"}
    lacking = [kind for kind in STATE_KINDS if kind not in state and not (kind == MAIN_KIND and main)]
    if kinds != {"F32"}:
        return f"which is in {', '.join(sorted(kinds))}"
    if lacking:
        return f"which lacks {', '.join(lacking)}"
    return ""


def _match_tensors(
    folder: Path, expected: Sequence[ForeignTensor], tensors: Mapping[str, DcpTensor]
) -> MatchedTensors:
    """Pair every stored box with its part of an expected tensor."""
    matches = []
    for foreign in expected:
        whole = tensors.get(foreign.name)
        if whole is None:
            raise FormatError(folder, "has no tensor", wanted=foreign.name)
        if whole.shape != foreign.shape:
            where = f"{folder}: {foreign.name}"
            raise FormatError(where, "shape", found=whole.shape, wanted=foreign.shape)
        for piece in whole.pieces:
            if piece.stored.dtype not in dtypes.FLOATS:
                where = f"{piece.stored.file}: {foreign.name}"
                wanted = " | ".join(dtypes.FLOATS)
                raise FormatError(where, "dtype", found=piece.stored.dtype, wanted=wanted)
            matches.append((select_box(foreign, piece.start, piece.shape), piece.stored))
    known = {foreign.name for foreign in expected}
    for name in tensors:
        if name not in known:
            raise FormatError(folder, "has a tensor that is not in the model", found=name)
    return matches


FORMAT = Format(read, check_target, write, frozenset({"optimizer", "schedule"}))
