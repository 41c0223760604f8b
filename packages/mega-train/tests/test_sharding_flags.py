"""Sharding flags, and pairs of them that are refused."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from mega_schema.errors import ConfigError
from mega_train.distributed.bucket_layout import ShardingConfig
from mega_train.resolve import ResolvedConfig


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ShardingConfig()),
        ({"use_distributed_optimizer": True}, ShardingConfig(stage=1)),
        ({"use_distributed_optimizer": True, "zero_stage": 3}, ShardingConfig(stage=3)),
        ({"zero_stage": 2, "ddp_bucket_size": 100}, ShardingConfig(stage=2, bucket_elements=100)),
        ({"overlap_grad_reduce": True, "DDP_impl": "'torch'"}, ShardingConfig(overlap_reduce=True)),
        ({"zero_stage": 1, "overlap_param_gather": True}, ShardingConfig(stage=1, overlap_gather=True)),
    ],
)
def test_flags_say_what_replicas_share(
    resolve_config: ResolveConfig, values: dict[str, Any], expected: ShardingConfig
) -> None:
    assert (
        resolve_config(**{f"parallel__{name}": value for name, value in values.items()}).sharding_config
        == expected
    )


def test_buckets_grow_with_the_replicas_as_megatrons(resolve_config: ResolveConfig) -> None:
    assert resolve_config(world=64, batch__global_batch_size=64).sharding_config.bucket_elements == 64_000_000
    assert resolve_config(world=16, batch__global_batch_size=16).sharding_config.bucket_elements == 40_000_000


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"zero_stage": 4}, "--zero-stage: no such stage: found 4, wanted 0 | 1 | 2 | 3"),
        (
            {"zero_stage": 0, "use_distributed_optimizer": True},
            "--zero-stage: disagrees with --use-distributed-optimizer: found 0, wanted 1 or more, or not "
            "given; hint: --zero-stage 1",
        ),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True},
            "--overlap-param-gather: has no effect, as every rank updates all weights: wanted "
            "a sharded optimizer; hint: --use-distributed-optimizer",
        ),
        ({"ddp_bucket_size": 0}, "--ddp-bucket-size: not a size: found 0, wanted 1 or more"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(**{f"parallel__{name}": value for name, value in values.items()})
    assert str(caught.value) == line
