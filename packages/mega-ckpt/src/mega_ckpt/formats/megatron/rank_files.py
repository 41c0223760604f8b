"""Find and open the files of a classic Megatron checkpoint: one per rank of tp and pp.

RUN/latest_checkpointed_iteration.txt        a number, or "release"
RUN/iter_0001000/mp_rank_00/model_optim_rng.pt             tp; with pp > 1: mp_rank_00_000, tp and pp
RUN/iter_0001000/mp_rank_00/distrib_optim.pt               where the optimizer was distributed
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mega_ckpt.formats.megatron.names import naming_scheme
from mega_ckpt.formats.megatron.run_dir import find_checkpoint_dir
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_ckpt.torch_files.pickle_reader import PickleFile, Record, Unpickler
from mega_schema.errors import FormatError
from mega_schema.parallel_layout import Layout

FILE, DISTRIBUTED = "model_optim_rng.pt", "distrib_optim.pt"
_FILES = (FILE, "model_rng.pt")  # the second from 2022-03 to 2023-05, with a distributed optimizer
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LATEST = 3.0
_NOT_WEIGHTS = ("_extra_state", ".inv_freq")
_CORE_ENCODER = "encoder.layers."
# arguments that are equal on all ranks
_SAME_ARGS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *("max_position_embeddings", "padded_vocab_size", "tensor_model_parallel_size", "swiglu"),
    *("pipeline_model_parallel_size", "consumed_train_samples", "untie_embeddings_and_output_weights"),
)


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of one rank's file.

    Attributes:
        tree: the unpickled content of the file.
        chunks: the tensors of each of its pipeline stages, in module order.
        optimizer: the content of the distributed optimizer's file, if there is one.
    """

    file: Path
    tp: int
    pp: int
    tree: Mapping[Any, Any]
    chunks: tuple[Mapping[str, MappedTensor], ...]
    optimizer: Any = None

    @property
    def args(self) -> Mapping[str, Any]:
        args = self.tree.get("args")
        fields = args.fields if isinstance(args, Record) else {}
        return {name: value for name, value in fields.items() if not isinstance(value, np.ndarray)}

    @property
    def version(self) -> float:
        return float(self.tree.get("checkpoint_version", 0))

    @property
    def iteration(self) -> int:
        iteration = self.tree.get("iteration", self.tree.get("total_iters", 0))
        return iteration if type(iteration) is int else 0


def open_rank_files(load: Path) -> list[RankFile]:
    """Open every rank's file, tp fastest.

    Args:
        load: folder of a run, or of one iteration of it.

    Raises:
        FormatError: a file is missing or damaged, or the files are of several checkpoints.
    """
    folder = find_checkpoint_dir(load, lambda directory: any(_find_files(directory)), f"mp_rank_00/{FILE}")
    files = dict(_find_files(folder))
    with Unpickler() as unpickler:
        shards = [
            _open_rank_file(unpickler, *coordinates, files[coordinates])
            for coordinates in sorted(files, key=lambda rank: rank[::-1])
        ]
    first = shards[0]
    tp = first.args.get("tensor_model_parallel_size", first.args.get("model_parallel_size"))
    pp = first.args.get("pipeline_model_parallel_size", 1)
    if type(tp) is not int or type(pp) is not int:
        tp, pp = (1 + max(coordinates[axis] for coordinates in files) for axis in (0, 1))
    places = ((t, p) for p in range(pp) for t in range(tp))
    missing = next((coordinates for coordinates in places if coordinates not in files), None)
    if missing is not None:
        name = f"mp_rank_{missing[0]:02d}" + (f"_{missing[1]:03d}" if pp > 1 else "")
        raise FormatError(
            folder / name / FILE, "no such file", wanted=f"a file of every rank, tp={tp} pp={pp}"
        )
    for shard in shards:
        _check_same_checkpoint(first, shard, tp, pp)
    return shards


def read_layout(shards: list[RankFile]) -> Layout:
    """Return tp, pp, vp and the layers of every stage, counted: some releases split them unevenly."""
    tp = 1 + max(sh.tp for sh in shards)
    pp = 1 + max(sh.pp for sh in shards)
    vp = len(shards[0].chunks)
    layers_per_stage = [0] * (pp * vp)
    for shard in shards:
        for number, chunk in enumerate(shard.chunks):
            if shard.tp == 0:
                layers_per_stage[number * pp + shard.pp] = len(layer_names(chunk))
    return Layout(tp=tp, pp=pp, vp=vp, layers_per_stage=tuple(layers_per_stage))


def layer_names(chunk: Mapping[str, MappedTensor]) -> set[str]:
    """Return the beginnings of the tensor names of each layer; a T5 numbers those of both sides from 0."""
    matches = (re.match(r"(?:.*?\.)?layers\.\d+\.", name) for name in chunk)
    return {match[0] for match in matches if match}


def _find_files(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    for entry in sorted(folder.iterdir() if folder.is_dir() else ()):
        match = _FOLDER.fullmatch(entry.name)
        file = next((entry / name for name in _FILES if (entry / name).is_file()), None)
        if match and file:
            yield (int(match[1]), int(match[2] or 0)), file


def _open_rank_file(unpickler: Unpickler, tp: int, pp: int, file: Path) -> RankFile:
    opened = unpickler.open(file)
    tree = opened.tree
    if not isinstance(tree, dict):
        raise FormatError(file, "is not a Megatron checkpoint", wanted="a dictionary with model and args")
    version = tree.get("checkpoint_version", 0)
    if type(version) not in (int, float) or not 0 <= version <= _LATEST:
        raise FormatError(
            f"{file}: checkpoint_version", "not a known version", found=version, wanted=f"0 to {_LATEST}"
        )
    names = [name for name in ("model", *(f"model{number}" for number in range(len(tree)))) if name in tree]
    if not names or (len(names) > 1) == ("model" in tree):
        raise FormatError(
            file, "has no weights", found=", ".join(map(str, tree)), wanted="model, or model0 and on"
        )
    chunks = tuple(_tensors(file, tree[name]) for name in names)
    distributed = file.with_name(DISTRIBUTED)
    optimizer = unpickler.open(distributed).tree if distributed.is_file() else None
    return RankFile(file, tp, pp, tree, chunks, optimizer)


def _tensors(file: Path, model: Any) -> dict[str, MappedTensor]:
    tensors = PickleFile(file, model).tensors()
    return {name: stored for name, stored in tensors.items() if not name.endswith(_NOT_WEIGHTS)}


def _check_same_checkpoint(first: RankFile, rank_file: RankFile, tp: int, pp: int) -> None:
    """Refuse a rank's file that belongs to a different checkpoint than the first file."""
    if rank_file.tp >= tp or rank_file.pp >= pp:
        raise FormatError(rank_file.file, "is of more ranks than args say", wanted=f"tp={tp} pp={pp}")
    compared = [
        ("iteration", first.iteration, rank_file.iteration),
        ("checkpoint_version", first.version, rank_file.version),
        ("stages", len(first.chunks), len(rank_file.chunks)),
        *((f"args.{name}", first.args.get(name), rank_file.args.get(name)) for name in _SAME_ARGS),
    ]
    for name, wanted, found in compared:
        if repr(found) != repr(wanted):  # values may have any type
            hint = f"{first.file} says {wanted}: these files belong to two checkpoints"
            raise FormatError(f"{rank_file.file}: {name}", "differs", found=found, wanted=wanted, hint=hint)


def detect_names(shards: list[RankFile]) -> Mapping[str, str]:
    """Detect the naming scheme of the files.

    Raises:
        FormatError: the files are not of a GPT, or of an unknown naming scheme.
    """
    for shard in shards:
        for chunk in shard.chunks:
            if any(name.startswith(_CORE_ENCODER) for name in chunk):
                raise FormatError(
                    shard.file,
                    "is of a BERT or T5 model of the core class, which is not supported",
                    wanted="a GPT, or a classic BERT or T5",
                )
            names = naming_scheme(chunk)
            if names is not None:
                return names
    found = next(iter(shards[-1].chunks[-1]), "no tensor")
    raise FormatError(shards[-1].file, "has no tensor names of a Megatron GPT", found=found)
