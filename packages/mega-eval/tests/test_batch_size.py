"""The tokens of a forward pass, and the kernels of a decoder, by what the machine has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mega_eval.batch_size
from mega_eval.batch_size import CPU_TOKENS, choose_max_tokens, free_memory, is_out_of_memory
from mega_eval.models.decoder_kernels import choose_decoder_kernels
from mega_model.build import load_model
from mega_model.init import initial_values
from mega_model.kernels import dispatch
from mega_model.kernels.interface import OrderedLinear
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.spec import gpt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder():
    spec = gpt(layers=1, hidden=64, heads=2, vocab=50, max_seq_len=16)
    return load_model(spec, initial_values(table(spec), seed=1))


def test_a_pass_has_as_many_tokens_as_half_of_the_free_memory_holds(decoder, monkeypatch):
    # 4 bytes x (4 x 64 of the stream + 4 x 64 of attention + 2 x 256 around GELU), and 4 x 4 x 64
    token_bytes = 4 * (256 + 256 + 512) + 1024
    monkeypatch.setattr(mega_eval.batch_size, "free_memory", lambda device: 2 * 100 * token_bytes)
    assert choose_max_tokens(decoder) == 100
    monkeypatch.setattr(mega_eval.batch_size, "free_memory", lambda device: 10)
    assert choose_max_tokens(decoder) == 1
    monkeypatch.setattr(mega_eval.batch_size, "free_memory", lambda device: 1 << 40)
    assert choose_max_tokens(decoder) == CPU_TOKENS


def test_the_free_memory_of_this_machine_is_known():
    assert free_memory(CPU) > 1 << 20


def test_what_torch_and_numpy_raise_without_memory_is_recognized():
    for allocate in (lambda: np.empty(1 << 50), lambda: torch.empty(1 << 50)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_batch_invariant_kernels_are_refused_where_they_do_not_run(monkeypatch):
    def choose(device=CPU):
        return choose_decoder_kernels(device, batch_invariant=True)

    assert isinstance(choose().linear, OrderedLinear)
    with pytest.raises(ConfigError, match=r"--batch-invariant: has kernels for CPUs only: found cuda"):
        choose(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    with pytest.raises(ConfigError, match=r"needs numba, which is not installed; hint: .*mega-eval\[cpu\]"):
        choose()
