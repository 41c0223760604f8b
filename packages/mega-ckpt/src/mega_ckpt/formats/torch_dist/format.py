"""Megatron core's `torch_dist` folders, and what torch.distributed.checkpoint wrote under core's names.

    RUN/iter_0000010/.metadata, *.distcp    tensors: see `dcp_reader`
                     metadata.json          which backends wrote it
                     common.pt              arguments, iteration, schedule
    RUN/latest_checkpointed_iteration.txt

A tensor is whole there, whatever ranks wrote it. Those of the layers are stacked, the first dimension is the
layer; the feed-forward's gate comes before its up projection; queries, keys and values are mixed by group.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import Found, Source, check_width, gathered
from mega_ckpt.checkpoint.writer import Taken, shares, taken
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import KEEP, Format, Reading, Target, Written
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.formats.megatron.names import CORE_FUSED, Names, aliases, era
from mega_ckpt.formats.megatron.optimizer import FIRST, trainer
from mega_ckpt.formats.megatron.rank_files import Shard
from mega_ckpt.formats.megatron.run_dir import check_free, folder_of, name_of, placing, released
from mega_ckpt.formats.megatron.writer import VERSION, Writing, check_trainer, pad, scaler, schedule
from mega_ckpt.formats.torch_dist import dcp_reader, dcp_writer, distributed_optimizer
from mega_ckpt.formats.torch_dist.dcp_reader import Whole
from mega_ckpt.name_maps.alias import Foreign
from mega_ckpt.name_maps.boxes import part_of
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.row_stream import Band, rows_at_once
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import Record, Unpickler
from mega_schema.arch import table
from mega_schema.checkpoint import MAIN, MODEL, OPTIMIZER
from mega_schema.disk import write_text
from mega_schema.errors import ConfigError, FormatError
from mega_schema.foreign_files import MOST_JSON, read_foreign
from mega_schema.params import count
from mega_schema.shard import Shape
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import Tokenizer, open_tokenizer

_COMMON, _BACKENDS = "common.pt", "metadata.json"
_WRITTEN_BY: Mapping[str, object] = MappingProxyType(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
)
_MAIN, _WHOLE = "fp32_param", "param"  # the second is the distributed optimizer's, of parameters saved whole
_STATE: Mapping[str, str] = MappingProxyType(
    dict(zip((_MAIN, "exp_avg", "exp_avg_sq"), OPTIMIZER, strict=True))
)
_RESHARDABLE = "fully_reshardable"
_CONTENT: Mapping[str, object] = MappingProxyType(
    {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": _RESHARDABLE,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
)
_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(?P<kind>[a-z0-9_]+)\.(?P<of>.+)|.*)")
_LAYER, _STACKED = re.compile(r"\.layers\.(\d+)\."), re.compile(r"\.layers\.(?!\d)")
# modules of a layer beside which Megatron keeps a state of float8, which is nothing
_FLOAT8 = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_EXTRA = "._extra_state"
Tensors = Mapping[str, Whole]
_BANDS = 4  # of a box that is written: memory of 16 MiB is had again and again, of more it is had anew


def read(load: Path, reading: Reading) -> Source:
    """The folder, every box of every tensor found and held against the model.

    Raises:
        FormatError: a file is missing or damaged, or the model has something ours has not.
    """
    folder = folder_of(load, lambda f: (f / dcp_reader.METADATA).is_file(), dcp_reader.METADATA)
    ours_to_read = _check_backends(folder)
    with Unpickler() as unpickler:
        common = _common(folder, unpickler) if ours_to_read else {}
        found = dcp_reader.open_folder(folder, unpickler)
    model, state, others = _sorted(found.tensors)
    names = era(model)
    if names is None:
        first = next(iter(model), "no tensor")
        raise FormatError(folder, "has no names of a GPT of Megatron core's", found=first)
    embedding = model.get(names["embed"].format(kind="weight"))
    padded = embedding.shape[0] if embedding is not None and embedding.shape else 0
    shard = Shard(folder / _COMMON, 0, 0, common, ())
    spec = _spec(folder, shard.args, reading, padded)
    if spec.vocab > padded:
        raise FormatError(
            f"{folder}: vocabulary", "has fewer rows", found=padded, wanted=f"{spec.vocab} or more"
        )
    if spec.layers > len(model):  # or the table of a layer count gone wrong would fill the memory
        raise FormatError(folder, "has fewer tensors than the model has layers", found=len(model))
    stored = [math.prod(piece.stored.shape) for one in model.values() for piece in one.pieces]
    check_width(folder, spec, sum(stored))
    expected = list(_expected(spec, names, padded))
    spaces = {MODEL: _matched(folder, expected, model)}
    left = _others(found.others)
    if others:
        bucketed = distributed_optimizer.read(folder, spec, others, shard.args, padded, spaces[MODEL])
        spaces |= bucketed
        if not bucketed:
            left.append("the optimizer's state, which is sharded in another way than is known")
    if spec.vocab < padded:
        left.append(f"{padded - spec.vocab:,} rows of padding")
    if state:
        told, kept_whole = _unusable(state, model), _MAIN not in state and _WHOLE in state
        by_kind = {kind: _matched(folder, expected, there) for kind, there in state.items() if not told}
        if (
            not told
            and kept_whole
            and not distributed_optimizer.agree(folder, spec, spaces[MODEL], by_kind[_WHOLE])
        ):
            told = "whose float32 weights are not the model's"
        if told:
            left.append(f"the optimizer's state, {told}")
        else:
            if kept_whole and _kinds(model) != {"F32"}:  # or they are the model's
                by_kind[_MAIN] = by_kind[_WHOLE]
            spaces |= {space: by_kind[kind] for kind, space in _STATE.items() if kind in by_kind}
    kept, box, verify = gathered(folder, spec, spaces)
    trained, lost = trainer(shard, released=released(folder))
    return Source(
        folder,
        spec,
        kept,
        box,
        trained,
        _tokenizer(shard.args, spec, reading),
        left=(*left, *lost),
        verify=verify,
    )


def free(source: Source, run: Path, target: Target) -> None:
    """Refuse a model that Megatron has not, an optimizer that is not Adam, and a place that is taken.

    Raises:
        ConfigError: one of them, or torch is not installed.
        LayoutError: the model cannot be cut as the arguments would say.
    """
    megatron_args.from_spec(source.spec, source.where, core=True)
    shares(source.spec, target.layout, source.spaces[MODEL])
    foreign = [space for space in source.spaces if space not in (MODEL, *OPTIMIZER)]
    if foreign and target.optimizer:
        wanted = ", ".join(OPTIMIZER)
        hint = "--no-optim leaves it behind"
        raise ConfigError(f"{source.where}: {foreign[0]}", "is not Adam's", wanted=wanted, hint=hint)
    kinds = set(source.spaces[MODEL].values())
    if target.dtype == KEEP and len(kinds) > 1:  # a stacked tensor has one
        raise ConfigError("--dtype", "the weights have several", found=sorted(kinds), hint="--dtype fp32")
    dcp_writer.check_torch()
    check_trainer(source)
    check_free(run, source.iteration or None, force=target.force)


def write(source: Source, run: Path, target: Target) -> Written:
    """A checkpoint in the run's folder, a release where there was no training."""
    spec, iteration = source.spec, source.iteration or None
    dtype = None if target.dtype == KEEP else target.dtype
    spaces = taken(source.spaces, optimizer=target.optimizer, dtype=dtype)
    writing = Writing(source, target.layout, CORE_FUSED, spaces, core=True)
    every = list(chunks(source, spaces, writing.args(0, 0)["padded_vocab_size"]))
    size = sum(chunk.bytes for chunk in every)
    nothings = [
        f"decoder.layers.{module}{_EXTRA}/shard_{layer}_{spec.layers}"
        for layer in range(spec.layers)
        for module in _FLOAT8
    ]
    with placing(run, iteration, force=target.force) as folder:
        with target.progress(size) as told:
            dcp_writer.write(folder, every, nothings, told, again=dict(_again(every)))
        scale = scaler(source.trainer)
        zip_writer.write(folder / _COMMON, _tree(writing), lambda _: [scale[0]] if scale else [])
        write_text(folder / _BACKENDS, json.dumps(dict(_WRITTEN_BY)))
    return Written(run / name_of(iteration), count(table(spec)), size, tokenizer=False)


def _tree(writing: Writing) -> dict[str, Any]:
    """What all ranks of Megatron's have alike."""
    source = writing.source
    optimizer = FIRST in writing.spaces
    lacking = {"no_save_rng": True, "no_save_optim": not optimizer}  # or Megatron would look for it
    tree: dict[str, Any] = {
        "args": Record("argparse.Namespace", (), writing.args(0, 0) | lacking),
        "checkpoint_version": VERSION,
        "iteration": source.iteration,
        "content_metadata": dict(_CONTENT),
    }
    if optimizer:
        groups = [writing.group(decay, ()) for decay in (True, False)]
        for group in groups:
            del group["params"]  # every rank has its own
        adam = {"state": {"common_step": writing.steps}, "param_groups": groups}
        # that of float32 weights is Adam, the others have it in them
        tree["optimizer"] = adam | {"optimizer": adam, "param_state_sharding_type": _RESHARDABLE}
        if scale := scaler(source.trainer):
            tree["optimizer"]["grad_scaler"] = scale[1]
    return tree | schedule(source.trainer)


def _check_backends(folder: Path) -> bool:
    """Whether Megatron wrote the folder, and not torch alone.

    Raises:
        FormatError: it is of another backend or a later version.
    """
    file = folder / _BACKENDS
    if not file.is_file():
        return False
    content = read_foreign(file, MOST_JSON)
    try:
        told = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(file, "is not a JSON object", found=error) from error
    for key, wanted in _WRITTEN_BY.items():
        if told.get(key, wanted) != wanted:
            raise FormatError(f"{file}: {key}", "is not known", found=told[key], wanted=wanted)
    return True


def _common(folder: Path, unpickler: Unpickler) -> Mapping[str, Any]:
    tree = unpickler.open(folder / _COMMON).tree
    if not isinstance(tree, dict):
        raise FormatError(folder / _COMMON, "content", found=type(tree).__name__, wanted="a dictionary")
    return tree


def _spec(folder: Path, args: Mapping[str, Any], reading: Reading, padded: int) -> ModelSpec:
    """The model, by the arguments of its training, which torch alone does not keep."""
    if args:
        vocab = reading.vocab or megatron_args.known_vocab(args) or padded
        return megatron_args.to_spec(args, vocab, folder / _COMMON, core=True)
    if reading.model is None:
        wanted = f"args in {_COMMON}"
        raise FormatError(folder, "does not say what model it is", wanted=wanted, hint="--model llama2-7b")
    return replace(reading.model, vocab=reading.vocab or reading.model.vocab)


def _tokenizer(args: Mapping[str, Any], spec: ModelSpec, reading: Reading) -> Tokenizer | None:
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    if args.get("tokenizer_type") == "NullTokenizer" and spec.vocab > 1 and not reading.no_tokenizer:
        return open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1)
    return None


def _sorted(tensors: Tensors) -> tuple[Tensors, dict[str, dict[str, Whole]], Tensors]:
    """The model's tensors, those of the optimizer by kind, each a layer's, and others of it."""
    prefix = "model." if all(name.startswith(("model.", "optimizer.")) for name in tensors) else ""
    model: dict[str, Whole] = {}
    state: dict[str, dict[str, Whole]] = {kind: {} for kind in (*_STATE, _WHOLE)}
    others: dict[str, Whole] = {}
    for name, whole in tensors.items():
        of = _OF_OPTIMIZER.fullmatch(name)
        if of is None:
            model |= _unstacked(name.removeprefix(prefix), whole)
        elif of["kind"] in state:
            state[of["kind"]].update(_unstacked(of["of"], whole))
        else:
            others[name] = whole
    return model, {kind: there for kind, there in state.items() if there}, others


def _unstacked(name: str, whole: Whole) -> dict[str, Whole]:
    if not _STACKED.search(name) or not whole.shape:
        return {name: whole}
    return {_STACKED.sub(f".layers.{i}.", name, 1): one for i, one in enumerate(whole.unstacked())}


def _others(names: Sequence[str]) -> list[str]:
    """What is there beside tensors, a few words each."""
    kinds = {name.partition("/")[0] for name in names if _EXTRA not in name}
    distributed = {kind for kind in kinds if "optimizer.distributed." in kind}
    scaled = any(kind.endswith(".grad_scaler") for kind in distributed)
    kinds = kinds - distributed | ({"the scale of the loss"} if scaled else set())
    return ["the states of random numbers" if kind == "rng_state" else kind for kind in sorted(kinds)]


def _kinds(tensors: Tensors) -> set[str]:
    return {piece.stored.dtype for one in tensors.values() for piece in one.pieces}


def _unusable(state: Mapping[str, Mapping[str, Whole]], model: Mapping[str, Whole]) -> str:
    """Why the optimizer's state is left behind; nothing where it is not."""
    kinds = {kind for there in state.values() for kind in _kinds(there)}
    main = {_MAIN, _WHOLE} & state.keys() or _kinds(model) == {"F32"}
    lacking = [kind for kind in _STATE if kind not in state and not (kind == _MAIN and main)]
    if kinds != {"F32"}:
        return f"which is in {', '.join(sorted(kinds))}"
    if lacking:
        return f"which lacks {', '.join(lacking)}"
    return ""


def _expected(spec: ModelSpec, names: Names, padded: int) -> Iterator[Foreign]:
    rows = {row.name: row for row in table(spec)}
    for alias in aliases(spec, names):
        whole, row = alias.whole(rows[alias.ours]), rows[alias.ours]
        vocabulary = row.split is not None and row.split.pad > 0
        yield replace(whole, shape=(padded, *whole.shape[1:])) if vocabulary else whole


def _matched(folder: Path, expected: Sequence[Foreign], there: Mapping[str, Whole]) -> Found:
    """The boxes that are there, as parts of the tensors that are expected."""
    found = []
    for foreign in expected:
        whole = there.get(foreign.name)
        if whole is None:
            raise FormatError(folder, "has no tensor", wanted=foreign.name)
        if whole.shape != foreign.shape:
            at = f"{folder}: {foreign.name}"
            raise FormatError(at, "shape", found=whole.shape, wanted=foreign.shape)
        for piece in whole.pieces:
            if piece.stored.dtype not in dtypes.FLOATS:
                at, wanted = f"{piece.stored.file}: {foreign.name}", " | ".join(dtypes.FLOATS)
                raise FormatError(at, "dtype", found=piece.stored.dtype, wanted=wanted)
            found.append((part_of(foreign, piece.start, piece.shape), piece.stored))
    known = {foreign.name for foreign in expected}
    for name in there:
        if name not in known:
            raise FormatError(folder, "has a tensor that the model has not", found=name)
    return found


def chunks(source: Source, spaces: Mapping[str, Taken], padded: int) -> Iterator[dcp_writer.Chunk]:
    """Every tensor of every namespace, those of the layers one by one, long ones some rows at a time.

    Args:
        padded: rows of the vocabulary.
    """
    spec, foreign = source.spec, list(_expected(source.spec, CORE_FUSED, padded))
    keys = {space: f"optimizer.state.{kind}." for kind, space in _STATE.items()} | {MODEL: ""}
    for space, made in spaces.items():
        for one in foreign:
            layer, kind = _LAYER.search(one.name), made.dtypes[one.ours]
            key = keys[space] + _LAYER.sub(".layers.", one.name, 1)
            place: Shape = () if layer is None else (int(layer[1]),)
            whole = one.shape if layer is None else (spec.layers, *one.shape)
            step = _BANDS * rows_at_once(one.shape, kind)
            for first in range(0, one.shape[0], step):
                start = (first, *(0,) * (len(one.shape) - 1))
                shape = (min(step, one.shape[0] - first), *one.shape[1:])
                part = part_of(one, start, shape)
                values = partial(_values, source, made.space, part, kind, space)
                box = (*place, *start), (*(1 for _ in place), *shape)
                yield dcp_writer.Chunk(key, kind, whole, *box, values)


def _again(every: Sequence[dcp_writer.Chunk]) -> Iterator[tuple[str, str]]:
    """Second names of float32 weights, as the distributed optimizer has them, beside Adam's moments."""
    keys = {chunk.key for chunk in every}
    state = {space: f"optimizer.state.{kind}." for kind, space in _STATE.items()}
    for key in keys:
        if state[FIRST] + key in keys:
            main = state[MAIN] + key
            yield f"optimizer.state.{_WHOLE}.{key}", main if main in keys else key


def _values(source: Source, space: str, part: Foreign, dtype: str, into: str) -> np.ndarray:
    """Numbers of a part of a tensor, as `pad` pads it."""
    out = source.assembled(space, part, dtype)
    pad(source, space, part, dtype, into, Band(0, out))
    return out


FORMAT = Format(read, free, write, frozenset({"optimizer", "schedule"}))
