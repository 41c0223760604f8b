"""Read checkpoints of BigScience's Megatron-DeepSpeed, such as BLOOM's.

latest                                      text: global_step95000
global_step95000/layer_01-model_00-model_states.pt     the embedding of rank 0 of tp
                 layer_03-model_00-model_states.pt     the first layer, and so on
                 layer_34-model_00-model_states.pt     the last norm, of 30 layers
                 mp_rank_00_model_states.pt            args and iteration of one rank
                 zero_pp_rank_..., bf16_zero_...       the optimizer's state, which is not read
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import (
    CheckpointSource,
    MatchedTensors,
    check_width,
    gather_boxes,
    match_tensors,
)
from mega_ckpt.checkpoint.merge_ranks import merge_ranks
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.bigscience import names as bigscience_names
from mega_ckpt.formats.interface import Format, ReadOptions
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_ckpt.torch_files.pickle_reader import Record, Unpickler
from mega_schema.checkpoint.foreign_files import MAX_COMPANION_BYTES, read_foreign
from mega_schema.checkpoint.reader import MODEL
from mega_schema.errors import ConfigError, FormatError, LayoutError
from mega_schema.spec import GATED, ModelSpec

_LATEST, _STEP = "latest", "global_step*"
_LAYER, _FIRST, _RANK = (
    "layer_{:02d}-model_{:02d}-model_states.pt",
    "layer_01-model_",
    "mp_rank_00_model_states.pt",
)
_NUMBERED = re.compile(r"layer_(\d{2,})-model_(\d{2,})-model_states\.pt")
_EMBEDDING = "word_embeddings.weight"


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Read the folder of one step, or of a run.

    Replicated norms and biases are taken from rank 0: in BLOOM's training the replicas drifted apart.

    Raises:
        FormatError: a file is missing, damaged or of another model, or the model is not supported.
    """
    folder = _folder(load)
    files = {(int(n[1]), int(n[2])): p for p in folder.iterdir() if (n := _NUMBERED.fullmatch(p.name))}
    tp = 1 + max((rank for _, rank in files), default=-1)
    if not tp:
        raise FormatError(folder, "has no weights", wanted=f"{_LAYER.format(1, 0)} and on")
    with Unpickler() as unpickler:
        state = unpickler.open(folder / _RANK).tree
        args = _args(state, folder / _RANK)
        tensors = {key: _tensors(path, unpickler.open(path).tree) for key, path in sorted(files.items())}
    embedding = tensors.get((1, 0), {}).get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(folder / _LAYER.format(1, 0), "has no matrix", wanted=_EMBEDDING)
    recorded_tp = args.get("tensor_model_parallel_size", tp)
    rows = embedding.shape[0]
    if recorded_tp != tp:
        raise FormatError(folder, "ranks of tp that have files", found=tp, wanted=recorded_tp)
    spec = _spec(args, reading, rows * tp, folder / _RANK)
    check_width(
        folder, spec, sum(math.prod(tensor.shape) for file in tensors.values() for tensor in file.values())
    )
    parts = [_part(folder, spec, rank, tp, rows, files, tensors) for rank in range(tp)]
    merged = merge_ranks(parts)
    spaces, box, verify = gather_boxes(folder, spec, {MODEL: merged.tensors})
    dropped = ["the optimizer's state and the schedule"]
    dropped += [f"{rows * tp - spec.vocab:,} rows of padding"] if rows * tp > spec.vocab else []
    if merged.differing:
        dropped.append(f"{len(merged.differing):,} copies of norms and biases that differ between ranks")
    tokenizer = user_overrides.load_tokenizer(reading.tokenizer, spec) if reading.tokenizer else None
    return CheckpointSource(
        folder, spec, spaces, box, _trainer(state, args), tokenizer, dropped=tuple(dropped), verify=verify
    )


def _folder(load: Path) -> Path:
    """Return the step's folder: `load` itself, or the one that `latest` names."""
    if any(load.glob(f"{_FIRST}*")) or (load / _RANK).is_file():
        return load
    latest = load / _LATEST
    if not latest.is_file():
        wanted = f"{_LATEST}, or {_LAYER.format(1, 0)}"
        raise FormatError(load, "is not a checkpoint of Megatron-DeepSpeed", wanted=wanted)
    name = read_foreign(latest, MAX_COMPANION_BYTES).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise FormatError(latest, "is not the name of a step", found=repr(name[:40]), wanted=_STEP)
    if not (load / name).is_dir():
        raise FormatError(load / name, "no such folder", wanted=f"the step named by {latest}")
    return load / name


def _args(state: Any, where: Path) -> Mapping[str, Any]:
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, Record):
        raise FormatError(where, "has no arguments", wanted="args, as Megatron-DeepSpeed saves them")
    return args.fields


def _tensors(file: Path, tree: Any) -> dict[str, MappedTensor]:
    if not isinstance(tree, dict) or not all(isinstance(value, MappedTensor) for value in tree.values()):
        raise FormatError(file, "is not a layer of Megatron-DeepSpeed", wanted="a dictionary of tensors")
    return {str(name): value for name, value in tree.items()}


def _spec(args: Mapping[str, Any], reading: ReadOptions, padded: int, where: Path) -> ModelSpec:
    """Build the model spec; gated activations have an argument that Megatron's checkpoints lack."""
    vocab = reading.vocab or megatron_args.true_vocab(args) or padded
    gate = args.get("glu_activation")
    if vocab > padded:
        raise FormatError(f"{where}: vocabulary", "has fewer rows", found=padded, wanted=f"{vocab} or more")
    if gate and gate not in GATED:
        wanted = " | ".join(sorted(GATED))
        raise FormatError(f"{where}: args.glu_activation", "is not supported", found=gate, wanted=wanted)
    spec = megatron_args.to_spec({**args, "glu_activation": None}, vocab, where, core=False)
    return replace(spec, activation=gate) if gate else spec


def _part(
    folder: Path,
    spec: ModelSpec,
    rank: int,
    tp: int,
    rows: int,
    files: Mapping[tuple[int, int], Path],
    tensors: Mapping[tuple[int, int], Mapping[str, MappedTensor]],
) -> MatchedTensors:
    """Match the tensors of one rank, file by file."""
    layers = len({number for number, _ in files}) - 2
    if layers != spec.layers:  # before a list of that many layers is built
        missing = next((n for n in range(3, max(n for n, _ in files)) if (n, 0) not in files), None)
        hint = "" if missing is None else f"there is no {_LAYER.format(missing, 0)}"
        raise FormatError(folder, "layers in the files", found=max(0, layers), wanted=spec.layers, hint=hint)
    try:
        expected = list(bigscience_names.rank_tensors(spec, rank, tp, rows))
    except (ConfigError, LayoutError) as error:
        raise FormatError(folder, f"cannot be of {tp} ranks: {error}") from None
    matches = list[tuple[ForeignTensor, MappedTensor]]()
    for number in bigscience_names.layer_files(spec):
        if (number, rank) not in files:
            wanted = f"a file of every layer and of {tp} ranks"
            raise FormatError(folder / _LAYER.format(number, rank), "no such file", wanted=wanted)
        in_file = [foreign for file, foreign in expected if file == number]
        matches += match_tensors(files[number, rank], in_file, tensors[number, rank])
    return matches


def _trainer(state: Mapping[Any, Any], args: Mapping[str, Any]) -> dict[str, int]:
    iteration = state.get("iteration")
    samples = args.get("consumed_train_samples")
    steps = iteration if type(iteration) is int and iteration > 0 else 0
    return {
        "iteration": steps,
        "consumed_samples": samples if type(samples) is int and samples > 0 else 0,
        "optimizer_steps": steps,
    }


FORMAT = Format(read)
