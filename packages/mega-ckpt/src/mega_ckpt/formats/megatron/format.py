"""Read and write classic Megatron-LM checkpoints, one file per rank, of every version and release."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mega_ckpt.checkpoint.checkpoint_source import (
    CheckpointSource,
    MatchedTensors,
    check_width,
    gather_boxes,
    match_tensors,
)
from mega_ckpt.checkpoint.writer import NamespacePlan, namespaces_to_write
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import KEEP, Format, ReadOptions, WriteOptions, WriteResult
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.formats.megatron import writer as megatron_writer
from mega_ckpt.formats.megatron.names import CORE_FUSED, LEGACY, Names, chunk_tensors, foreign_name, is_core
from mega_ckpt.formats.megatron.optimizer import FIRST, ModelWeight, optimizer_spaces, trainer_state
from mega_ckpt.formats.megatron.rank_files import (
    FILE,
    RankFile,
    detect_names,
    layer_names,
    open_rank_files,
    read_layout,
)
from mega_ckpt.formats.megatron.run_dir import check_run_dir, is_release
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.tensors.mapped_tensor import MappedTensor, tensors_equal
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MAIN, MODEL, OPTIMIZER
from mega_schema.errors import ConfigError, FormatError, LayoutError
from mega_schema.parallel_layout import Layout
from mega_schema.params import count_params
from mega_schema.sharding import Shape
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

_DECODER = "language_model.decoder."  # begins the names of a T5's decoder


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Read the checkpoint of a run's folder, or of one of its iterations.

    Raises:
        FormatError: a rank's file is missing, damaged or of another checkpoint, or the model is not
            supported.
    """
    shards = open_rank_files(load)
    names = detect_names(shards)
    layout = read_layout(shards)
    first = shards[0]
    padded = _padded_vocab(shards, names)
    spec = _encoder_spec(_spec(first, reading, padded, core=is_core(names)), shards, names)
    if spec.vocab > padded:
        wanted = f"{spec.vocab} or more"
        raise FormatError(f"{first.file}: vocabulary", "has fewer rows", found=padded, wanted=wanted)
    if spec.layers != sum(layout.layers_per_stage):
        raise FormatError(load, "layers in the files", found=sum(layout.layers_per_stage), wanted=spec.layers)
    tensors = [tensor for shard in shards for chunk in shard.chunks for tensor in chunk.values()]
    check_width(first.file, spec, sum(math.prod(tensor.shape) for tensor in tensors))
    collector = _WeightCollector(spec, names, layout, padded // layout.tp)
    weights = [(shard, collector.collect(shard)) for shard in shards]
    released = is_release(first.file.parent.parent)
    state, dropped = trainer_state(first, released=released)
    optimizer = {} if released else optimizer_spaces(weights)
    if optimizer is None or first.file.name != FILE:
        dropped.append("the optimizer's state, whose layout is unknown")
    if spec.vocab < padded:
        dropped.append(f"{padded - spec.vocab:,} rows of padding")
    dropped += [f"copies of {name} that differ between ranks" for name in collector.differing_params()]
    spaces, box, check_sums = gather_boxes(load, spec, {MODEL: collector.tensors, **(optimizer or {})})

    def verify(wanted: Collection[str]) -> None:
        check_sums(wanted)
        collector.check_tied()

    return CheckpointSource(
        first.file.parent.parent,
        spec,
        spaces,
        box,
        state,
        _tokenizer(first, reading, spec),
        dropped=tuple(dropped),
        verify=verify,
    )


def _spec(shard: RankFile, reading: ReadOptions, padded: int, *, core: bool) -> ModelSpec:
    """Build the model spec from the training arguments, or --model: the first releases stored none."""
    if shard.args:
        vocab = reading.vocab or megatron_args.true_vocab(shard.args) or padded
        return megatron_args.to_spec(shard.args, vocab, shard.file, core=core)
    if reading.model is None:
        wanted = "the arguments of the training"
        raise FormatError(f"{shard.file}: args", "missing", wanted=wanted, hint="--model megatron-345m")
    return replace(reading.model, vocab=reading.vocab or reading.model.vocab)


def _encoder_spec(spec: ModelSpec, shards: list[RankFile], names: Names) -> ModelSpec:
    """Complete the spec of a BERT or T5, whose arguments are those of a GPT, with the parts in the files.

    Raises:
        FormatError: a T5's layers are not those of its arguments.
    """
    if is_core(names):
        return spec
    tensors = {name: tensor for shard in shards for chunk in shard.chunks for name, tensor in chunk.items()}
    if any(name.startswith(_DECODER) for name in tensors):
        return _t5_spec(spec, shards)

    def shape_of(row: str) -> Shape | None:
        tensor = tensors.get(foreign_name(names, row))
        return None if tensor is None else tensor.shape

    if shape_of("token_type.weight") is None and shape_of("head.dense.weight") is None:
        return spec
    return megatron_args.bert_spec(spec, shards[0].args, shape_of, core=False)


def _t5_spec(spec: ModelSpec, shards: list[RankFile]) -> ModelSpec:
    """Return the spec of a T5, with the layers of encoder and decoder that the files have."""
    encoder = decoder = 0
    for shard in shards:
        if shard.tp == 0:
            layers = layer_names(shard.chunks[0])
            count = sum(name.startswith(_DECODER) for name in layers)
            encoder, decoder = encoder + len(layers) - count, decoder + count
    if encoder != spec.layers:
        where = f"{shards[0].file}: layers of the encoder"
        raise FormatError(where, "are not those of args", found=encoder, wanted=spec.layers)
    has_head_bias = any("lm_head.bias" in shard.chunks[0] for shard in shards)
    return replace(
        spec, family="t5", layers=encoder + decoder, encoder_layers=encoder, head_bias=has_head_bias
    )


def _tokenizer(shard: RankFile, reading: ReadOptions, spec: ModelSpec) -> Tokenizer | None:
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    if reading.no_tokenizer or shard.args.get("tokenizer_type") != "NullTokenizer" or spec.vocab < 2:
        return None
    return open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1)


def _padded_vocab(shards: list[RankFile], names: Names) -> int:
    """Return the number of rows of the embedding, over all ranks."""
    embedding = foreign_name(names, "embed.weight")
    embeddings = [shard.chunks[0][embedding] for shard in shards if embedding in shard.chunks[0]]
    if not embeddings or len(embeddings[0].shape) != 2:
        raise FormatError(shards[0].file, "has no tensor", wanted=embedding)
    return embeddings[0].shape[0] * len({shard.tp for shard in shards})


@dataclass(slots=True)
class _WeightCollector:
    """Collects the weights of all ranks, checks their shapes and keeps one copy of replicas.

    Attributes:
        rows: vocabulary rows of one rank.
        found: the tensors of the model.
    """

    spec: ModelSpec
    names: Names
    layout: Layout
    rows: int
    tensors: list[tuple[ForeignTensor, MappedTensor]] = field(default_factory=list)
    _firsts: dict[tuple[int, int, str], tuple[str, MappedTensor]] = field(default_factory=dict)
    _copies: list[tuple[str, MappedTensor, MappedTensor]] = field(default_factory=list)
    _tied: dict[int, list[tuple[str, MappedTensor]]] = field(default_factory=dict)

    def collect(self, shard: RankFile) -> list[list[ModelWeight]]:
        """Return the weights of each chunk of a rank, in the order of the file.

        Raises:
            FormatError: a tensor is missing, unknown, or of another shape.
        """
        return [list(self._chunk_weights(shard, number)) for number in range(len(shard.chunks))]

    def _chunk_weights(self, shard: RankFile, number: int) -> Iterator[ModelWeight]:
        rows = {row.name: row for row in table(self.spec)}
        index = {tensor_name: count for count, tensor_name in enumerate(shard.chunks[number])}
        for foreign, tensor in sorted(self._match(shard, number), key=lambda pair: index[pair[0].name]):
            row = rows[foreign.ours]
            if foreign.ours == "embed.weight" and self.spec.tied:
                self._tied.setdefault(shard.tp, []).append((f"{shard.file}: {foreign.name}", tensor))
            # of a tied embedding, and of the embeddings of a T5 in its decoder
            copy = not row.is_on(self.layout.stage(shard.pp, self.spec.layers, number))
            if row.split is None:
                key = (0, 0, foreign.name) if copy else (shard.pp, number, foreign.name)
                ours, first = self._firsts.setdefault(key, (foreign.ours, tensor))
                if first is not tensor:
                    self._copies.append((ours, first, tensor))
                    copy = True
            if not copy:
                self.tensors.append((foreign, tensor))
            yield ModelWeight(tensor, row.decay, None if copy else foreign)

    def _match(self, shard: RankFile, number: int) -> MatchedTensors:
        try:
            expected = list(
                chunk_tensors(
                    self.spec,
                    self.names,
                    self.layout,
                    tp=shard.tp,
                    pp=shard.pp,
                    chunk=number,
                    version=shard.version,
                    rows=self.rows,
                )
            )
        except (ConfigError, LayoutError) as error:
            raise FormatError(f"{shard.file}: args", "are not of these files", found=f"({error})") from error
        return match_tensors(shard.file, expected, shard.chunks[number])

    def check_tied(self) -> None:
        """Refuse a last stage whose copy of the embedding differs.

        Raises:
            FormatError: the copy differs.
        """
        for copies in self._tied.values():
            for where, copy in copies[1:]:
                if not tensors_equal(copies[0][1], copy):
                    raise FormatError(where, "is not the embedding, which it is tied to", hint=copies[0][0])

    def differing_params(self) -> list[str]:
        """Return the replicated parameters whose copies differ between ranks."""
        return sorted({ours for ours, first, second in self._copies if not tensors_equal(first, second)})


def check_target(source: CheckpointSource, run: Path, target: WriteOptions) -> None:
    """Refuse a model or layout that Megatron does not support, or a run that has this iteration."""
    _check_supported(source, run, target, core=False)


def write(source: CheckpointSource, run: Path, target: WriteOptions) -> WriteResult:
    """Write a checkpoint into `run`, with the tensor names up to release 23.08, which later ones read."""
    return _write(source, run, target, core=False)


def check_core_target(source: CheckpointSource, run: Path, target: WriteOptions) -> None:
    """Check the target as `check_target`, for the core class."""
    _check_supported(source, run, target, core=True)


def write_core(source: CheckpointSource, run: Path, target: WriteOptions) -> WriteResult:
    """Write a checkpoint of the core class, without the optimizer: its parameter order is undocumented."""
    return _write(source, run, replace(target, optimizer=False), core=True)


def _check_supported(source: CheckpointSource, run: Path, target: WriteOptions, *, core: bool) -> None:
    spec = source.spec
    if core and not spec.causal:
        raise ConfigError(
            f"{source.path}: model.causal",
            "is not supported in classic files of the core class",
            found=spec.causal,
            wanted=True,
            hint="--to megatron or --to torch_dist may have it",
        )
    megatron_args.from_spec(spec, source.path, core=core)
    layout = _stage_layout(spec, target.layout)
    if layout.vp > 1 and layout.pp == 1:
        raise LayoutError(
            "--vp", "stages of one rank need a pipeline", found=layout.vp, wanted=1, hint="--pp 2"
        )
    if spec.encoder_layers is None and spec.layers % (layout.pp * layout.vp):
        raise LayoutError(
            "--pp",
            "Megatron splits layers evenly",
            found=f"{spec.layers} layers for {layout.pp * layout.vp} stages",
            wanted=f"a divisor of {spec.layers}",
        )
    for pp in range(layout.pp):
        for chunk in range(layout.vp):
            list(chunk_tensors(spec, CORE_FUSED if core else LEGACY, layout, tp=0, pp=pp, chunk=chunk))
    others = source.spaces.keys() - {MODEL, *OPTIMIZER}
    if others and target.optimizer and not core:
        found = ", ".join(sorted(others))
        raise ConfigError(source.path, "is not Adam's state", found=found, wanted="Adam", hint="--no-optim")
    megatron_writer.check_trainer(source)
    check_run_dir(run, source.iteration or None, force=target.force)


def _stage_layout(spec: ModelSpec, layout: Layout) -> Layout:
    """Return the layout; of a T5 with stages of the encoder or of the decoder only, as Megatron has them.

    Raises:
        LayoutError: Megatron has no such pipeline.
    """
    if spec.encoder_layers is None or layout.pp == 1:
        return layout
    if layout.vp > 1:
        raise LayoutError("--vp", "Megatron does not interleave a T5", found=layout.vp, wanted=1)
    encoder, decoder = spec.encoder_layers, spec.layers - spec.encoder_layers
    splits = [n for n in range(1, layout.pp) if encoder % n == 0 and decoder % (layout.pp - n) == 0]
    if not splits:
        raise LayoutError(
            "--pp",
            "Megatron splits the layers of each side of a T5 evenly",
            found=f"{encoder} and {decoder} layers for {layout.pp} stages",
            wanted="stages that divide the encoder's layers, and others that divide the decoder's",
            hint="--pp 2",
        )
    rank = min(splits, key=lambda n: abs(encoder / n - decoder / (layout.pp - n)))
    stages = (encoder // rank,) * rank + (decoder // (layout.pp - rank),) * (layout.pp - rank)
    return replace(layout, layers_per_stage=stages)


def _write(source: CheckpointSource, run: Path, target: WriteOptions, *, core: bool) -> WriteResult:
    dtype = None if target.dtype == KEEP else target.dtype
    spaces = namespaces_to_write(source.spaces, optimizer=target.optimizer, dtype=dtype)
    if set(spaces[MODEL].dtypes.values()) == {"F32"}:  # there the model's weights are the main weights
        spaces.pop(MAIN, None)
    elif FIRST in spaces and MAIN not in spaces:
        spaces[MAIN] = NamespacePlan(MODEL, dict.fromkeys(spaces[MODEL].dtypes, "F32"))
    names = CORE_FUSED if core else LEGACY
    layout = _stage_layout(source.spec, target.layout)
    writing = megatron_writer.MegatronWriter(source, layout, names, spaces, core)
    folder, size = writing.write(run, target.progress, force=target.force)
    return WriteResult(folder, count_params(table(source.spec)), size, tokenizer=False)


FORMAT = Format(read, check_target, write, frozenset({"optimizer", "schedule"}))
CORE = Format(read, check_core_target, write_core, frozenset({"schedule"}))
