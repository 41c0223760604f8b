"""Process groups as values that are passed down.

An `Axis` is a process group with the collectives that the model uses; an axis of size 1 is the identity, so
the one-process model runs the same code. A `Mesh` holds the axes of a run. Layers never call
torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout

from mega_model.distributed.pipeline_p2p import PipelineChannels
from mega_model.distributed.rendezvous import rendezvous
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Coordinates, Layout, Stage

Reduction = Literal["sum", "max", "min"]
# torch 2.13 renamed these two and warns about the old names, the only ones that 2.11 has
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = MappingProxyType({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})


@dataclass(frozen=True, slots=True)
class AsyncTensor:
    """A tensor that a running collective fills."""

    tensor: Tensor
    work: dist.Work | None = None
    source: Tensor | None = None  # input of the collective, kept alive until it is done

    def wait(self) -> Tensor:
        """Wait for the collective and return the tensor."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, as one rank sees it.

    Attributes:
        sequence: between the tensor-parallel regions each rank holds only its shard of the tokens (sequence
            parallelism, arXiv:2205.05198). Then `enter` all-gathers tokens instead of passing them on, and
            `leave` reduce-scatters instead of all-reducing.
        group: the process group; None if the axis has one rank.
        fused: with sequence parallelism on GPUs, run a collective and its adjacent matrix product as one
            operation over symmetric memory.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sequence: bool = False
    fused: bool = False

    def enter(self, x: Tensor) -> AsyncTensor:
        """Start to enter a tensor-parallel region (Megatron's f): gather tokens with sequence parallelism.

        Without it, the identity. Not differentiable; `mega_model.tensor_parallel_ops` has autograd functions.
        """
        if self.group is None or not self.sequence:
            return AsyncTensor(x)
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return AsyncTensor(whole, _gather(whole, x.contiguous(), group=self.group, async_op=True))

    def leave(self, x: Tensor) -> AsyncTensor:
        """Start to leave a tensor-parallel region (Megatron's g): all-reduce, or reduce-scatter tokens.

        `x` may be overwritten by the sum. Not differentiable.
        """
        if self.group is None:
            return AsyncTensor(x)
        x = x.contiguous()
        if not self.sequence:
            return AsyncTensor(x, dist.all_reduce(x, group=self.group, async_op=True))
        shard = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return AsyncTensor(shard, _scatter(shard, x, group=self.group, async_op=True), x)

    def local_shard(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a per-token tensor, outside the tensor-parallel regions."""
        return x.chunk(self.size)[self.rank] if self.sequence and self.group is not None else x

    def reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce `x` over the ranks in place, and wait. Not differentiable."""
        if self.group is not None:
            dist.all_reduce(x, _OPS[op], group=self.group)
        return x

    def all_reduce(self, x: Tensor) -> AsyncTensor:
        """Start to sum `x` over the ranks, in place. This and the next two are not differentiable."""
        return AsyncTensor(
            x, None if self.group is None else dist.all_reduce(x, group=self.group, async_op=True)
        )

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> AsyncTensor:
        """Start to sum `whole` over the ranks; this rank's shard goes to `shard`, maybe a view of `whole`."""
        return AsyncTensor(shard, _scatter(shard, whole, group=self.group, async_op=True), whole)

    def all_gather(self, whole: Tensor, shard: Tensor) -> AsyncTensor:
        """Start to gather the ranks' shards into `whole`, of which `shard` may be a view."""
        return AsyncTensor(whole, _gather(whole, shard, group=self.group, async_op=True), shard)

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive tensors at once, each with its peer's position on this axis; wait for all.

        Posted as one batch, so that two ranks that send to each other cannot deadlock.
        """
        if not sends and not receives:
            return
        assert self.group is not None
        peer: Callable[[int], int] = lambda position: dist.get_global_rank(self.group, position)  # type: ignore[arg-type]  # noqa: E731
        ops = [dist.P2POp(dist.isend, x.contiguous(), peer(to), self.group) for x, to in sends]
        ops += [dist.P2POp(dist.irecv, x, peer(source), self.group) for x, source in receives]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


@dataclass(frozen=True, slots=True)
class World:
    """The number of processes, and the rank of this one."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0

    @classmethod
    def from_env(cls) -> World:
        """Read torchrun's environment variables; without torchrun, one process.

        Raises:
            ConfigError: a variable does not hold a number.
        """
        return cls(_from_env("WORLD_SIZE", 1), _from_env("RANK", 0), _from_env("LOCAL_RANK", 0))


def _from_env(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        hint = f"unset {name}, or start with torchrun"
        raise ConfigError(
            name, "not a number", found=repr(text), wanted="an integer set by torchrun", hint=hint
        )
    return int(text)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of a run, as this rank sees them.

    Attributes:
        cp: ranks that share every sequence, each with its own tokens of it.
        replicas: dp and cp together: ranks that hold the same weights, whose gradients are summed.
            `replicas.rank` is dp.rank · cp.size + cp.rank.
        channels: point-to-point connections to the neighbours in the pipeline.
        store: key-value store of the rendezvous; None for one process.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    replicas: Axis = field(default_factory=lambda: Axis("replicas"))
    channels: PipelineChannels = field(default_factory=PipelineChannels)
    store: Store | None = None

    @classmethod
    def join(
        cls,
        layout: Layout,
        world: World,
        *,
        device: str = "cpu",
        sequence: bool = False,
        fused: bool = False,
        init_method: str = "env://",
        timeout_minutes: float = 10,
    ) -> Mesh:
        """Create the process groups of the axes with all other processes; a single process creates none.

        Args:
            device: "cpu" (gloo) or "cuda" (NCCL).
            sequence: sequence parallelism on the tp axis.
            fused: run collectives of the tp axis fused with the adjacent products.
            init_method: torch.distributed's init_method.
            timeout_minutes: a collective of any axis that takes longer is an error.
        """
        assert layout.world == world.size
        timeout = timedelta(minutes=timeout_minutes)
        local_device = torch.device("cuda", world.local_rank) if device == "cuda" else torch.device("cpu")
        if local_device.type == "cuda":
            torch.cuda.set_device(local_device)
        if world.size == 1:
            return cls(layout, 0, local_device)
        store = rendezvous(init_method, world.rank, world.size, timeout)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=PrefixStore("ranks", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=local_device if device == "cuda" else None,
        )
        # slowest first, as Layout numbers ranks
        sizes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if layout.dp > 1 and layout.cp > 1:
            mesh["dp", "cp"]._flatten("replicas")

        def axis(name: str, size: int, rank: int, sequence: bool = False, fused: bool = False) -> Axis:
            if size == 1:
                return Axis(name)
            group = mesh.get_group(name)
            _set_pg_timeout(timeout, group)  # init_device_mesh gives its groups torch's default
            return Axis(name, size, rank, group, sequence, fused)

        coordinates: Coordinates = layout.coordinates(world.rank)
        dp, cp = axis("dp", layout.dp, coordinates.dp), axis("cp", layout.cp, coordinates.cp, sequence=True)
        replicas = dp if cp.size == 1 else cp
        if layout.dp > 1 and layout.cp > 1:
            replicas = axis("replicas", layout.dp * layout.cp, coordinates.dp * layout.cp + coordinates.cp)
        return cls(
            layout,
            world.rank,
            local_device,
            axis("tp", layout.tp, coordinates.tp, sequence, fused),
            dp,
            axis("pp", layout.pp, coordinates.pp),
            cp,
            replicas,
            PipelineChannels.join(layout, world.rank, timeout=timeout),
            store,
        )

    def stage(self, layers: int, chunk: int = 0) -> Stage:
        """Return the pipeline stage that is chunk `chunk` of this rank, for a model of this many layers."""
        return self.layout.stage(self.pp.rank, layers, chunk)

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum of all ranks' numbers, on every rank."""
        if self.layout.world == 1:
            return number
        x = torch.tensor(number, device=self.device)
        for axis in (self.tp, self.replicas, self.pp):
            axis.reduce(x, "max")
        return int(x)

    def barrier(self) -> None:
        """Wait for every rank of the run."""
        if self.layout.world > 1:
            dist.barrier()

    def destroy(self) -> None:
        """Destroy the process groups. The axes cannot be used afterwards."""
        if self.layout.world > 1:
            dist.destroy_process_group()
