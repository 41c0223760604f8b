"""The adapter gives the reference scores and texts of stories260K."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.operations.convert import convert
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder
from tests.shared_data import require_shared

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def stories() -> Path:
    return require_shared() / "data/checkpoints/stories260K"


@pytest.fixture(scope="module")
def expected_outputs(stories: Path) -> Any:
    return json.loads((stories / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def run(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories") / "run"
    convert(stories / "stories260K.bin", folder, "llama2c", "mega")
    return folder


def build_request(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_a_text_has_the_loss_of_the_float64_forward(run: Path, expected_outputs: Any) -> None:
    from mega_eval.harness import MegaLM

    expected = expected_outputs["scored"]
    # the reference scores no bos, which the harness adds to a text and scores unless it is told not to
    model = MegaLM(run, device="cpu", add_bos_token=False)
    (logprob,) = model.loglikelihood_rolling([build_request("loglikelihood_rolling", expected["text"])])
    targets = len(expected["ids"]) - 1
    assert -logprob / targets == pytest.approx(expected["mean_nll"], abs=1e-5)


def test_answers_are_the_tokens_of_the_float64_forward(run: Path, expected_outputs: Any) -> None:
    from mega_eval.harness import MegaLM

    model = MegaLM(run, device="cpu")
    tokenizer = open_tokenizer_folder(Checkpoint.open(run).tokenizer_folder)
    for case in expected_outputs["greedy"]:
        answer_ids = case["ids"][len(case["prompt_ids"]) :]
        settings = {"max_gen_toks": len(answer_ids), "do_sample": False}
        request = build_request("generate_until", case["prompt"], settings)
        assert model.generate_until([request]) == [tokenizer.decode(answer_ids)]
