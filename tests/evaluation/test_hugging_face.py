"""A Hugging Face folder gives the numbers of the checkpoint it converts to, and none of its code is run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_eval.cli import cli
from mega_eval.commands.model_options import build_options
from mega_eval.commands.model_source import open_model, run_other_rank
from mega_eval.models.hugging_face_model import HuggingFaceModel
from mega_eval.models.interface import GenerationRequest, RequestModel
from mega_eval.models.session import EvaluationSession
from mega_eval.windows import Window, as_tokens
from mega_model.distributed.mesh import World
from mega_schema.app import cli_runner
from mega_schema.errors import ConfigError, MegaError
from tests.evaluation.harness_models import CONTEXT, WORDS, convert_model, save_model, write_sentences

# of the libraries under transformers
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def open_folder(folder: Path, **values: object) -> RequestModel:
    return open_model(build_options({"load": folder, "device": "cpu"} | values))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of `transformers` and the checkpoint of the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder / "original", request.param)
    # options of generation that a greedy answer ignores
    (folder / "original/generation_config.json").write_text(
        '{"do_sample": true, "temperature": 3.0, "repetition_penalty": 9.0, "max_length": 3}'
    )
    convert_model(folder / "original", folder / "run")
    return folder / "original", folder / "run"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    save_model(folder, "llama")
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    sentences = write_sentences(20)
    passages = [*sentences, " ".join(sentences[:6])]  # the last is longer than the context
    questions = [
        {
            "question": text,
            "choices": [WORDS[n], WORDS[n + 1], " ".join(WORDS[n : n + 3])],
            "answer": n % 3,
        }
        for n, text in enumerate(sentences[:9])
    ]
    rows: dict[str, list[dict[str, Any]]] = {
        "lambada": [{"text": text} for text in passages],
        "perplexity": [{"text": text} for text in sentences],
        "choice": questions,
    }
    paths = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return paths


def evaluate(task: str, data: Path, load: Path, output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a task by the command line; return its result and its examples."""
    words = [task, "--data", data, "--load", load, "--output", output, "--device", "cpu", "--no-cache"]
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, [str(word) for word in words])
    assert not exit_info.value.code
    lines = output.with_suffix(".samples.jsonl").read_text("utf-8").splitlines()
    return json.loads(output.read_bytes()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("task", ["lambada", "perplexity", "choice"])
def test_a_task_gives_the_numbers_of_the_converted_checkpoint(
    pair: tuple[Path, Path], files: dict[str, Path], task: str, tmp_path: Path
) -> None:
    (result, examples), (expected, expected_examples) = (
        evaluate(task, files[task], load, tmp_path / f"{load.name}.json") for load in pair
    )
    for name, metric in expected["metrics"].items():
        assert result["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-4)
    assert len(examples) == len(expected_examples) > 0
    for example, reference in zip(examples, expected_examples, strict=True):
        assert example["prediction"] == reference["prediction"]
        assert example["scores"] == pytest.approx(reference["scores"], rel=1e-4, abs=1e-4)
        logprobs = [[token["logprob"] for token in side["tokens"]] for side in (example, reference)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert set(result["model"]["versions"]) == {"transformers"}
    same = ("tokenizer_sha256", "dtype", "parameters")
    assert [result["model"][key] for key in same] == [expected["model"][key] for key in same]


def test_answers_are_those_of_the_converted_checkpoint(pair: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(2, 300, length).tolist()) for length in (1, 9, 40, 70)]
    requests = [GenerationRequest(prompt, 20, ("]", "a")) for prompt in prompts]
    requests += [GenerationRequest(prompt, 20) for prompt in prompts]
    answers = [EvaluationSession(open_folder(load)).generate(requests) for load in pair]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 4  # some end at a stop string


def test_continuations_of_a_batch_are_those_of_each_prompt_alone(pair: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(6)
    # the longest prompt and the longest answer together exceed the context
    sizes = [(CONTEXT - 4, 4), (2, CONTEXT - 3), *((int(n), int(n) % 9 + 3) for n in rng.integers(1, 40, 9))]
    requests = [
        GenerationRequest(tuple(rng.integers(2, 300, length).tolist()), most, ("]",))
        for length, most in sizes
    ]
    model = open_folder(pair[0])
    batches = list(model.generate_batches(requests))
    assert len(batches) < len(requests) / 2
    texts = dict(answer for batch in batches for answer in batch)
    for number, request in enumerate(requests):
        [[(_, alone)]] = model.generate_batches([request])
        assert texts[number] == alone
    answered = {number for number, _ in batches[0]}
    assert list(model.generate_batches(requests, answered)) == batches[1:]


def test_a_batch_that_does_not_fit_in_memory_is_cut_into_halves(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_folder(llama)
    requests = [GenerationRequest((5, 9, 2 + n), 3) for n in range(7)]
    expected = dict(answer for batch in model.generate_batches(requests) for answer in batch)
    generate = model._module.generate

    def fail_above_two(ids: torch.Tensor, **options: object) -> object:
        if len(ids) > 2:
            raise torch.OutOfMemoryError
        return generate(ids, **options)

    monkeypatch.setattr(model._module, "generate", fail_above_two)
    batches = list(model.generate_batches(requests))
    assert max(len(batch) for batch in batches) <= 2
    assert dict(answer for batch in batches for answer in batch) == expected

    def fail(*words: object, **options: object) -> object:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model._module, "generate", fail)
    with pytest.raises(ConfigError, match="a window of 6 tokens does not fit in memory"):
        list(model.generate_batches(requests))


def test_rows_of_the_model_without_token_have_probability_and_are_never_generated(folder: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )
    save_causal(folder, config, "LlamaForCausalLM")
    convert_model(folder, run := folder.parent / "run")
    models = [EvaluationSession(open_folder(load)) for load in (folder, run)]
    assert models[0].vocab_size == 600 > models[0].tokenizer.identity.vocab_size
    scores, expected = (model.score(random_windows()) for model in models)
    for score, target in zip(scores, expected, strict=True):
        assert score.logprobs == pytest.approx(target.logprobs, abs=1e-5)
    assert max(score.greedy_ids.max(initial=0) for score in scores) >= models[0].tokenizer.identity.vocab_size
    answers, expected_answers = (model.generate([GenerationRequest((5, 9, 2), 20)]) for model in models)
    assert answers == expected_answers
    assert len(models[0].tokenizer.encode(answers[0])) > 5


def random_windows() -> list[Window]:
    rng = np.random.default_rng(1)
    sizes = [(CONTEXT, 3), (CONTEXT, CONTEXT), (1, 1), (9, 2), (9, 9), (30, 1), (17, 4), (16, 0)]
    return [Window(as_tokens(rng.integers(2, 300, length + 1)), count) for length, count in sizes]


def test_scores_do_not_depend_on_the_batch(pair: tuple[Path, Path]) -> None:
    windows = random_windows()
    together = EvaluationSession(open_folder(pair[0])).score(windows)
    alone = EvaluationSession(open_folder(pair[0], micro_batch_size=1)).score(windows)
    checkpoint = EvaluationSession(open_folder(pair[1])).score(windows)
    for score, *references in zip(together, alone, checkpoint, strict=True):
        for reference in references:
            assert score.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
            assert score.greedy_ids.tolist() == reference.greedy_ids.tolist()


def test_only_batches_with_an_unanswered_window_are_computed(llama: Path) -> None:
    windows = random_windows()
    model = open_folder(llama, micro_batch_size=2)
    batches = [[number for number, _ in batch] for batch in model.score_batches(windows)]
    assert batches == [[0, 1], [5, 6], [3, 4], [2]]
    resumed_batches = [[number for number, _ in batch] for batch in model.score_batches(windows, {0, 1, 3})]
    assert resumed_batches == [[5, 6], [3, 4], [2]]


def test_a_batch_that_does_not_fit_in_memory_is_halved(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = random_windows()
    model = open_folder(llama)
    expected = EvaluationSession(model).score(windows)
    score_all = HuggingFaceModel._score

    def score_few(self: HuggingFaceModel, batch: Any) -> Any:
        if sum(window.input_length for window in batch) > limit:
            raise MemoryError
        return score_all(self, batch)

    monkeypatch.setattr(HuggingFaceModel, "_score", score_few)
    limit = 60
    for score, target in zip(EvaluationSession(model).score(windows), expected, strict=True):
        assert score.logprobs == pytest.approx(target.logprobs, abs=1e-5)
    limit = 20
    with pytest.raises(ConfigError, match=f"a window of {CONTEXT} tokens does not fit in memory"):
        EvaluationSession(model).score(windows)


def test_the_logits_of_targets_limit_a_batch(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_folder(llama)
    monkeypatch.setattr("mega_eval.models.hugging_face_model.MAX_LOGITS", 3 * model.vocab_size)
    windows = [Window(as_tokens(range(2, 13)), count) for count in (1, 1, 1, 1, 2, 2)]
    assert [len(batch) for batch in model.score_batches(windows)] == [3, 1, 1, 1]


def test_a_model_without_logits_to_keep_is_scored_too(llama: Path) -> None:
    model = open_folder(llama)
    assert isinstance(model, HuggingFaceModel)
    assert model._limits_logits
    expected = EvaluationSession(model).score(random_windows())
    model._limits_logits = False
    for score, target in zip(EvaluationSession(model).score(random_windows()), expected, strict=True):
        assert score.logprobs == pytest.approx(target.logprobs, abs=1e-5)


def test_the_identity_is_that_of_the_files_and_not_of_their_place(llama: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    first = open_folder(llama).identity
    assert open_folder(folder).identity.sha256 == first.sha256
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert open_folder(folder).identity.sha256 != first.sha256


def test_the_dtype_is_that_of_the_config(folder: Path) -> None:
    assert open_folder(folder, dtype="bfloat16").identity.dtype == "bfloat16"
    change_config(folder, dtype="bfloat16", torch_dtype="bfloat16")
    assert open_folder(folder).identity.dtype == "bfloat16"
    assert open_folder(folder, dtype="float32").identity.dtype == "float32"
    change_config(folder, dtype=None, torch_dtype=None)
    assert open_folder(folder).identity.dtype == "float32"


def test_a_sharded_folder_is_read(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    windows = random_windows()
    expected = EvaluationSession(open_folder(folder)).score(windows)
    module = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    for score, target in zip(EvaluationSession(open_folder(folder)).score(windows), expected, strict=True):
        assert score.logprobs == pytest.approx(target.logprobs, abs=1e-6)
    shards[0].unlink()
    with pytest.raises(MegaError, match=rf"{shards[0].name}: no such file, and .*index\.json names it"):
        open_folder(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"lm_head.weight": "../secret.safetensors"}}')
    with pytest.raises(MegaError, match="weight_map does not name files of the folder"):
        open_folder(folder)


def test_the_context_can_be_given(folder: Path) -> None:
    assert open_folder(folder).context_length == CONTEXT
    assert open_folder(folder, max_model_len=16).context_length == 16
    with pytest.raises(ConfigError, match=f"--max-model-len: is longer .* wanted at most {CONTEXT}"):
        open_folder(folder, max_model_len=CONTEXT + 1)


def save_causal(folder: Path, config: Any, architecture: str) -> None:
    """Save a random model of another architecture over the folder's."""
    import transformers

    torch.manual_seed(1)
    module = getattr(transformers, architecture)(config)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    module.save_pretrained(folder)


def test_a_context_that_the_config_does_not_tell_must_be_given(folder: Path) -> None:
    from transformers import BloomConfig

    vocab = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    config = BloomConfig(vocab_size=vocab, hidden_size=32, n_layer=1, n_head=2)
    save_causal(folder, config, "BloomForCausalLM")
    with pytest.raises(MegaError, match=r"does not tell the model's context.*hint: --max-model-len"):
        open_folder(folder)
    assert open_folder(folder, max_model_len=32).context_length == 32


def test_an_encoder_is_refused_whatever_its_class(folder: Path) -> None:
    from transformers import RobertaConfig

    vocab = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    config = RobertaConfig(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=34,
    )
    save_causal(folder, config, "RobertaForMaskedLM")
    with pytest.raises(MegaError, match=r"architectures: .* found \[.RobertaForMaskedLM.\]"):
        open_folder(folder)
    change_config(folder, architectures=["RobertaForCausalLM"])
    with pytest.raises(MegaError, match="its prediction of a token changes with later ones"):
        open_folder(folder)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def change(**values: object) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **values)


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def add_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


KERNEL = "attn_implementation: names program code, which is never run: found owner/kernel"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            change(auto_map={"AutoModel": "a.B"}),
            "config.json: auto_map: names program code .* hint: remove auto",
        ),
        (change(attn_implementation="owner/kernel"), KERNEL),
        (change(sub_config={"attn_implementation": "owner/kernel"}), KERNEL),
        (change(quantization_config={"bits": 4}), "quantization_config: the weights are quantized"),
        (change(transformers_weights="x.safetensors"), "transformers_weights: names other weights"),
        (change(model_type="mt5"), "model_type: is not of a causal model .* found mt5"),
        (change(model_type="t5"), "model_type: is of an encoder with a decoder, .* found t5"),
        (change(model_type="bert"), "model_type: is of an encoder, .* found bert"),
        (change(architectures={"a": []}), "architectures: is not a causal model"),
        (change(model_type=["t5"]), "model_type: is not of a causal model"),
        (
            change(architectures=["LlamaModel"]),
            r"is not a causal model: found \[.LlamaModel.\], wanted LlamaForCausalLM",
        ),
        (change(hidden_size=40), "cannot be run by transformers: found "),
        (change(num_hidden_layers="two"), "cannot be run by transformers: found "),
        (change(vocab_size=100), "cannot be run by transformers: found "),
        (pickle_weights, "has only pickled weights.*hint: mega-ckpt convert --from hf"),
        (remove("model.safetensors"), "has no weights: wanted model.safetensors or .* hint: hf download"),
        (remove("tokenizer.json"), "tokenizer.json: no such file; hint: python -c "),
        (cut_weights, "its weights are damaged: found .* hint: hf download"),
        (drop_head, "lacks weights: found 1 missing, such as lm_head.weight"),
        (add_adapter, "adapter_config.json: is of an adapter"),
        (break_config, "config.json: is not JSON"),
        (list_config, "config.json: is not a JSON object: found list"),
    ],
)
def test_a_folder_that_cannot_be_scored_is_refused(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(MegaError, match=message) as error:
        open_folder(folder)
    assert "\n" not in str(error.value)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_bytes())
    size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    content["added_tokens"].append({**content["added_tokens"][-1], "id": size, "content": "<more>"})
    path.write_text(json.dumps(content))
    with pytest.raises(
        MegaError, match=f"more tokens than the model: found {size + 1}, wanted at most {size}"
    ):
        open_folder(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_invariant": True}, "--batch-invariant: needs a checkpoint"),
        ({"tp": 2}, "--tp: needs a checkpoint"),
        ({"pp": 2}, "--pp: needs a checkpoint"),
        ({"dp": 2}, "--dp: needs a checkpoint"),
        ({"tokenizer": "x"}, "--tokenizer: needs --url"),
    ],
)
def test_options_of_other_sources_are_refused(llama: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_folder(llama, **values)


def test_every_rank_of_torchrun_refuses_it(llama: Path) -> None:
    world = World(2, 1, 1)
    with pytest.raises(ConfigError, match="torchrun: needs a checkpoint"):
        run_other_rank(replace(build_options({"load": llama}), world=world), world)


def test_without_transformers_the_error_names_the_extra_and_the_conversion(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as error:
        open_folder(llama)
    assert "transformers is not installed" in str(error.value)
    assert "mega-eval[hf]" in str(error.value)
    assert f"mega-ckpt convert --from hf --to mega --load {llama}" in str(error.value)
