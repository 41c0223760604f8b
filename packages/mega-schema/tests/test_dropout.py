"""Dropout: its rate, its mask on every layout, and attention dropout."""

from __future__ import annotations

import itertools
from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.context_parallel import token_positions
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys

ONE = Axis("tp")
WHOLE_32, WHOLE_64 = (1 << 32) - 1, (1 << 64) - 1


def _dropout(samples: int = 4, length: int = 64, *, hidden: float = 0.1, seed: int = 1) -> Dropout:
    key_T = token_keys(seed, range(samples), torch.arange(length))
    return Dropout(hidden, 0.0, key_T, ONE)


def _drop_ones(dropout: Dropout, site: str = "layers.0.out", width: int = 128) -> Tensor:
    return dropout(site, torch.ones(dropout.token_T.shape[0], width)) == 0


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_as_many_are_dropped_as_asked_and_the_mean_stays(probability: float, width: int) -> None:
    dropout = _dropout(64, 256, hidden=probability)
    x = dropout("embed", torch.ones(64 * 256, width))
    deviation = (probability * (1 - probability) / x.numel()) ** 0.5
    assert abs(float((x == 0).float().mean()) - probability) <= 4 * deviation + 1e-5
    remaining = x[x != 0]
    assert float(remaining.min()) == float(remaining.max()) == pytest.approx(1 / (1 - probability), rel=1e-4)


def test_backward_drops_what_forward_dropped() -> None:
    x = torch.randn(256, 32, requires_grad=True)
    y = _dropout()("embed", x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), y.detach())


def test_whatever_differs_between_two_elements_they_are_dropped_independently() -> None:
    first = _drop_ones(_dropout(16, 256))
    others = {
        "seed": _drop_ones(_dropout(16, 256, seed=2)),
        "sample": first.roll(256, 0),
        "place": first.roll(1, 0),
        "column": first.roll(1, 1),
        "layer": _drop_ones(_dropout(16, 256), "layers.1.out"),
        "site": _drop_ones(_dropout(16, 256), "layers.0.down"),
        "place and column": first.roll((1, 1), (0, 1)),
        "place and column the other way": first.roll((1, -1), (0, 1)),
    }
    deviation = (0.01 * 0.99 / first.numel()) ** 0.5
    for name, dropout_mask in others.items():
        assert abs(float((first & dropout_mask).float().mean()) - 0.01) <= 5 * deviation, name


def test_the_counts_of_dropped_elements_spread_as_independent_ones_do() -> None:
    dropped = _drop_ones(_dropout(16, 256)).float()
    for dim in (0, 1):
        count = dropped.sum(dim)
        assert count.var().item() == pytest.approx(0.09 * dropped.shape[dim], rel=0.3 if dim == 0 else 0.1)


def test_the_choice_is_the_one_that_was_written_down() -> None:
    """The hash in Python integers: a resumed run has the same mask on any machine, with any torch."""
    dropped = _drop_ones(_dropout(2, 3, hidden=0.25), width=5)

    def key(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WHOLE_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WHOLE_64
        return z ^ (z >> 31)

    def uniform(row: int, column: int) -> int:
        low, high = row & WHOLE_32, row >> 32
        x = low ^ (column // 2 * 0x9E3779B9) & WHOLE_32
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WHOLE_32
        x = (((x ^ (x >> 15)) + high) * 0xD35A2D97) & WHOLE_32
        x ^= x >> 16
        half = x >> 16 if column % 2 else x & 0xFFFF
        return half - 65536 if half >= 32768 else half

    for sample, place, column in itertools.product(range(2), range(3), range(5)):
        token = mix((key(f"1/{sample}") + place * 0x9E3779B97F4A7C15) & WHOLE_64)
        wanted = uniform(mix(token ^ key("layers.0.out")), column) < 0.25 * 65536 - 32768
        assert bool(dropped[sample * 3 + place, column]) == wanted


def test_a_rank_drops_of_its_tokens_what_one_process_drops() -> None:
    whole = _drop_ones(_dropout(2, 16)).unflatten(0, (2, 16))
    for rank in range(2):
        mine_s = token_positions(16, Axis("cp", 2, rank))
        dropout = Dropout(0.1, 0.0, token_keys(1, range(2), mine_s), ONE)
        assert torch.equal(_drop_ones(dropout), whole[:, mine_s].flatten(0, 1))


def _run_attention(dropout: Dropout | None, *, causal: bool, apart: bool) -> list[Tensor]:
    """Attention over 3 rows of 16 tokens, and its gradients."""
    rng = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(48, n, 8, generator=rng).requires_grad_() for n in (4, 2, 2))
    document_BS = torch.randint(0, 2, (3, 16), generator=rng).cumsum(1) if apart else None
    out = PackedAttention(3, 16, document_BS, causal=causal, dropout=dropout)(0, q, k, v)
    out.square().sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_could_drop_and_drops_nothing_is_attention(causal: bool, apart: bool) -> None:
    never = Dropout(0.0, 1e-9, token_keys(1, range(3), torch.arange(16)), ONE)
    pairs = zip(
        _run_attention(never, causal=causal, apart=apart),
        _run_attention(None, causal=causal, apart=apart),
        strict=True,
    )
    for ours, torchs in pairs:
        torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=1e-5)


def test_attention_drops_weights_and_scales_the_rest() -> None:
    """Scores all alike and one-hot values: what comes out are the weights."""
    dropout = Dropout(0.0, 0.3, token_keys(1, range(8), torch.arange(64)), ONE)
    value = torch.eye(64)[:, None].repeat(8, 1, 1)
    weight = PackedAttention(8, 64, causal=False, dropout=dropout)(
        0, torch.zeros(512, 2, 64), torch.zeros(512, 1, 64), value
    )
    assert float((weight == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    torch.testing.assert_close(weight.max(), torch.tensor(1 / 64 / 0.7), rtol=1e-4, atol=0)
    both_dropped = (weight[:, 0] == 0) & (weight[:, 1] == 0)
    assert float(both_dropped.float().mean()) == pytest.approx(0.09, abs=0.01)  # each head by itself


def test_a_rank_of_heads_drops_what_the_whole_drops_there() -> None:
    key_T = token_keys(1, range(3), torch.arange(16))
    whole = Dropout(0.0, 0.3, key_T, ONE).score_keys(2, 3, 4)
    assert whole is not None
    shares = [Dropout(0.0, 0.3, key_T, Axis("tp", 2, rank)).score_keys(2, 3, 2) for rank in range(2)]
    assert torch.equal(torch.cat([share for share in shares if share is not None], 1), whole)
