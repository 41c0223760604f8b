"""Assign the layers of a run to the stages of its pipeline, by its flags."""

from __future__ import annotations

from dataclasses import replace

from mega_schema.errors import ConfigError, LayoutError
from mega_schema.parallel_layout import FIRST, LAST, VIRTUAL, Layout, split_layers
from mega_schema.spec import ModelSpec
from mega_train.config import ParallelConfig


def assign_layers(parallel: ParallelConfig, spec: ModelSpec, layout: Layout) -> Layout:
    """Return the layout with its virtual stages and the layers of every stage.

    Raises:
        ConfigError: two flags disagree, or a flag does not fit the model.
        LayoutError: the layers do not divide over the stages.
    """
    layers = spec.layers
    if parallel.split_rank is not None:
        sizes = _split_at_decoder(parallel, parallel.split_rank, spec, layout.pp)
        return replace(layout, vp=1, layers_per_stage=sizes)
    for counted_flag, layers_flag in (
        (
            ("--account-for-embedding-in-pipeline-split", parallel.count_embedding),
            (FIRST, parallel.first_layers),
        ),
        (("--account-for-loss-in-pipeline-split", parallel.count_head), (LAST, parallel.last_layers)),
    ):
        if counted_flag[1] and layers_flag[1] is not None:
            raise ConfigError(
                counted_flag[0], f"excludes {layers_flag[0]}", found="both", wanted="one of them"
            )
    vp = _virtual_stages(parallel, layers, layout.pp)
    sizes = split_layers(
        layers,
        pp=layout.pp,
        vp=vp,
        first=parallel.first_layers,
        last=parallel.last_layers,
        embedding=parallel.count_embedding,
        head=parallel.count_head,
    )
    is_even = sizes == split_layers(layers, pp=layout.pp, vp=vp) if layers >= layout.pp * vp else False
    return replace(layout, vp=vp, layers_per_stage=() if is_even else sizes)


def _split_at_decoder(parallel: ParallelConfig, split_rank: int, spec: ModelSpec, pp: int) -> tuple[int, ...]:
    """Split the encoder's layers over the ranks before `split_rank`, and the decoder's over the others."""
    flag = "--pipeline-model-parallel-split-rank"
    if spec.encoder_layers is None:
        raise ConfigError(flag, "applies to T5 only", found=split_rank, hint="mega-train t5, or leave it out")
    for conflicting, is_given in (
        (VIRTUAL, parallel.virtual is not None),
        ("--num-layers-per-virtual-pipeline-stage", parallel.layers_per_virtual is not None),
        (FIRST, parallel.first_layers is not None),
        (LAST, parallel.last_layers is not None),
        ("--account-for-embedding-in-pipeline-split", parallel.count_embedding),
        ("--account-for-loss-in-pipeline-split", parallel.count_head),
    ):
        if is_given:
            raise ConfigError(flag, f"excludes {conflicting}", found="both", wanted="one of them")
    decoder_layers = spec.layers - spec.encoder_layers
    smallest, largest = max(1, pp - decoder_layers), min(pp - 1, spec.encoder_layers)
    if not smallest <= split_rank <= largest:
        layers = f"{spec.encoder_layers} and {decoder_layers} layers"
        wanted = f"{smallest} to {largest}" if smallest <= largest else "another pipeline size"
        raise LayoutError(
            flag,
            "leaves a stage without layers",
            found=f"{split_rank} of {pp} ranks, for {layers}",
            wanted=wanted,
        )
    return split_layers(spec.encoder_layers, pp=split_rank) + split_layers(decoder_layers, pp=pp - split_rank)


def _virtual_stages(parallel: ParallelConfig, layers: int, pp: int) -> int:
    """Return the stages of each rank."""
    layers_per_stage = parallel.layers_per_virtual
    count = parallel.virtual
    flag = "--num-layers-per-virtual-pipeline-stage"
    counts = {f: n for f, n in ((flag, layers_per_stage), (VIRTUAL, count)) if n is not None}
    for name, number in counts.items():
        if number < 1:
            raise ConfigError(name, "not a count", found=number, wanted="1 or more")
        if pp == 1:
            hint = "leave it out, or --pipeline-model-parallel-size 2"
            raise ConfigError(
                name, "needs pipeline parallelism", found=f"pp={pp}", wanted="2 or more", hint=hint
            )
    if len(counts) == 2:
        raise ConfigError(VIRTUAL, f"excludes {flag}", found="both", wanted="one of them")
    if layers_per_stage is None:
        return 1 if count is None else count
    for name, layers_given in ((FIRST, parallel.first_layers), (LAST, parallel.last_layers)):
        if layers_given is not None:
            raise ConfigError(
                flag, f"excludes {name}", found="both", hint=f"{VIRTUAL} N, with {name} {layers_given}"
            )
    units = layers + parallel.count_embedding + parallel.count_head
    if units % (pp * layers_per_stage):
        divisors = [n for n in range(1, units // pp + 1) if units % (pp * n) == 0]
        if divisors:
            wanted = f"a number that divides {units} / {pp}: {', '.join(map(str, divisors))}"
            hint = f"{flag} {min(divisors, key=lambda n: abs(n - layers_per_stage))}"
        else:
            wanted, hint = f"a number of layers that pp={pp} divides", f"{VIRTUAL} 2 splits unevenly"
        found = f"{layers_per_stage} for {units} layers over pp={pp}"
        raise LayoutError(flag, "does not split the layers evenly", found=found, wanted=wanted, hint=hint)
    return units // (pp * layers_per_stage)
