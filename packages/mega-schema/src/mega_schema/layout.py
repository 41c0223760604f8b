"""Which rank does what: ranks and coordinates, pipeline stages and layers. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mega_schema.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline and the layers it holds, by their global numbers."""

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


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes. Ranks are numbered tp fastest, then dp, and pp slowest, as in Megatron."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp

    @classmethod
    def of(cls, world: int, *, tp: int, pp: int) -> Layout:
        """The layout of `world` ranks with these degrees; data parallel takes what remains.

        Raises:
            LayoutError: the ranks are not a whole number of model copies.
        """
        for name, degree in (("tensor", tp), ("pipeline", pp)):
            if degree < 1:
                raise LayoutError(
                    f"--{name}-model-parallel-size", "not a degree", found=degree, wanted="1 or more"
                )
        if world % (tp * pp):
            raise LayoutError(
                "world size",
                "is not a multiple of tp x pp",
                found=f"{world} processes, tp={tp} x pp={pp} = {tp * pp}",
                wanted=f"a multiple of {tp * pp} processes",
                hint=f"torchrun --nproc-per-node {tp * pp}",
            )
        return cls(tp=tp, pp=pp, dp=world // (tp * pp))

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world
        return Coordinates(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def rank(self, at: Coordinates) -> int:
        return at.tp + self.tp * (at.dp + self.dp * at.pp)

    def stage(self, pp: int, layers: int) -> Stage:
        """The stage at pipeline place `pp` of a model of `layers` layers.

        Layers that are left over go to the middle stages first: the ends carry the embedding and the head.

        Raises:
            LayoutError: a stage would have no layer.
        """
        if layers < self.pp:
            raise LayoutError(
                "--pipeline-model-parallel-size",
                "a stage would have no layer",
                found=f"{self.pp} stages for {layers} layers",
                wanted=f"at most {layers}",
                hint=f"--pipeline-model-parallel-size {layers}",
            )
        each, rest = divmod(layers, self.pp)
        inner_first = sorted(range(self.pp), key=lambda i: (i in (0, self.pp - 1), i))
        extra = set(inner_first[:rest])
        sizes = [each + (i in extra) for i in range(self.pp)]
        begin = sum(sizes[:pp])
        return Stage(pp, self.pp, range(begin, begin + sizes[pp]))


WHOLE = Layout()
