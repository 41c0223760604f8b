"""Which rank does what: ranks and coordinates, pipeline stages and layers. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mega_schema.errors import LayoutError

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline and the layers it holds, by their global numbers.

    A rank of an interleaved pipeline holds several (arXiv:2104.04473 §2.2): `index` counts all stages of all
    ranks in the order a micro-batch passes them, `count` is how many there are.
    """

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands on each axis."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes. Ranks are numbered tp fastest, then cp, then dp, and pp slowest, as in Megatron.

    Attributes:
        tp, cp, dp, pp: ranks that share every layer, every sequence, every batch, and the depth.
        vp: stages of the pipeline that each rank of pp holds; it multiplies no ranks.
        dealt: layers of every stage, where `deal` was asked for something else than evenly.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vp: int = 1
    dealt: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @classmethod
    def of(cls, world: int, *, tp: int, pp: int, cp: int = 1) -> Layout:
        """The layout of `world` ranks with these degrees; data parallel takes what remains.

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
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp, dp, pp, cp)

    def rank(self, at: Coordinates) -> int:
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    def stage(self, pp: int, layers: int, chunk: int = 0) -> Stage:
        """The stage that chunk `chunk` of pipeline place `pp` is, in a model of `layers` layers.

        Stages go around the places: the second round of them lies on each place's chunk 1, and so on.

        Raises:
            LayoutError: a stage would have no layer.
        """
        sizes = self.dealt or deal(layers, pp=self.pp, vp=self.vp)
        assert sum(sizes) == layers
        index = chunk * self.pp + pp
        begin = sum(sizes[:index])
        return Stage(index, len(sizes), range(begin, begin + sizes[index]))


def deal(
    layers: int,
    *,
    pp: int,
    vp: int = 1,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    head: bool = False,
) -> tuple[int, ...]:
    """How many layers each stage has, in the order of the stages, as evenly as can be.

    Layers that are left over go to the middle stages first: the ends carry the embedding and the head.

    Args:
        first, last: layers of the first and of the last place, all its stages together; None deals them too.
        embedding, head: count the embedding, the head, as a layer of the stage that holds it. Such a stage
            may then have no other.

    Raises:
        LayoutError: a stage would have no layer, or some layers no stage.
    """
    stages = pp * vp
    sizes: dict[int, int] = {}
    # what is left over goes to the chunks that hold neither the embedding nor the head
    for flag, given, held in (
        (FIRST, first, range(0, stages, pp)[::-1]),
        (LAST, last, range(pp - 1, stages, pp)),
    ):
        if given is not None:
            sizes |= _given(flag, given, layers, held, pp)
    free = [stage for stage in range(stages) if stage not in sizes]
    units = layers + embedding + head - sum(sizes.values())
    if not free and units:
        found = f"{first} + {last} of {layers} layers"
        raise LayoutError(
            LAST, "does not leave every layer a stage", found=found, wanted=layers - (first or 0)
        )
    if units < len(free):
        raise _too_few(units, len(free), layers, pp, vp, bool(sizes))
    each, rest = divmod(units, max(1, len(free)))
    ends = {*([] if embedding else [0]), *([] if head else [stages - 1])}
    more = sorted(free, key=lambda stage: (stage in ends, stage))[:rest]
    sizes |= {stage: each + (stage in more) for stage in free}
    sizes[0] -= embedding
    sizes[stages - 1] -= head
    return tuple(sizes[stage] for stage in range(stages))


def _given(flag: str, given: int, layers: int, stages: range, pp: int) -> dict[int, int]:
    """The layers that were asked for one place, over its stages."""
    if pp == 1:
        raise LayoutError(flag, "there is one place for all layers", wanted="a pipeline", hint="leave it out")
    if not len(stages) <= given < layers:
        wanted = f"{len(stages)} to {layers - 1}"
        raise LayoutError(flag, "not a number of layers that a stage can have", found=given, wanted=wanted)
    each, rest = divmod(given, len(stages))
    return {stage: each + (number < rest) for number, stage in enumerate(stages)}


def _too_few(units: int, free: int, layers: int, pp: int, vp: int, some_given: bool) -> LayoutError:
    what = "a stage would have no layer"
    if some_given:
        found = f"{units} layers left for {free} stages"
        return LayoutError(f"{FIRST}, {LAST}", what, found=found, wanted=f"at least {free} left")
    if vp > 1:
        found, most = f"{pp} x {vp} stages for {layers} layers", layers // pp
        return LayoutError(
            VIRTUAL, what, found=found, wanted=f"at most {most}", hint=f"{VIRTUAL} {most}" if most else ""
        )
    found = f"{pp} stages for {layers} layers"
    hint = f"--pipeline-model-parallel-size {layers}"
    return LayoutError(
        "--pipeline-model-parallel-size", what, found=found, wanted=f"at most {layers}", hint=hint
    )


WHOLE = Layout()
