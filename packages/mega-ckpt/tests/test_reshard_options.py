"""Options of `reshard` besides tp and pp: dtypes, virtual stages, errors, failing disks."""

from __future__ import annotations

import _thread
import contextlib
import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.checkpoint.writer import namespaces_to_write
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_ckpt.operations.reshard import reshard
from mega_ckpt.tensors import dtypes
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MAIN, MODEL, OPTIMIZER, BoxToWrite, Checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import ConfigError, FormatError, LayoutError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, gpt


def _read_tensors(checkpoint: Checkpoint, space: str) -> dict[str, np.ndarray]:
    tensors = checkpoint.tensors[space]
    return {name: checkpoint.read_raw(space, name, whole_slab(t.shape)) for name, t in tensors.items()}


def _save_mixed(run: Path, spec: ModelSpec, *, largest: float = 1.0) -> Checkpoint:
    """Save the checkpoint of a bfloat16 run: bfloat16 weights, main weights and moments."""
    rows, rng = [row for row in table(spec) if row.tied_to is None], np.random.default_rng(4)
    main = {row.name: (largest * rng.normal(size=row.shape)).astype(np.float32) for row in rows}
    save = CheckpointWriter(run, 5)
    save.begin()

    def boxes_of(kind: str) -> list[BoxToWrite]:
        return [BoxToWrite(row.name, row.shape, whole_slab(row.shape), kind) for row in rows]

    save.write(MODEL, 0, boxes_of("BF16"), lambda box: dtypes.cast(main[box.name], "F32", "BF16", box.name))
    for space in OPTIMIZER:
        save.write(space, 0, boxes_of("F32"), lambda box: main[box.name])
    return Checkpoint(save.commit(spec, layout=Layout(), trainer={"iteration": 5}))


def test_a_rank_of_an_interleaved_pipeline_has_the_layers_of_each_of_its_stages(
    mega: Any, run_folder: Any, tmp_path: Path
) -> None:
    run = run_folder(gpt(layers=8, hidden=8, heads=4, vocab=11, max_seq_len=6))
    result = mega("reshard", "--load", run, "--save", tmp_path / "new", "--pp", 2, "--vp", 2, "--json")
    report = json.loads(result.output)
    new = Checkpoint.open(tmp_path / "new")
    verify(new)
    assert (report["tp"], report["pp"], report["vp"]) == (1, 2, 2)
    assert new.written_by == {"tp": 1, "pp": 2, "cp": 1, "dp": 1, "vp": 2}
    layers_of_rank = {
        number: {
            name.split(".")[1] if "layers." in name else name
            for name, tensor in new.tensors[MODEL].items()
            if tensor.pieces[0].file == f"model-{number:05d}.safetensors"
        }
        for number in (0, 1)
    }
    assert layers_of_rank[0] == {"0", "1", "4", "5", "embed.weight", "position.weight"}
    assert layers_of_rank[1] == {"2", "3", "6", "7", "final_norm.weight", "final_norm.bias"}


def test_more_stages_than_layers_are_refused(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="2 x 2 stages for 2 layers"):
        reshard(Checkpoint.open(run_folder(small_gpt)), tmp_path / "new", Layout(pp=2, vp=2))


def test_experts_are_not_cut_where_there_are_none(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    words = ("reshard", "--load", run_folder(small_gpt), "--save", tmp_path / "new")
    result = mega(*words, "--ep", 2)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        "--ep: the model has no experts: found 2, wanted 1; hint: leave --ep out"
    )
    assert mega(*words, "--ep", 1).exit_code == 0


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_weights_are_rounded_once_from_the_optimizers(
    mega: Any, small_gpt: ModelSpec, tmp_path: Path, kind: str
) -> None:
    old = _save_mixed(tmp_path / "run", small_gpt)
    result = mega(
        "reshard", "--load", tmp_path / "run", "--save", tmp_path / "new", "--dtype", kind, "--tp", 2
    )
    assert result.exit_code == 0, result.exception
    new = Checkpoint.open(tmp_path / "new")
    verify(new)
    main, weights = _read_tensors(old, MAIN), _read_tensors(new, MODEL)
    for name, values in weights.items():
        wanted = dtypes.cast(main[name], "F32", dtypes.NAMES[kind], name)
        assert (values == wanted).all(), name
    assert set(new.tensors) == {MODEL, *OPTIMIZER} - ({MAIN} if kind == "fp32" else set())
    for space in set(new.tensors) - {MODEL}:
        assert {tensor.dtype for tensor in new.tensors[space].values()} == {"F32"}
        assert all((v == main[name]).all() for name, v in _read_tensors(new, space).items()), space


def test_narrower_weights_leave_the_optimizer_its_float32_ones(small_gpt: ModelSpec, tmp_path: Path) -> None:
    wide = reshard(_save_mixed(tmp_path / "run", small_gpt), tmp_path / "wide", Layout(tp=2), dtype="fp32")
    assert MAIN not in Checkpoint(wide).tensors
    back = Checkpoint(reshard(Checkpoint(wide), tmp_path / "back", Layout(), dtype="bf16"))
    old = Checkpoint.open(tmp_path / "run")
    for space in (MODEL, *OPTIMIZER):
        was = _read_tensors(old, space)
        assert all((values == was[name]).all() for name, values in _read_tensors(back, space).items()), space


def test_without_the_optimizer_a_dtype_is_of_the_weights_alone() -> None:
    stored = {MODEL: {"w": "BF16"}, MAIN: {"w": "F32"}, "optim.exp_avg": {"w": "F32"}}
    assert namespaces_to_write(stored, optimizer=False, dtype="fp16").keys() == {MODEL}
    assert namespaces_to_write(stored, optimizer=False, dtype="fp16")[MODEL].space == MAIN
    assert namespaces_to_write({MODEL: {"w": "F32"}}, dtype="bf16").keys() == {MODEL}


def test_a_weight_that_float16_has_not_is_named(small_gpt: ModelSpec, tmp_path: Path) -> None:
    source = _save_mixed(tmp_path / "run", small_gpt, largest=1e6)
    with pytest.raises(FormatError, match=r"optim.main embed.weight: too large for F16: .*--dtype bf16"):
        reshard(source, tmp_path / "new", Layout(), dtype="fp16")
    assert not (tmp_path / "new").exists()


def test_verify_finds_weights_that_are_not_the_optimizers(
    mega: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    sound = _save_mixed(tmp_path / "run", small_gpt)
    report = json.loads(mega("verify", sound.folder, "--json").output)
    size = sum(piece.bytes for *_, piece in sound.pieces())
    assert report == {
        "folder": str(sound.folder), "sound": True, "tensors": 112, "pieces": 112, "bytes": size
    }  # fmt: skip
    save = CheckpointWriter(tmp_path / "other", 5)
    save.begin()
    for space, tensors in sound.tensors.items():
        whole = [BoxToWrite(name, t.shape, whole_slab(t.shape), t.dtype) for name, t in tensors.items()]
        bits = _read_tensors(sound, space)
        if space == MODEL:
            bits["layers.1.up.weight"][3, 2] ^= 1  # the last bit of one number
        save.write(space, 0, whole, lambda box, bits=bits: bits[box.name])
    replacement = Checkpoint(save.commit(small_gpt, layout=Layout(), trainer={"iteration": 5}))
    with pytest.raises(
        FormatError, match=r"model layers.1.up.weight: is not optim.main rounded to BF16: fou"
    ):
        verify(replacement)
    mended = Checkpoint(reshard(replacement, tmp_path / "mended", Layout(), dtype="bf16"))
    verify(mended)
    assert all(
        (bits == _read_tensors(sound, MODEL)[name]).all()
        for name, bits in _read_tensors(mended, MODEL).items()
    )


def test_infinities_and_no_numbers_are_weights_too(small_gpt: ModelSpec, tmp_path: Path) -> None:
    sound = verify(_save_mixed(tmp_path / "sound", small_gpt))
    for largest in (np.inf, np.nan):
        assert verify(_save_mixed(tmp_path / f"{largest}", small_gpt, largest=largest)) == sound


def _limit_file_size(size: int) -> Callable[[], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def limit() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))
    with _limit_file_size(6000)(), pytest.raises(MegaError) as caught:
        reshard(source, tmp_path / "new", Layout())
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 'new' / '.iter_0000003.partial'}: not written: found File too large"
    )
    assert "hint: free disk space" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("want", ["hf", "meta"])
def test_a_disk_that_takes_no_more_of_a_foreign_folder_is_one_line_too(
    run_folder: Any, small_llama: ModelSpec, tmp_path: Path, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = run_folder(small_llama)
    with (
        _limit_file_size(3000)(),
        pytest.raises(MegaError, match="out.*: not written: found File too large; hint"),
    ):
        convert(run, tmp_path / "out", "mega", want)
    monkeypatch.setattr(json, "dump", full)  # what is beside the weights
    with pytest.raises(
        MegaError, match="out.*: not written: found No space left on device; hint: free disk space"
    ):
        convert(run, tmp_path / "out", "mega", want)
    assert not list(tmp_path.glob("*out*"))


def test_a_disk_that_may_not_be_written_is_named(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(small_gpt)

    def refuses(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuses)
    result = mega("reshard", "--load", run, "--save", tmp_path / "new")
    assert isinstance(result.exception, OSError)  # which the command says with its path
    assert (result.exception.filename, result.exception.errno) == (str(tmp_path / "new"), errno.EROFS)


def test_a_file_that_was_cut_after_it_was_opened_is_refused(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))
    file = source.folder / "optim.main-00000.safetensors"

    def cut(_: int) -> Any:
        os.truncate(file, file.stat().st_size - 40)
        return contextlib.nullcontext(lambda _: None)

    with pytest.raises(FormatError, match=r"optim.main-00000.safetensors: ends early: found \d+ bytes"):
        reshard(source, tmp_path / "new", Layout(tp=2), progress=cut)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Background jobs of a shell ignore SIGINT, and the tests may run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_reshard_can_be_run_again(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))

    @contextlib.contextmanager
    def interrupt(_: int) -> Iterator[Callable[[int], object]]:
        moments = iter([_thread.interrupt_main])
        yield lambda _: next(moments, int)()

    with pytest.raises(KeyboardInterrupt):
        reshard(source, tmp_path / "new", Layout(tp=2), progress=interrupt)
    assert not (tmp_path / "new").exists()
    verify(Checkpoint(reshard(source, tmp_path / "new", Layout(tp=2))))


def test_what_a_killed_reshard_left_is_no_checkpoint_and_goes_with_the_next(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run, left = run_folder(small_gpt), tmp_path / "new" / ".iter_0000003.partial"
    left.mkdir(parents=True)
    (left / "model-00000.safetensors").write_bytes(b"half")
    assert "half-written .iter_0000003.partial" in str(mega("verify", tmp_path / "new").exception)
    assert mega("reshard", "--load", run, "--save", tmp_path / "new").exit_code == 0
    assert not left.exists()
    verify(Checkpoint.open(tmp_path / "new"))


@pytest.mark.parametrize("flag", ["--force", "--overwrite"])
def test_both_names_of_force_replace(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, flag: str
) -> None:
    run, target = run_folder(small_gpt), run_folder(small_gpt, "there", scale=2.0)
    assert "add --force" in str(mega("reshard", "--load", run, "--save", target).exception)
    assert mega("reshard", "--load", run, "--save", target, flag).exit_code == 0
    old, new = (_read_tensors(Checkpoint.open(folder), MODEL) for folder in (run, target))
    assert all((new[name] == values).all() for name, values in old.items())


def test_progress_is_told_every_byte(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    source, seen = Checkpoint.open(run_folder(small_gpt)), list[int]()

    @contextlib.contextmanager
    def count_bytes(total: int) -> Iterator[Callable[[int], object]]:
        yield seen.append
        assert sum(seen) == total

    new = Checkpoint(reshard(source, tmp_path / "new", Layout(tp=2), progress=count_bytes))
    assert sum(seen) == sum(piece.bytes for *_, piece in new.pieces())
    seen.clear()
    verify(new, count_bytes)
    assert sum(seen) == sum(piece.bytes for *_, piece in new.pieces())
