"""The parallel layout: ranks and coordinates, pipeline stages and layers. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mega_schema.errors import LayoutError

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline and the layers it holds, by their global numbers.

    A rank of an interleaved pipeline holds several (arXiv:2104.04473 §2.2). `index` counts the stages of all
    ranks in the order a micro-batch passes them; `count` is their total.
    """

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's position on each axis."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes. Ranks are numbered tp fastest, then cp, then dp, and pp slowest, as in Megatron.

    Attributes:
        tp, cp, dp, pp: number of ranks that share every layer, every sequence, every batch, and the depth.
        vp: stages of the pipeline on each rank of pp; it multiplies no ranks.
        layers_per_stage: layers of every stage, if not split evenly.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vp: int = 1
    layers_per_stage: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @classmethod
    def from_world_size(cls, world: int, *, tp: int, pp: int, cp: int = 1) -> Layout:
        """Return the layout of `world` ranks with these degrees; data parallel takes the rest.

        Raises:
            LayoutError: the ranks are not a whole number of model copies.
        """
        degrees = {
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": pp,
            "--context-parallel-size": cp,
        }
        for flag, degree in degrees.items():
            if degree < 1:
                raise LayoutError(flag, "not a degree", found=degree, wanted="1 or more")
        copy = tp * pp * cp
        if world % copy:
            by = f"tp={tp} x pp={pp}" + (f" x cp={cp}" if cp > 1 else "")
            raise LayoutError(
                "world size",
                "is not a multiple of tp x pp" + (" x cp" if cp > 1 else ""),
                found=f"{world} processes, {by} = {copy}",
                wanted=f"a multiple of {copy} processes",
                hint=f"torchrun --nproc-per-node {copy}",
            )
        return cls(tp=tp, pp=pp, dp=world // copy, cp=cp)

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world
        quotient, tp = divmod(rank, self.tp)
        quotient, cp = divmod(quotient, self.cp)
        pp, dp = divmod(quotient, self.dp)
        return Coordinates(tp, dp, pp, cp)

    def rank(self, coordinates: Coordinates) -> int:
        return coordinates.tp + self.tp * (
            coordinates.cp + self.cp * (coordinates.dp + self.dp * coordinates.pp)
        )

    def stage(self, pp: int, layers: int, chunk: int = 0) -> Stage:
        """Return the stage that is chunk `chunk` of pipeline position `pp`, in a model of `layers` layers.

        Stages go round the positions: the second round is chunk 1 of each position, and so on.

        Raises:
            LayoutError: a stage would have no layer.
        """
        sizes = self.layers_per_stage or split_layers(layers, pp=self.pp, vp=self.vp)
        assert sum(sizes) == layers
        index = chunk * self.pp + pp
        begin = sum(sizes[:index])
        return Stage(index, len(sizes), range(begin, begin + sizes[index]))


def split_layers(
    layers: int,
    *,
    pp: int,
    vp: int = 1,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    head: bool = False,
) -> tuple[int, ...]:
    """Split the layers over the pipeline stages as evenly as possible; return layers per stage.

    Remaining layers go to the middle stages first, because the ends hold the embedding and the head.

    Args:
        first, last: layers of the first and of the last position, all its stages together; None splits them
            too.
        embedding, head: count the embedding, the head, as a layer of its stage. Such a stage may then have no
            other layer.

    Raises:
        LayoutError: a stage would have no layer, or a layer no stage.
    """
    stages = pp * vp
    sizes: dict[int, int] = {}
    # remaining layers go to the chunks that hold neither the embedding nor the head
    for flag, wanted_layers, place_stages in (
        (FIRST, first, range(0, stages, pp)[::-1]),
        (LAST, last, range(pp - 1, stages, pp)),
    ):
        if wanted_layers is not None:
            sizes |= _fixed_sizes(flag, wanted_layers, layers, place_stages, pp)
    free = [stage for stage in range(stages) if stage not in sizes]
    units = layers + embedding + head - sum(sizes.values())
    if not free and units:
        found = f"{first} + {last} of {layers} layers"
        raise LayoutError(
            LAST, "does not leave every layer a stage", found=found, wanted=layers - (first or 0)
        )
    if units < len(free):
        raise _too_few_layers(units, len(free), layers, pp, vp, bool(sizes))
    even, remainder = divmod(units, max(1, len(free)))
    ends = {*([] if embedding else [0]), *([] if head else [stages - 1])}
    larger = sorted(free, key=lambda stage: (stage in ends, stage))[:remainder]
    sizes |= {stage: even + (stage in larger) for stage in free}
    sizes[0] -= embedding
    sizes[stages - 1] -= head
    return tuple(sizes[stage] for stage in range(stages))


def _fixed_sizes(flag: str, wanted_layers: int, layers: int, stages: range, pp: int) -> dict[int, int]:
    """Split the layers that were requested for one position over its stages."""
    if pp == 1:
        raise LayoutError(flag, "needs pipeline parallelism", wanted="a pipeline", hint="leave it out")
    if not len(stages) <= wanted_layers < layers:
        wanted = f"{len(stages)} to {layers - 1}"
        raise LayoutError(
            flag, "not a number of layers that a stage can have", found=wanted_layers, wanted=wanted
        )
    even, remainder = divmod(wanted_layers, len(stages))
    return {stage: even + (number < remainder) for number, stage in enumerate(stages)}


def _too_few_layers(units: int, free: int, layers: int, pp: int, vp: int, has_fixed: bool) -> LayoutError:
    what = "a stage would have no layer"
    if has_fixed:
        found = f"{units} layers left for {free} stages"
        return LayoutError(f"{FIRST}, {LAST}", what, found=found, wanted=f"at least {free} left")
    if vp > 1:
        found = f"{pp} x {vp} stages for {layers} layers"
        max_stages = layers // pp
        return LayoutError(
            VIRTUAL,
            what,
            found=found,
            wanted=f"at most {max_stages}",
            hint=f"{VIRTUAL} {max_stages}" if max_stages else "",
        )
    found = f"{pp} stages for {layers} layers"
    hint = f"--pipeline-model-parallel-size {layers}"
    return LayoutError(
        "--pipeline-model-parallel-size", what, found=found, wanted=f"at most {layers}", hint=hint
    )


WHOLE = Layout()
