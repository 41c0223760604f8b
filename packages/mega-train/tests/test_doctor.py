"""`mega-train doctor`."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mega_model import fp8
from mega_model.kernels import Kernels, dispatch
from mega_model.kernels.dispatch import KernelChoice, choose_kernels
from mega_model.kernels.verify import check_fp8
from mega_schema.errors import ConfigError
from mega_train.cli import app
from mega_train.commands import doctor


def test_it_says_what_there_is_whose_kernels_a_run_takes_and_that_they_are_right() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["torch"] == torch.__version__
    assert set(report["packages"]) >= {"triton", "liger", "apex", "flash-attn", "transformer_engine"}
    assert set(report["kernels"]) == {field.name for field in fields(Kernels)} | {"adamw", "fp8"}
    assert {test["kernel"] for test in report["tests"]} == set(report["kernels"])
    assert {test["dtype"] for test in report["tests"]} == {"float32", "bfloat16"}
    assert report["healthy"]
    assert report["seconds"] > 0


def test_a_kernel_that_is_wrong_is_told_and_the_exit_code_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, where: str) -> KernelChoice:
        right = choose_kernels("reference", torch.device("cpu"))
        return replace(right, kernels=replace(right.kernels, swiglu=lambda x: x[:, ::2]))

    monkeypatch.setattr(doctor, "choose_kernels", wrong)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"], standalone_mode=False)
    assert result.return_value == 1
    assert "swiglu           reference    float32: wrong; bfloat16: wrong" in result.stdout
    assert "not every kernel matches its reference" in result.stdout


def test_kernels_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="--kernels: liger is not installed; hint: pip install"):
        CliRunner().invoke(app, ["doctor", "--kernels", "liger"], catch_exceptions=False)


def test_a_gpu_without_fp8_is_told_and_is_no_illness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "unsupported_reason", lambda device: "a GPU of compute capability 8.0")
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"], standalone_mode=False)
    assert result.return_value == 0
    assert "fp8              none         -      a GPU of compute capability 8.0 has no such" in result.stdout
    assert "(not needed: FP8 is over torch's own products)" in result.stdout


@pytest.mark.parametrize(
    ("programs", "cc", "path", "message"),
    [
        (("gcc", "clang"), None, "gcc", ""),  # Triton's own order
        (("clang",), None, "clang", ""),
        (("gcc", "icx"), "icx", "icx", ""),
        ((), None, None, "none: neither gcc nor clang is on PATH and CC is unset; Triton"),
        (("gcc",), "icx", None, "none: CC=icx is not a program; Triton"),  # Triton does not look further
    ],
)
def test_the_c_compiler_that_triton_takes_is_named_and_a_missing_one_is_one_line(
    programs: tuple[str, ...],
    cc: str | None,
    path: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program in programs:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    report = doctor.collect_report("reference", "cpu")
    assert report["c_compiler"] == (path and str(tmp_path / path))
    assert report["healthy"], "a CPU needs no compiler"
    (line,) = (line for line in doctor.format_report(report).splitlines() if line.startswith("C compiler"))
    assert line.startswith(f"C compiler           {message or tmp_path / str(path)}")
    assert ("hint: apt-get install gcc libc6-dev" in line) is (path is None)


def test_fp8_products_that_are_wrong_or_fail_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, right = torch.device("cpu"), fp8.matmul
    assert check_fp8(cpu).ok
    monkeypatch.setattr(fp8, "matmul", lambda *arguments, **named: 1.5 * right(*arguments, **named))
    assert not check_fp8(cpu).ok

    def fails(*arguments: object, **named: object) -> None:
        raise RuntimeError("no such product")

    monkeypatch.setattr(fp8, "matmul", fails)
    assert check_fp8(cpu).failure == "RuntimeError: no such product"
