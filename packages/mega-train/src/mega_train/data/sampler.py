"""Sample numbers of each rank, as a function of the number of consumed samples.

A resumed run therefore reads the same samples on any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from mega_schema.errors import ConfigError


class Sampler(Protocol):
    """Order in which sample numbers are read."""

    def micro_batches(self, consumed: int, count: int) -> Iterator[list[int]]:
        """Yield the sample numbers of this rank's next `count` micro-batches, from `consumed` samples on."""


@dataclass(frozen=True, slots=True)
class SequentialSampler:
    """Megatron's "single" sampler: samples in the order of the index, wrapping at the end.

    Each micro-batch takes the next micro · dp samples, rank r the r-th `micro` of them.
    """

    total: int
    micro: int
    dp: int
    rank: int

    def micro_batches(self, consumed: int, count: int) -> Iterator[list[int]]:
        for step in range(count):
            first = consumed + (step * self.dp + self.rank) * self.micro
            yield [(first + i) % self.total for i in range(self.micro)]


class CyclicSampler:
    """Megatron's "cyclic" sampler: samples shuffled in every epoch, seeded by the epoch's number.

    An epoch has the samples of whole micro-batches of all ranks. With `is_sharded`, every rank shuffles its
    own range, so the order depends on the layout; otherwise all ranks share one shuffled order, and a run
    resumes with the same samples on any layout with epochs of the same length.
    """

    def __init__(self, total: int, micro: int, dp: int, rank: int, *, is_sharded: bool) -> None:
        """Compute the samples of an epoch.

        Raises:
            ConfigError: there are fewer samples than one micro-batch of all ranks takes.
        """
        self.total = total
        self.micro = micro
        self.dp = dp
        self.rank = rank
        self.is_sharded = is_sharded
        self.step_samples = micro * dp
        self.epoch_samples = total - total % self.step_samples
        if not self.epoch_samples:
            raise ConfigError(
                "--dataloader-type",
                "cyclic needs a micro-batch for every rank",
                found=f"{total} samples",
                wanted=f"{self.step_samples}, micro-batch size x data parallel, or more",
                hint="--dataloader-type single",
            )
        self._cached_order: tuple[int, torch.Tensor] | None = None

    def micro_batches(self, consumed: int, count: int) -> Iterator[list[int]]:
        for step in range(count):
            epoch, position = divmod(consumed + step * self.step_samples, self.epoch_samples)
            if position % self.step_samples:
                raise ConfigError(
                    "--dataloader-type",
                    "cyclic cannot resume in the middle of a micro-batch",
                    found=f"{consumed} samples consumed, {self.epoch_samples} in an epoch",
                    wanted="a multiple of micro-batch size x data parallel = "
                    f"{self.step_samples} in the epoch",
                    hint="the layout that the run began with",
                )
            order = self._epoch_order(epoch)
            if self.is_sharded:
                numbers = order[position // self.dp :][: self.micro] + self.rank * len(order)
            else:
                numbers = order[position + self.rank :: self.dp][: self.micro]
            yield numbers.tolist()

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if self._cached_order is None or self._cached_order[0] != epoch:
            num_samples = self.total // self.step_samples if self.is_sharded else self.total // self.micro
            seed = torch.Generator().manual_seed(epoch)
            self._cached_order = epoch, torch.randperm(num_samples * self.micro, generator=seed)
        return self._cached_order[1]
