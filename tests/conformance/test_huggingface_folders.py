"""All forms of Hugging Face folders: several files, pickles, older names, tokenizers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mega_ckpt.tensors import safetensors_io
from mega_schema.checkpoint.reader import Checkpoint
from tests.conformance.hf_models import (
    CASES,
    byte_level,
    from_hugging_face,
    logits,
    mega_logits,
    save,
    to_hugging_face,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", ["gpt2", "qwen 2 tied with a window", "bloom"])
def test_a_folder_of_pickles_reads_as_one_of_safetensors(case: str, zipped: bool, tmp_path: Path) -> None:
    save(CASES[case](), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    weights = load_file(tmp_path / "one" / "model.safetensors")
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    torch.save({"lr": 0.1}, tmp_path / "pickled" / "training_args.bin")
    shutil.copytree(tmp_path / "pickled", tmp_path / "cut")
    (tmp_path / "cut" / "pytorch_model.bin").unlink()
    where = {name: f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin" for i, name in enumerate(weights)}
    for file in set(where.values()):
        torch.save({n: weights[n] for n in weights if where[n] == file}, tmp_path / "cut" / file)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (tmp_path / "cut" / "pytorch_model.bin.index.json").write_text(index, "utf-8")
    runs = [
        from_hugging_face(tmp_path / name, tmp_path / f"{name}-run").folder
        for name in ("one", "pickled", "cut")
    ]
    first, *others = [(run / "model-00000.safetensors").read_bytes() for run in runs]
    assert others == [first, first]


def test_a_folder_of_several_files_is_loaded_by_transformers(tmp_path: Path) -> None:
    theirs = save(CASES["qwen 2"](), tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back", shard=20_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True).eval()
    token_BS = torch.arange(20)[None]
    assert torch.equal(logits(loaded, token_BS), logits(theirs, token_BS))


def _rename(folder: Path, name: Callable[[str], str], more: dict[str, np.ndarray]) -> None:
    """Write the weights again under other names, with others beside them."""
    file = folder / "model.safetensors"
    values = {
        name(n): np.array(e.values()) for n, e in safetensors_io.read_header(file).entries.items()
    } | more
    announced = [safetensors_io.TensorHeader(n, "F32", array.shape) for n, array in values.items()]
    header, _ = safetensors_io.build_header(announced, {"format": "pt"})
    file.write_bytes(header + b"".join(array.tobytes() for array in values.values()))


MASK, RATES = np.ones((1, 1, 24, 24), np.float32), np.ones(4, np.float32)
OLDER: dict[str, tuple[str, Callable[[str], str], dict[str, np.ndarray]]] = {
    "gpt-2 of OpenAI's: the model inside, with its masks": (
        "gpt2",
        lambda n: n.removeprefix("transformer."),
        {"h.0.attn.bias": MASK, "h.1.attn.masked_bias": RATES[:1]},
    ),
    "the bloom of BigScience": ("bloom", lambda n: n.removeprefix("transformer."), {}),
    "llama with its angles": ("llama", str, {"model.layers.1.self_attn.rotary_emb.inv_freq": RATES}),
    "pythia with masks and angles": (
        "pythia",
        str,
        {
            "gpt_neox.layers.0.attention.bias": MASK,
            "gpt_neox.layers.0.attention.masked_bias": RATES[:1],
            "gpt_neox.layers.1.attention.rotary_emb.inv_freq": RATES,
        },
    ),
    "gpt-neox by its names in transformers 5": ("pythia", lambda n: n.replace("embed_out", "lm_head"), {}),
    "a tied head beside the embedding": ("bloom", str, {"lm_head.weight": RATES}),
}


@pytest.mark.parametrize("form", OLDER)
def test_other_forms_of_a_folder_are_read_too(form: str, tmp_path: Path) -> None:
    case, name, more = OLDER[form]
    theirs = save(CASES[case](), tmp_path / "hf")
    if "lm_head.weight" in more:
        more = {"lm_head.weight": theirs.get_input_embeddings().weight.detach().numpy()}
    _rename(tmp_path / "hf", name, more)
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    token_BS = torch.arange(20)[None]
    torch.testing.assert_close(
        mega_logits(Checkpoint.open(tmp_path / "run"), token_BS),
        logits(theirs, token_BS),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("style", ["rope_theta", "rope_parameters", "rope_scaling"])
def test_both_styles_of_rope_keys_mean_the_same(style: str, tmp_path: Path) -> None:
    save(CASES["llama grouped"](), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))
    del config["rope_parameters"]
    config |= {
        "rope_theta": {"rope_theta": 7000.0, "rope_scaling": None},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}},
        "rope_scaling": {"rope_theta": 7000, "rope_scaling": {"type": "default"}},
    }[style]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), "utf-8")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    assert Checkpoint.open(tmp_path / "run").spec.rope_theta == 7000.0


def test_the_command_converts_and_transformers_loads_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    save(CASES["gpt2"](), tmp_path / "hf")
    vocab = {letter: i for i, letter in enumerate("abcdefgh")} | {"<|endoftext|>": 8}
    library = Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "hf" / "tokenizer.json"))
    left = "dropped: attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1\n"
    for words, message in (
        (("--from", "hf", "--to", "mega", "--load", "hf", "--save", "run"), left),
        (("--from", "mega", "--to", "hf", "--load", "run", "--save", "back"), ""),
    ):
        process = subprocess.run(
            [sys.executable, "-m", "mega_ckpt", "convert", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (process.returncode, process.stderr) == (0, message)
        assert "with a tokenizer" in process.stdout
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        tmp_path / "hf" / "tokenizer.json"
    ).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    assert tokenizer("fade")["input_ids"] == [5, 0, 3, 4]
    assert tokenizer.eos_token_id == 8
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").config.eos_token_id == 8


@pytest.mark.parametrize("own_file", [True, False])
def test_chats_and_what_ends_an_answer_come_back(own_file: bool, tmp_path: Path) -> None:
    save(CASES["llama grouped"](), tmp_path / "hf")
    byte_level(tmp_path / "hf")
    template = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    roles = {"eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24, **roles}
    files = {
        "tokenizer_config.json": json.dumps(config | ({} if own_file else {"chat_template": template})),
        "special_tokens_map.json": json.dumps(roles),
        "generation_config.json": json.dumps(
            {"eos_token_id": [10, 8], "temperature": 0.6, "do_sample": True}
        ),
    } | ({"chat_template.jinja": template} if own_file else {})
    for name, text in files.items():
        (tmp_path / "hf" / name).write_text(text, "utf-8")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    assert Checkpoint.open(tmp_path / "run").spec.vocab == 61
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    for name, text in files.items():
        assert (tmp_path / "back" / name).read_text("utf-8") == text, name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "fade"}], return_dict=False)
    assert chat == [9, 5, 0, 3, 4, 10]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True)
    assert model.generation_config.eos_token_id == [10, 8]
    assert model.config.eos_token_id == 10


def test_a_tokenizer_of_ours_is_loaded_with_its_roles(tmp_path: Path) -> None:
    save(CASES["qwen 3"](), tmp_path / "hf")
    byte_level(tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "special_tokens_map.json").read_bytes()) == {
        "eos_token": "<|endoftext|>"
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True)
    assert model.generation_config.eos_token_id == 8


def test_a_sentencepiece_model_alone_comes_along(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("a bad face, a faded cab\n" * 50, "utf-8")
    save(CASES["llama"](), tmp_path / "hf")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "hf" / "tokenizer"),
        vocab_size=30,
        model_type="bpe",
        minloglevel=2,
        add_dummy_prefix=True,
        num_threads=1,
    )
    (tmp_path / "hf" / "tokenizer.vocab").unlink()
    assert from_hugging_face(tmp_path / "hf", tmp_path / "run").tokenizer
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    model = (tmp_path / "hf" / "tokenizer.model").read_bytes()
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == model
    library = sentencepiece.SentencePieceProcessor()
    library.LoadFromSerializedProto(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    assert tokenizer("a bad cab")["input_ids"] == library.encode("a bad cab")
    assert tokenizer.eos_token_id == library.eos_id() == 2
