"""The command `mega-train plan`."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from bench.plan import predictions
from bench.published_other_runs import OTHERS
from mega_train.cli import main

GPT3 = ("plan", "--preset", "megatron-175b", "--bf16", "--world", "1024", "--hardware", "a100")
CUT = (
    *("--tensor-model-parallel-size", "8", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "16", "--global-batch-size", "1536"),
)
HOW_TO = Path(__file__).parents[3] / "docs/howto/plan.md"


def run_plan(*argv: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0
    return out.getvalue()


def test_a_plan_tells_memory_traffic_flops_and_time() -> None:
    text = run_plan(*GPT3, *CUT)
    assert text.startswith("gpt, 174,615,846,912 parameters, bf16 on 1024 x A100 80GB SXM\n")
    assert "tp 8 x pp 16 x dp 8, 1f1b, zero 0, recompute none | 1536 samples x 2048 tokens a step" in text
    for word in ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "bubble", "MFU"):
        assert word in text
    assert re.search(r"model FLOPs 3\.38\de\+18 a step", text)
    assert len(text.splitlines()) < 20


def test_a_plan_of_modernbert_counts_its_parameters() -> None:
    words = ["plan", "--preset", "modernbert-base", "--seq-length", "1024"]
    text = run_plan(*words)
    assert run_plan(*words, "--bert-no-binary-head") == text
    assert text.startswith("bert, 149,655,232 parameters, fp32 on 1 x H100 80GB SXM\n")


def test_a_plan_as_json_says_the_same() -> None:
    plan = json.loads(run_plan(*GPT3, *CUT, "--json"))
    assert plan["parameters"] == 174_615_846_912
    assert plan["layout"] == {"tp": 8, "pp": 16, "dp": 8, "cp": 1, "vp": 1, "world": 1024}
    assert len(plan["memory_bytes"]) == 16
    for place in plan["memory_bytes"]:
        assert place.pop("total") == sum(place.values())
    seconds = dict(plan["seconds"])
    assert seconds.pop("step") == pytest.approx(sum(seconds.values()))
    assert plan["mfu"] == pytest.approx(plan["model_flops"] / plan["seconds"]["step"] / 1024 / 312e12)
    assert set(plan["sent_bytes"]) == {"tp", "cp", "pp", "dp"}


def test_a_file_says_it_as_well_as_flags_do(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "megatron-175b"\n[train]\nbf16 = true\n[batch]\nglobal_batch_size = 1536\n'
        "[parallel]\ntensor_model_parallel_size = 8\nsequence_parallel = true\n"
        "pipeline_model_parallel_size = 4\n[optimizer]\nlr_warmup_iters = 100\n"
        '[data]\ndata_path = "none"\nreset_attention_mask = true\n'
    )
    world = ("--world", "1024", "--hardware", "a100", "--json")
    assert json.loads(
        run_plan("plan", "--config", str(file), "--set", "parallel.pipeline_model_parallel_size=16", *world)
    ) == json.loads(run_plan(*GPT3, *CUT, "--json"))


@pytest.mark.parametrize(
    ("kernels", "slower"),
    [("triton", ()), ("compile", ()), ("flash-attn", ("attention",)), ("reference", ("stream",))],
)
def test_a_plan_is_of_the_kernels_that_were_asked_for(kernels: str, slower: tuple[str, ...]) -> None:
    llama = ("plan", "--preset", "llama3-8b", "--bf16", "--world", "8", "--hardware", "h100", "--json")
    batch = ("--global-batch-size", "8")
    auto, asked = (
        json.loads(run_plan(*llama, *batch, "--kernels", name))["seconds"] for name in ("auto", kernels)
    )
    assert {part for part in auto if asked[part] > auto[part]} == ({*slower, "step"} if slower else set())


def test_a_search_lists_layouts_and_the_flags_of_the_first() -> None:
    argv = (
        "plan",
        "--preset",
        "megatron-175b",
        "--bf16",
        "--world",
        "96",
        "--global-batch-size",
        "96",
        "--search",
    )
    text, rows = run_plan(*argv), json.loads(run_plan(*argv, "--json"))
    assert len(rows) == 10
    assert rows[0]["flags"] in text
    assert [e["fits"] for e in rows] == [True] * 10
    first = rows[0]["layout"]
    assert first["tp"] * first["pp"] * first["cp"] * first["dp"] == 96
    assert f"--tensor-model-parallel-size {first['tp']} " in rows[0]["flags"]


@pytest.mark.parametrize(
    ("model", "world", "batch"),
    [
        (("--preset", "llama2-70b", "--bf16", "--tp-comm-overlap", "--sequence-parallel"), "64", "128"),
        (("--preset", "llama3-8b", "--fp16"), "8", "32"),
        (("--preset", "megatron-8.3b", "--hardware", "a100"), "16", "64"),
    ],
)
def test_the_flags_of_a_search_are_a_plan_with_its_figures(
    model: tuple[str, ...], world: str, batch: str
) -> None:
    flags = ("plan", *model, "--world", world, "--json")
    overlap = "--tp-comm-overlap" in model
    tensor = ("--tensor-model-parallel-size", "2") if overlap else ()
    for row in json.loads(run_plan(*flags, *tensor, "--global-batch-size", batch, "--search"))[:5]:
        plain = [word for word in flags if word not in ("--tp-comm-overlap", "--sequence-parallel")]
        repeated_plan = json.loads(run_plan(*plain, *row.pop("flags").split()))
        assert repeated_plan == row


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; from mega_train.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code, *GPT3, *CUT], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert "MFU" in process.stdout


def test_the_how_to_has_the_figures_of_the_planner() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in HOW_TO.read_text("utf-8").splitlines()
        if line.startswith("| ") and line.count("|") == 10
    ]
    cells = [row for row in rows if row[0] != "table"]
    today = [*predictions(), *predictions(OTHERS)]
    assert [row[:3] for row in cells] == [[p.row.table, p.row.name, p.row.software] for p in today]
    for (*_, published, predicted, error, mark), p in zip(cells, today, strict=True):
        assert (mark == "fit") == p.row.fitted
        assert float(published) == pytest.approx(p.seconds, abs=0.006)
        assert float(predicted) == pytest.approx(p.estimate.seconds.step, abs=0.006)
        assert float(error) == pytest.approx(100 * p.error, abs=0.06)
