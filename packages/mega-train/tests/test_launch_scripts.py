"""Launch scripts of Megatron-LM, BigScience and fairseq: each is run by bash, and its command line validated.

The programs that a script starts are replaced by a function that prints its words. What follows the name of
`pretrain_gpt.py` then follows `mega-train validate`, as a person would type it.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, boxes_to_write
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import llama
from mega_train.cli import main
from tests.encoder_fixture import write_corpus as write_sentences

SCRIPTS = Path(__file__).parent / "launch_scripts"
BASH = shutil.which("bash")
STUBS = """
launch() { for word; do printf '%s\\0' "$word"; done; }
python() { launch "$@"; }
torchrun() { launch "$@"; }
srun() { launch "$@"; }
fairseq-train() { launch fairseq.py "$@"; }
"""

pytestmark = pytest.mark.skipif(BASH is None, reason="no bash on this machine to run the scripts with")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the scripts name, by the scripts' own variables."""
    folder = tmp_path_factory.mktemp("scripts")
    vocab = {chr(256 + number): number for number in range(50256)} | {"<|endoftext|>": 50256}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with IndexedWriter(folder / "data", np.uint16) as out:
        for begin in range(40):
            out.add(range(begin, begin + 50))
            out.end_document()
    (folder / "tokenizer").mkdir()
    model = tokenizers.models.WordLevel({f"w{number}": number for number in range(250_680)}, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer" / "tokenizer.json"))
    fairseq = folder / "fairseq"
    fairseq.mkdir()
    for name in ("train", "valid"):
        for suffix in (".bin", ".idx"):
            shutil.copy(folder / f"data{suffix}", fairseq / f"{name}{suffix}")
    _llama2(folder)
    write_sentences(folder / "sentences", described=False)
    names = {
        "FAIRSEQ_DATA": "fairseq",
        "TOKENIZER_MODEL": "tokenizer.model",
        "LLAMA_CHECKPOINT": "llama",
        "DATA_PATH": "data",
        "SENTENCES_PATH": "sentences",
        "BERT_VOCAB_FILE": "vocab.txt",
        "VOCAB_FILE": "vocab.json",
        "MERGE_FILE": "merges.txt",
        "TOKENIZER_NAME_OR_PATH": "tokenizer",
        "CHECKPOINT_PATH": "checkpoints",
        "TENSORBOARD_PATH": "tensorboard",
        "DATA_CACHE_PATH": "cache",
        "KILL_SWITCH_PATH": "kill-switch",
        "WORK": ".",
    }
    return {name: str(folder / file) for name, file in names.items()}


def _llama2(folder: Path) -> None:
    """A SentencePiece model, and a small Llama's checkpoint of its vocabulary."""
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e f g h"] * 20), model_writer=file, vocab_size=13, minloglevel=2
        )
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).vocab_size()
    spec = llama(layers=2, hidden=16, heads=2, ffn=32, vocab=size, max_seq_len=4096)
    save = CheckpointWriter(folder / "llama", 1)
    save.begin()
    rows = [row for row in table(spec) if row.tied_to is None]
    boxes = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write(MODEL, 0, boxes, lambda box: np.zeros(box.slab.shape, np.float32))
    save.commit(spec, layout=WHOLE, trainer={"iteration": 1, "consumed_samples": 8}, run_config="")


def words_of(script: str, variables: Mapping[str, str]) -> list[str]:
    """The words that a script hands to its program."""
    text = STUBS + (SCRIPTS / f"{script}.sh").read_text("utf-8")
    process = subprocess.run(
        [BASH or "bash", "-euc", text], env=dict(variables), capture_output=True, check=True
    )
    words = process.stdout.decode().split("\0")[:-1]
    return words[next(place for place, word in enumerate(words) if word.endswith(".py")) + 1 :]


def mega_train(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `mega-train`."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(argv)
    assert isinstance(left.value.code, int)
    return left.value.code, out.getvalue(), err.getvalue()


# script, processes, and what must follow from it
ACCEPTED = {
    "megatron_2019": (8, {"tp": 2, "dp": 4, "global batch size": 32, "training iterations": 500_000}),
    "megatron_mp_v2.5": (8, {"tp": 2, "pp": 2, "dp": 2, "global batch size": 16, "model.vocab_size": 50257}),
    "megatron_mp_23.06": (8, {"tp": 2, "pp": 2, "dp": 2, "global batch size": 16, "model.vocab_size": 50257}),
    "megatron_bert_mp_23.06": (
        8,
        {"tp": 2, "pp": 2, "dp": 2, "global batch size": 16, "model.vocab_size": 204, "model.family": "bert"},
    ),
    "megatron_t5_mp_23.06": (
        8,
        {
            "tp": 2,
            "dp": 4,
            "global batch size": 128,
            "model.vocab_size": 304,
            "model.family": "t5",
            "sequence length": 512,
        },
    ),
    "megatron_gpt3_175b": (
        1024,
        {"tp": 8, "pp": 16, "training iterations": 111_354, "batch size of the first step": 16},
    ),
    "bigscience_tr8_104b": (512, {"tp": 4, "pp": 32, "dp": 4, "ZeRO stage": 1, "model.vocab_size": 50257}),
    "bigscience_tr11_176b": (
        384,
        {
            "tp": 4,
            "pp": 12,
            "dp": 8,
            "training iterations": 115_311,
            "model.vocab_size": 250_680,
            "model.make_vocab_size_divisible_by": 62720,
        },
    ),
    "bigscience_prefix_lm": (
        8,
        {
            "tp": 2,
            "pp": 2,
            "dp": 2,
            "ZeRO stage": 1,
            "batch size of the first step": 2,
            "training samples": 200,
        },
    ),
    "megatron_2026_llama3_8b_fp8": (8, {"cp": 2, "dp": 4, "model.vocab_size": 128_257, "ZeRO stage": 1}),
    "turkish_gpt2": (8, {"dp": 8, "gradient accumulation steps": 1, "model.vocab_size": 50257}),
    "megatron_llama2_finetune": (
        1,
        {
            "model.num_layers": 2,
            "model.normalization": "RMSNorm",
            "model.untie_embeddings_and_output_weights": True,
        },
    ),
    "fairseq_megatron_11b": (
        8,
        {"tp": 8, "model.num_layers": 72, "training iterations": 300_000, "global batch size": 2},
    ),
    "everyday_2026": (
        8,
        {"tp": 2, "dp": 4, "model.qk_layernorm": True, "model.num_query_groups": 8, "ZeRO stage": 1},
    ),
}
# the line that says that dropout is another than Megatron's is for the scripts that name none
WITHOUT_DROPOUT = {
    "megatron_2019",
    "megatron_mp_v2.5",
    "megatron_mp_23.06",
    "megatron_bert_mp_23.06",
    "megatron_t5_mp_23.06",
    "megatron_gpt3_175b",
    "bigscience_tr8_104b",
    "bigscience_tr11_176b",
    "bigscience_prefix_lm",
    "turkish_gpt2",
    "megatron_llama2_finetune",
}


def _validate(script: str, world: int, variables: Mapping[str, str]) -> tuple[int, str, str]:
    families = {
        "megatron_llama2_finetune": "llama",
        "megatron_bert_mp_23.06": "bert",
        "megatron_t5_mp_23.06": "t5",
    }
    family = ["--family", families.get(script, "gpt")]
    if script == "bigscience_prefix_lm":
        family.append("--prefix-lm")
    if script == "fairseq_megatron_11b":  # the folder of data is its first word, and it says the processes
        return mega_train("validate", *words_of(script, variables), *family, "--json")
    return mega_train("validate", *family, "--world", str(world), "--json", *words_of(script, variables))


@pytest.mark.parametrize("script", ACCEPTED)
def test_a_launch_script_is_accepted_as_it_is(script: str, variables: dict[str, str]) -> None:
    world, follows = ACCEPTED[script]
    code, out, err = _validate(script, world, variables)
    assert code == 0, err
    values = json.loads(out)
    assert {name: values[name] for name in follows} == follows
    assert ("are 0 unless given, 0.1 in Megatron" in err) == (script in WITHOUT_DROPOUT)


def test_every_script_is_tried() -> None:
    refused = {"megatron_2026_gpt3_175b"}
    assert {file.stem for file in SCRIPTS.iterdir()} == {*ACCEPTED, *refused}


def test_a_ramp_up_counted_in_iterations_is_refused_as_in_megatron(variables: dict[str, str]) -> None:
    code, _, err = _validate("megatron_2026_gpt3_175b", 1024, variables)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: --rampup-batch-size: needs a run counted in samples")
    code, out, err = _validate("megatron_2026_gpt3_175b", 1024, {**variables, "RAMPUP": ""})
    assert code == 0, err
    assert json.loads(out)["global batch size"] == 1536


def test_bigscience_trains_a_prefix_language_model_by_its_own_flags(variables: dict[str, str]) -> None:
    words = words_of("bigscience_prefix_lm", variables)
    one_process = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    shrunk = [*one_process, "--hidden-size", "16", "--seq-length", "32", "--kernels", "reference"]
    code, out, err = mega_train("prefix", *words, *shrunk)
    assert code == 0, err
    assert "iteration 10/" in out
    assert "validation at iteration 10" in out
