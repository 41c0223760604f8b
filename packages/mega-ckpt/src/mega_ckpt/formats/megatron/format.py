"""Classic checkpoints of Megatron-LM, a file per rank: every version, the names of every release."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mega_ckpt.checkpoint.checkpoint_source import Found, Source, check_width, gathered, matched
from mega_ckpt.checkpoint.writer import Taken, taken
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import KEEP, Format, Reading, Target, Written
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.formats.megatron import writer as megatron_writer
from mega_ckpt.formats.megatron.names import CORE_FUSED, LEGACY, Names, is_core, name, of_chunk
from mega_ckpt.formats.megatron.optimizer import FIRST, Weight, optimizer_spaces, trainer
from mega_ckpt.formats.megatron.rank_files import FILE, Shard, layout_of, names_of, open_shards
from mega_ckpt.formats.megatron.run_dir import check_free, released
from mega_ckpt.name_maps.alias import Foreign
from mega_ckpt.tensors.mapped_tensor import Stored, same
from mega_schema.arch import table
from mega_schema.checkpoint import MAIN, MODEL, OPTIMIZER
from mega_schema.errors import ConfigError, FormatError, LayoutError
from mega_schema.layout import Layout
from mega_schema.params import count
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import Tokenizer, open_tokenizer


def read(load: Path, reading: Reading) -> Source:
    """The checkpoint of a run's folder, or of one of its iterations.

    Raises:
        FormatError: a rank's file is missing, damaged or of another checkpoint, or the model has something
            that ours has not.
    """
    shards = open_shards(load)
    names, layout, first = names_of(shards), layout_of(shards), shards[0]
    padded = _padded(shards, names)
    spec = _spec(first, reading, padded, core=is_core(names))
    if spec.vocab > padded:
        wanted = f"{spec.vocab} or more"
        raise FormatError(f"{first.file}: vocabulary", "has fewer rows", found=padded, wanted=wanted)
    if spec.layers != sum(layout.dealt):
        raise FormatError(load, "layers in the files", found=sum(layout.dealt), wanted=spec.layers)
    tensors = [each for shard in shards for chunk in shard.chunks for each in chunk.values()]
    check_width(first.file, spec, sum(math.prod(each.shape) for each in tensors))
    held = _Held(spec, names, layout, padded // layout.tp)
    weights = [(shard, held.take(shard)) for shard in shards]
    handed_on = released(first.file.parent.parent)
    state, left = trainer(first, released=handed_on)
    optimizer = {} if handed_on else optimizer_spaces(weights)
    if optimizer is None or first.file.name != FILE:
        left.append("the optimizer's state, whose layout is not known")
    if spec.vocab < padded:
        left.append(f"{padded - spec.vocab:,} rows of padding")
    left += [f"copies of {name} that differ between ranks" for name in held.differing()]
    spaces, box, check_sums = gathered(load, spec, {MODEL: held.found, **(optimizer or {})})

    def verify(wanted: Collection[str]) -> None:
        check_sums(wanted)
        held.check_tied()

    return Source(
        first.file.parent.parent,
        spec,
        spaces,
        box,
        state,
        _tokenizer(first, reading, spec),
        left=tuple(left),
        verify=verify,
    )


def _spec(shard: Shard, reading: Reading, padded: int, *, core: bool) -> ModelSpec:
    """The model, by the arguments of its training; the first releases of 2019 kept none."""
    if shard.args:
        vocab = reading.vocab or megatron_args.known_vocab(shard.args) or padded
        return megatron_args.to_spec(shard.args, vocab, shard.file, core=core)
    if reading.model is None:
        wanted = "the arguments of the training"
        raise FormatError(f"{shard.file}: args", "missing", wanted=wanted, hint="--model megatron-345m")
    return replace(reading.model, vocab=reading.vocab or reading.model.vocab)


def _tokenizer(shard: Shard, reading: Reading, spec: ModelSpec) -> Tokenizer | None:
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    if reading.no_tokenizer or shard.args.get("tokenizer_type") != "NullTokenizer" or spec.vocab < 2:
        return None
    return open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1)


def _padded(shards: list[Shard], names: Names) -> int:
    """Rows of the embedding, all ranks together."""
    embedding = name(names, "embed.weight")
    found = [shard.chunks[0][embedding] for shard in shards if embedding in shard.chunks[0]]
    if not found or len(found[0].shape) != 2:
        raise FormatError(shards[0].file, "has no tensor", wanted=embedding)
    return found[0].shape[0] * len({shard.tp for shard in shards})


@dataclass(slots=True)
class _Held:
    """The weights that ranks hold, each held against what it must be, and one of every copy kept.

    Attributes:
        rows: of a rank's share of the vocabulary.
        found: what the model is made of.
    """

    spec: ModelSpec
    names: Names
    layout: Layout
    rows: int
    found: list[tuple[Foreign, Stored]] = field(default_factory=list)
    _firsts: dict[tuple[int, int, str], tuple[str, Stored]] = field(default_factory=dict)
    _alike: list[tuple[str, Stored, Stored]] = field(default_factory=list)
    _tied: dict[int, list[tuple[str, Stored]]] = field(default_factory=dict)

    def take(self, shard: Shard) -> list[list[Weight]]:
        """The weights of each chunk of a rank, in the order of the file.

        Raises:
            FormatError: a tensor is missing, unknown, or of another shape.
        """
        return [list(self._chunk(shard, number)) for number in range(len(shard.chunks))]

    def _chunk(self, shard: Shard, number: int) -> Iterator[Weight]:
        rows = {row.name: row for row in table(self.spec)}
        place = {each: count for count, each in enumerate(shard.chunks[number])}
        for foreign, there in sorted(self._matched(shard, number), key=lambda pair: place[pair[0].name]):
            row = rows[foreign.ours]
            if foreign.ours == "embed.weight" and self.spec.tied:
                self._tied.setdefault(shard.tp, []).append((f"{shard.file}: {foreign.name}", there))
            copy = foreign.ours == "embed.weight" and foreign.name != name(self.names, "embed.weight")
            if row.split is None:
                key = (shard.pp, number, foreign.name)
                ours, kept = self._firsts.setdefault(key, (foreign.ours, there))
                if kept is not there:
                    self._alike.append((ours, kept, there))
                    copy = True
            if not copy:
                self.found.append((foreign, there))
            yield Weight(there, row.decay, None if copy else foreign)

    def _matched(self, shard: Shard, number: int) -> Found:
        try:
            expected = list(
                of_chunk(
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
        return matched(shard.file, expected, shard.chunks[number])

    def check_tied(self) -> None:
        """Refuse a last stage whose copy of the embedding is another matrix.

        Raises:
            FormatError: it is.
        """
        for held in self._tied.values():
            for where, copy in held[1:]:
                if not same(held[0][1], copy):
                    raise FormatError(where, "is not the embedding, which it is tied to", hint=held[0][0])

    def differing(self) -> list[str]:
        """Parameters that every rank of tp has whole, and not all alike."""
        return sorted({ours for ours, one, other in self._alike if not same(one, other)})


def free(source: Source, run: Path, target: Target) -> None:
    """Refuse a model or a layout that Megatron has not, and a run that has this iteration already."""
    _check(source, run, target, core=False)


def write(source: Source, run: Path, target: Target) -> Written:
    """A checkpoint in the run's folder `run`, in the names up to release 23.08, which later ones read too."""
    return _write(source, run, target, core=False)


def free_core(source: Source, run: Path, target: Target) -> None:
    """As `free`, for the core class."""
    _check(source, run, target, core=True)


def write_core(source: Source, run: Path, target: Target) -> Written:
    """As `write`, for the core class; without the optimizer, whose order there is not documented."""
    return _write(source, run, replace(target, optimizer=False), core=True)


def _check(source: Source, run: Path, target: Target, *, core: bool) -> None:
    spec, layout = source.spec, target.layout
    megatron_args.from_spec(spec, source.where, core=core)
    if layout.vp > 1 and layout.pp == 1:
        raise LayoutError(
            "--vp", "stages of one rank need a pipeline", found=layout.vp, wanted=1, hint="--pp 2"
        )
    if spec.layers % (layout.pp * layout.vp):
        raise LayoutError(
            "--pp",
            "Megatron deals layers evenly",
            found=f"{spec.layers} layers for {layout.pp * layout.vp} stages",
            wanted=f"a divisor of {spec.layers}",
        )
    for pp in range(layout.pp):
        for chunk in range(layout.vp):
            list(of_chunk(spec, CORE_FUSED if core else LEGACY, layout, tp=0, pp=pp, chunk=chunk))
    others = source.spaces.keys() - {MODEL, *OPTIMIZER}
    if others and target.optimizer and not core:
        found = ", ".join(sorted(others))
        raise ConfigError(source.where, "is not Adam's state", found=found, wanted="Adam", hint="--no-optim")
    megatron_writer.check_trainer(source)
    check_free(run, source.iteration or None, force=target.force)


def _write(source: Source, run: Path, target: Target, *, core: bool) -> Written:
    dtype = None if target.dtype == KEEP else target.dtype
    spaces = taken(source.spaces, optimizer=target.optimizer, dtype=dtype)
    if set(spaces[MODEL].dtypes.values()) == {"F32"}:  # the model's weights are the optimizer's there
        spaces.pop(MAIN, None)
    elif FIRST in spaces and MAIN not in spaces:
        spaces[MAIN] = Taken(MODEL, dict.fromkeys(spaces[MODEL].dtypes, "F32"))
    names = CORE_FUSED if core else LEGACY
    writing = megatron_writer.Writing(source, target.layout, names, spaces, core)
    folder, size = writing.write(run, target.progress, force=target.force)
    return Written(folder, count(table(source.spec)), size, tokenizer=False)


FORMAT = Format(read, free, write, frozenset({"optimizer", "schedule"}))
CORE = Format(read, free_core, write_core, frozenset({"schedule"}))
