"""Options that do not fit each other or the model are refused before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_schema.errors import ConfigError, LayoutError
from mega_schema.spec import gpt
from mega_serve.engine.option_checks import check_context_length, check_device, check_follow, check_layout

SPEC = gpt(layers=6, hidden=48, heads=12, vocab=100, max_seq_len=64)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_a_device_is_accepted_whether_this_machine_has_it_or_not(device: str) -> None:
    check_device(device, "bfloat16")


@pytest.mark.parametrize("device", ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:0 "])
def test_a_name_of_no_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="--device: no such device"):
        check_device(device, "float32")


def test_int8_is_refused_on_a_gpu_and_accepted_on_a_cpu() -> None:
    check_device("cpu", "int8")
    check_device("auto", "int8")
    with pytest.raises(ConfigError, match="--dtype: int8 weights are for CPUs"):
        check_device("cuda:1", "int8")


def test_a_layout_is_accepted_exactly_where_it_divides_heads_and_layers() -> None:
    for tp in range(1, 14):
        for pp in range(1, 8):
            fits = 12 % tp == 0 and 6 % pp == 0
            if fits:
                check_layout(SPEC, tp, pp)
            else:
                with pytest.raises(LayoutError, match="--tp" if 12 % tp else "--pp"):
                    check_layout(SPEC, tp, pp)


def test_several_ranks_do_not_follow_a_run(tmp_path: Path) -> None:
    check_follow(True, 1, tmp_path)
    check_follow(False, 4, tmp_path)
    with pytest.raises(ConfigError, match="--follow: works with one process only: found 4 ranks"):
        check_follow(True, 4, tmp_path)


def test_one_checkpoint_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    check_follow(False, 1, folder)
    with pytest.raises(ConfigError, match="--follow: needs the folder of a run: .*; hint: --load ") as error:
        check_follow(True, 1, folder)
    assert error.value.hint == f"--load {tmp_path}"


def test_the_context_is_the_longest_sequence() -> None:
    assert [check_context_length(asked, 64) for asked in (None, 64, 1)] == [64, 64, 1]
    with pytest.raises(ConfigError, match="found 65, wanted at most 64"):
        check_context_length(65, 64)
