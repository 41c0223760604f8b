"""Which rank does what: ranks and coordinates, pipeline stages and layers. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mega_schema.errors import LayoutError


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
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vp: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @classmethod
    def of(cls, world: int, *, tp: int, pp: int, cp: int = 1, vp: int = 1) -> Layout:
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
        return cls(tp=tp, pp=pp, dp=world // copy, cp=cp, vp=vp)

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
        Layers that are left over go to the middle stages first: the ends carry the embedding and the head.

        Raises:
            LayoutError: a stage would have no layer.
        """
        stages, index = self.pp * self.vp, chunk * self.pp + pp
        if layers < stages:
            raise LayoutError(
                "--pipeline-model-parallel-size",
                "a stage would have no layer",
                found=f"{stages} stages for {layers} layers",
                wanted=f"at most {layers // self.vp}",
                hint=f"--pipeline-model-parallel-size {layers // self.vp}",
            )
        each, rest = divmod(layers, stages)
        inner_first = sorted(range(stages), key=lambda i: (i in (0, stages - 1), i))
        extra = set(inner_first[:rest])
        sizes = [each + (i in extra) for i in range(stages)]
        begin = sum(sizes[:index])
        return Stage(index, stages, range(begin, begin + sizes[index]))


WHOLE = Layout()
