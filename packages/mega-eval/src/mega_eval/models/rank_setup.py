"""Load one rank's part of a checkpoint, and join the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mega_eval.models.batch_generator import BatchGenerator, choose_max_cached
from mega_eval.models.decoder_kernels import choose_decoder_kernels
from mega_eval.models.decoder_model import choose_dtype
from mega_eval.models.rank_model import RankEngine, open_command_group
from mega_eval.models.rank_scorer import RankScorer
from mega_eval.models.stored_weights import weight_reader
from mega_model.build import build_model, fill_weights
from mega_model.devices import resolve_device
from mega_model.distributed.mesh import Mesh, World
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec

_MINUTES = 60.0  # for the slowest rank to load its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What every rank is started with; the fields are those of `open_checkpoint`."""

    load: str
    dtype: str
    device: str
    batch_size: int | None
    tp: int
    pp: int
    dp: int
    batch_invariant: bool = False

    @property
    def layout(self) -> Layout:
        """The parallel layout."""
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp)


def check_layout(checkpoint: Checkpoint, settings: RankSettings) -> None:
    """Check before other processes start that the model can be split.

    Raises:
        MegaError: it cannot, or the machine has too few GPUs, or bits would depend on the layout.
    """
    if settings.batch_invariant and settings.tp > 1:
        hint = "--pp or --dp instead of --tp"
        raise ConfigError("--batch-invariant", "sums over tensor-parallel ranks change the bits", hint=hint)
    if (indivisible := _find_indivisible(checkpoint.spec, settings.tp)) is not None:
        heads = checkpoint.spec.heads
        fitting = [tp for tp in range(1, heads + 1) if _find_indivisible(checkpoint.spec, tp) is None]
        raise LayoutError(
            "--tp",
            f"does not divide {f'the {heads} query heads' if heads % settings.tp else indivisible}",
            found=settings.tp,
            wanted=" | ".join(map(str, fitting)),
            hint=f"--tp {max(tp for tp in fitting if tp <= settings.tp)}",
        )
    if settings.pp > checkpoint.spec.layers:
        found = f"{settings.pp} stages for {checkpoint.spec.layers} layers"
        raise LayoutError(
            "--pp", "a stage would have no layer", found=found, hint=f"--pp {checkpoint.spec.layers}"
        )
    gpus = torch.cuda.device_count()
    if resolve_device(settings.device, where="--device").type == "cuda" and gpus < settings.layout.world:
        raise ConfigError(
            "--tp, --pp, --dp",
            "need a GPU for each rank",
            found=f"{settings.layout.world} ranks for {gpus} GPUs",
            hint="--device cpu, or torchrun over several hosts",
        )


def _find_indivisible(spec: ModelSpec, tp: int) -> str | None:
    """Return the first parameter that `tp` ranks cannot share; None if there is none."""
    for row in table(spec):
        try:
            row.local_shape(tp)
        except LayoutError as error:
            return str(error.where)
    return None


def open_engine(world: World, settings: RankSettings, init_method: str) -> RankEngine:
    """Join the other ranks and load this rank's part of the model."""
    checkpoint = Checkpoint.open(Path(settings.load))
    tokenizer = open_checkpoint_tokenizer(checkpoint)
    device = resolve_device(settings.device, where="--device").type
    mesh = Mesh.join(settings.layout, world, device=device, init_method=init_method, timeout_minutes=_MINUTES)
    dtype = choose_dtype(checkpoint, settings.dtype)
    kernels = choose_decoder_kernels(mesh.device, batch_invariant=settings.batch_invariant)
    rt = Runtime.from_mesh(mesh, checkpoint.spec, dtype=dtype, kernels=kernels)
    decoder = build_model(rt)
    fill_weights(decoder, weight_reader(checkpoint), rt)
    decoder.eval()
    scorer = RankScorer(decoder, mesh, batch_size=settings.batch_size)
    # as for the scorer, the rank with the least memory decides
    max_cached = -mesh.all_reduce_max(-choose_max_cached(decoder))
    generator = BatchGenerator(
        decoder, tokenizer, scorer, batch_size=settings.batch_size, max_cached=max(1, max_cached)
    )
    return RankEngine(mesh, scorer, generator, tokenizer, open_command_group())
