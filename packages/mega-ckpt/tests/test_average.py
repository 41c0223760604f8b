"""`average`: element-wise mean of the weights, in the dtype of the first source; models must be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.average import average, ema_weights
from mega_ckpt.operations.reshard import reshard
from mega_ckpt.tensors import dtypes, row_stream
from mega_schema.checkpoint.reader import MAIN, MODEL, Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, gpt


def _read_tensors(checkpoint: Checkpoint, space: str = MODEL) -> dict[str, np.ndarray]:
    tensors = checkpoint.tensors[space]
    return {name: checkpoint.read(space, name, whole_slab(t.shape)) for name, t in tensors.items()}


@pytest.fixture
def three(run_folder: Any, small_gpt: ModelSpec) -> list[Path]:
    scales = (1.0, -2.0, 0.25)
    return [run_folder(small_gpt, f"run{n}", iteration=n + 3, scale=s) for n, s in enumerate(scales)]


def test_a_plain_mean_is_the_mean(mega: Any, three: list[Path], tmp_path: Path) -> None:
    result = mega("average", *three, "--save", tmp_path / "mean")
    assert result.exit_code == 0, result.exception
    assert result.output == f"{tmp_path}/mean/iter_0000005: mean of 3, weights 0.3333 0.3333 0.3333\n"
    mean = Checkpoint.open(tmp_path / "mean")
    verify(mean)
    assert (mean.iteration, list(mean.tensors)) == (5, [MODEL])
    assert [parent["iteration"] for parent in mean.trainer["average_of"]] == [3, 4, 5]
    assert (mean.folder / "tokenizer" / "identity.json").is_file()
    sources = [_read_tensors(Checkpoint.open(run), MAIN) for run in three]
    for name, values in _read_tensors(mean).items():
        wanted = np.mean([source[name].astype(np.float64) for source in sources], axis=0)
        np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-7)


def test_weights_are_shares_of_their_sum(mega: Any, three: list[Path], tmp_path: Path) -> None:
    words = ("average", *three, "--save", tmp_path / "mean", "--weights", "2,0,6", "--json")
    assert json.loads(mega(*words).output)["weights"] == [0.25, 0.0, 0.75]
    first, _, three_ = (_read_tensors(Checkpoint.open(run), MAIN) for run in three)
    for name, values in _read_tensors(Checkpoint.open(tmp_path / "mean")).items():
        np.testing.assert_allclose(values, 0.25 * first[name] + 0.75 * three_[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.99])
def test_a_moving_average_is_what_each_step_makes_of_the_one_before(decay: float) -> None:
    values = np.random.default_rng(1).normal(size=7)
    state = values[0]
    for value in values[1:]:
        state = decay * state + (1 - decay) * value
    assert np.dot(ema_weights(7, decay), values) == pytest.approx(state)
    assert sum(ema_weights(7, decay)) == pytest.approx(1)


def test_bands_do_not_change_a_mean(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [Checkpoint.open(run) for run in three]
    single = _read_tensors(Checkpoint(average(sources, tmp_path / "one", [1, 2, 3])))
    monkeypatch.setattr(row_stream, "CHUNK_BYTES", 100)
    cut = [Checkpoint(reshard(s, tmp_path / f"cut{n}", Layout(tp=2))) for n, s in enumerate(sources)]
    two = _read_tensors(Checkpoint(average(cut, tmp_path / "two", [1, 2, 3])))
    assert all((two[name] == values).all() for name, values in single.items())


def test_the_mean_has_the_dtype_of_the_first(three: list[Path], tmp_path: Path) -> None:
    narrow = Checkpoint(reshard(Checkpoint.open(three[0]), tmp_path / "bf16", Layout(), dtype="bf16"))
    others = [Checkpoint.open(run) for run in three]
    mean = Checkpoint(average([narrow, *others[1:]], tmp_path / "mean", [1, 1, 1]))
    wide = _read_tensors(Checkpoint(average(others, tmp_path / "wide", [1, 1, 1])))
    for name, tensor in mean.tensors[MODEL].items():
        assert tensor.dtype == "BF16"
        wanted = dtypes.cast(wide[name], "F32", "BF16", name)
        assert (mean.read_raw(MODEL, name, whole_slab(tensor.shape)) == wanted).all()


def test_infinities_of_two_signs_average_to_no_number(run_folder: Any, tmp_path: Path) -> None:
    spec = gpt(layers=1, hidden=8, heads=4, vocab=11, max_seq_len=6)
    sources = [Checkpoint.open(run_folder(spec, n, scale=s)) for n, s in (("a", np.inf), ("b", -np.inf))]
    mean = _read_tensors(Checkpoint(average(sources, tmp_path / "mean", [1, 1])))
    assert np.isnan(mean["embed.weight"]).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--weights", "1,2"), "--weights: count: found 2, wanted 3"),
        (("--weights", "1,x,2"), "--weights: are not numbers: found 1,x,2; hint: --weights 0.5,0.3,0.2"),
        (("--weights", "1,-1,1"), "--weights: are not 0 or more with a sum above 0: found 1,-1,1"),
        (("--weights", "0,0,0"), "--weights: are not 0 or more"),
        (("--weights", "nan,1,1"), "--weights: are not 0 or more"),
        (("--ema", "1"), "--ema: is not a decay: found 1.0, wanted between 0 and 1"),
        (("--ema", ".9", "--weights", "1,1,1"), "--ema: excludes --weights"),
    ],
)
def test_what_are_no_weights_is_one_line(
    mega: Any, three: list[Path], tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    result = mega("average", *three, "--save", tmp_path / "mean", *flags)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)
    assert not (tmp_path / "mean").exists()


def test_two_models_have_no_mean(mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    first, second = (
        run_folder(small_gpt),
        run_folder(gpt(layers=1, hidden=8, heads=4, vocab=11, max_seq_len=6), "o"),
    )
    result = mega("average", first, second, "--save", tmp_path / "mean")
    assert str(result.exception) == (
        f"{second}/iter_0000003: model.layers: differs from that of {first}/iter_0000003: found 1, wanted 2"
    )


def test_a_source_is_neither_written_onto_nor_copied_when_damaged(three: list[Path], tmp_path: Path) -> None:
    sources = [Checkpoint.open(run) for run in three]
    with pytest.raises(ConfigError, match="--save: is the folder of a source"):
        average(sources, three[1], [1, 1, 1], force=True)
    file = sources[1].folder / "optim.main-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    with pytest.raises(FormatError, match=r"run1/iter_0000004/optim.main-00000.safetensors: .*crc32"):
        average(sources, tmp_path / "mean", [1, 1, 1])
    assert not (tmp_path / "mean").exists()
