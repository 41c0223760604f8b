"""How the layers of a run are dealt to the stages of its pipeline, from the flags that say it."""

from __future__ import annotations

from dataclasses import replace

from mega_schema.errors import ConfigError, LayoutError
from mega_schema.parallel_layout import FIRST, LAST, VIRTUAL, Layout, split_layers
from mega_train.config import Parallel


def dealt(parallel: Parallel, layers: int, layout: Layout) -> Layout:
    """The layout with its virtual stages and the layers of every stage.

    Raises:
        ConfigError: two flags say different things.
        LayoutError: the layers cannot be dealt so.
    """
    for counted, given in (
        (
            ("--account-for-embedding-in-pipeline-split", parallel.count_embedding),
            (FIRST, parallel.first_layers),
        ),
        (("--account-for-loss-in-pipeline-split", parallel.count_head), (LAST, parallel.last_layers)),
    ):
        if counted[1] and given[1] is not None:
            raise ConfigError(counted[0], f"excludes {given[0]}", found="both", wanted="one of them")
    vp = _virtual(parallel, layers, layout.pp)
    sizes = split_layers(
        layers,
        pp=layout.pp,
        vp=vp,
        first=parallel.first_layers,
        last=parallel.last_layers,
        embedding=parallel.count_embedding,
        head=parallel.count_head,
    )
    even = sizes == split_layers(layers, pp=layout.pp, vp=vp) if layers >= layout.pp * vp else False
    return replace(layout, vp=vp, layers_per_stage=() if even else sizes)


def _virtual(parallel: Parallel, layers: int, pp: int) -> int:
    """Stages of each rank."""
    each, count, flag = (
        parallel.layers_per_virtual,
        parallel.virtual,
        "--num-layers-per-virtual-pipeline-stage",
    )
    given = {f: n for f, n in ((flag, each), (VIRTUAL, count)) if n is not None}
    for name, number in given.items():
        if number < 1:
            raise ConfigError(name, "not a count", found=number, wanted="1 or more")
        if pp == 1:
            hint = "leave it out, or --pipeline-model-parallel-size 2"
            raise ConfigError(
                name, "there is one pipeline rank", found=f"pp={pp}", wanted="2 or more", hint=hint
            )
    if len(given) == 2:
        raise ConfigError(VIRTUAL, f"excludes {flag}", found="both", wanted="one of them")
    if each is None:
        return 1 if count is None else count
    for name, said in ((FIRST, parallel.first_layers), (LAST, parallel.last_layers)):
        if said is not None:
            raise ConfigError(flag, f"excludes {name}", found="both", hint=f"{VIRTUAL} N, with {name} {said}")
    units = layers + parallel.count_embedding + parallel.count_head
    if units % (pp * each):
        whole = [n for n in range(1, units // pp + 1) if units % (pp * n) == 0]
        if whole:
            wanted = f"a number that divides {units} / {pp}: {', '.join(map(str, whole))}"
            hint = f"{flag} {min(whole, key=lambda n: abs(n - each))}"
        else:
            wanted, hint = f"a number of layers that pp={pp} divides", f"{VIRTUAL} 2 deals unevenly"
        found = f"{each} for {units} layers over pp={pp}"
        raise LayoutError(flag, "does not deal the layers evenly", found=found, wanted=wanted, hint=hint)
    return units // (pp * each)
