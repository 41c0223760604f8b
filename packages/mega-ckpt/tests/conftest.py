"""Two small models as checkpoints and as Hugging Face folders, made without torch or transformers."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mega_ckpt.cli import cli
from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface.names import aliases
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.tensors import safetensors_io
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, BoxToWrite
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import ModelSpec, gpt, llama
from mega_schema.tokenizer.tokenizer import open_tokenizer

Folder = Callable[..., Path]
Mega = Callable[..., Result]
Limited = Callable[..., "subprocess.CompletedProcess[str]"]
_MEMORY = 2 << 30  # bytes of address space, the libraries' included


@pytest.fixture
def small_gpt() -> ModelSpec:
    return gpt(layers=2, hidden=8, heads=4, vocab=11, max_seq_len=6)


@pytest.fixture
def small_llama() -> ModelSpec:
    return llama(layers=2, hidden=8, heads=4, kv_heads=2, ffn=6, vocab=11, max_seq_len=6)


@pytest.fixture
def mega() -> Mega:
    """Run the command; a MegaError is the result's exception."""
    return lambda *words: CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def run_limited() -> Limited:
    """Run mega-ckpt with so little memory that a list of a hostile length does not fit."""

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mega_ckpt", *map(str, words)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY)),
            env={"OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def hf_folder(tmp_path: Path) -> Folder:
    """Write a Hugging Face folder of a model with random weights.

    Args (of the function): `config` updates config.json, `tensors` maps the dict of tensors to another.
    """

    def make(
        spec: ModelSpec,
        name: str = "hf",
        *,
        config: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict,
    ) -> Path:
        folder, rng = tmp_path / name, np.random.default_rng(8)
        folder.mkdir()
        rows = {row.name: row for row in table(spec)}
        shapes = {alias.foreign: alias.unsharded_tensor(rows[alias.ours]).shape for alias in aliases(spec)}
        arrays = tensors({n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()})
        names = {"float32": "F32", "uint16": "BF16", "float16": "F16", "int32": "I32"}
        announced = [safetensors_io.TensorHeader(n, names[str(a.dtype)], a.shape) for n, a in arrays.items()]
        header, _ = safetensors_io.build_header(announced, {"format": "pt"})
        numbers = b"".join(array.tobytes() for array in arrays.values())
        (folder / "model.safetensors").write_bytes(header + numbers)
        written = {**config_json.from_spec(spec, "spec"), **(config or {})}
        (folder / "config.json").write_text(json.dumps(written), "utf-8")
        return folder

    return make


@pytest.fixture
def run_folder(tmp_path: Path) -> Folder:
    """Write a run with one checkpoint of a model, optimizer state and a tokenizer of 11 ids included."""

    def make(spec: ModelSpec, name: str = "run", *, iteration: int = 3, scale: float = 1.0) -> Path:
        run, rng = tmp_path / name, np.random.default_rng(9)
        open_tokenizer("NullTokenizer", vocab_size=10).save(tmp_path / "tokenizer")
        save = CheckpointWriter(run, iteration)
        save.begin()
        rows = [row for row in table(spec) if row.tied_to is None]
        whole = [BoxToWrite(row.name, row.shape, whole_slab(row.shape), "F32") for row in rows]
        for space in (MODEL, *OPTIMIZER):
            save.write(space, 0, whole, lambda box: (scale * rng.normal(size=box.whole)).astype(np.float32))
        trainer = {"iteration": iteration, "consumed_samples": 24}
        save.commit(
            spec,
            layout=WHOLE,
            trainer=trainer,
            tokenizer=tmp_path / "tokenizer",
            run_config="[train]\nseed = 7\n",
        )
        return run

    return make
