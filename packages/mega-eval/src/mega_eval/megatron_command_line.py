"""Read the command line of Megatron's `tasks/main.py` for its zero-shot tasks, LAMBADA and WIKITEXT103.

`megatron_flags.txt` has every flag of Megatron-LM from its first release to its tree of 2026 and of
BigScience's and DeepSpeed's forks. Flags of the model are compared with the checkpoint. Those of training,
devices and files of a run have no effect on an evaluation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec

FLAGS_FILE: Final = Path(__file__).with_name("megatron_flags.txt")
TOKENIZER_FLAGS: Final = (
    "--tokenizer-type",
    "--vocab-file",
    "--merge-file",
    "--tokenizer-model",
    "--vocab-size",
)
# the last that is present counts
BATCH_FLAGS: Final = ("--batch-size", "--eval-micro-batch-size", "--micro-batch-size")
# options of mega-eval with the same meaning
PARALLEL_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--model-parallel-size": "--tp",
        "--tensor-model-parallel-size": "--tp",
        "--pipeline-model-parallel-size": "--pp",
    }
)
SIMILAR = 0.8  # of difflib: below it a suggestion is more often wrong than right

_SIZES: Mapping[str, Callable[[ModelSpec], int]] = MappingProxyType(
    {
        "--num-layers": lambda spec: spec.layers,
        "--encoder-num-layers": lambda spec: spec.layers,
        "--hidden-size": lambda spec: spec.hidden,
        "--num-attention-heads": lambda spec: spec.heads,
        "--ffn-hidden-size": lambda spec: spec.ffn,
        "--kv-channels": lambda spec: spec.head_dim,
    }
)
_NAMES: Mapping[str, tuple[Callable[[ModelSpec], str], Mapping[str, str]]] = MappingProxyType(
    {
        "--normalization": (lambda spec: spec.norm, {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
        "--position-embedding-type": (
            lambda spec: spec.positions,
            {"learned_absolute": "learned", "absolute": "learned", "rotary": "rope"},
        ),
    }
)
_FACTS: Mapping[str, tuple[str, Callable[[ModelSpec], bool]]] = MappingProxyType(
    {
        "--swiglu": ("SwiGLU", lambda spec: spec.activation == "swiglu"),
        "--squared-relu": ("squared ReLU", lambda spec: spec.activation == "squared_relu"),
        "--untie-embeddings-and-output-weights": ("an output layer of its own", lambda spec: not spec.tied),
        "--disable-bias-linear": ("linear layers without biases", lambda spec: not spec.bias),
        "--use-rotary-position-embeddings": ("rotary positions", lambda spec: spec.positions == "rope"),
        "--apply-layernorm-1p": ("norms of 1 + weight", lambda spec: spec.norm_1p),
    }
)


@functools.cache
def list_flags() -> frozenset[str]:
    """Return the names of Megatron's flags."""
    return frozenset(FLAGS_FILE.read_text("utf-8").split())


def parse_flags(words: Sequence[str], own_flags: Collection[str]) -> dict[str, list[str]]:
    """Parse a command line into its flags with their values; a repeated flag counts by its last occurrence.

    Args:
        own_flags: flags that mega-eval has beside Megatron's.

    Raises:
        ConfigError: a word belongs to no flag, or a flag is unknown.
    """
    flags: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if not word.startswith("--"):
            if values is None:
                raise ConfigError(word, "belongs to no flag", hint="--valid-data FILE names the file")
            values.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in own_flags and name not in list_flags():
            close = get_close_matches(name, sorted({*own_flags, *list_flags()}), 1, SIMILAR)
            hint = f"did you mean {close[0]}?" if close else ""
            raise ConfigError(name, "is neither a flag of Megatron nor of mega-eval", hint=hint)
        values = flags[name] = [value] if equals else []
    return flags


def read_value(flags: Mapping[str, Sequence[str]], name: str) -> str | None:
    """Return the only value of a flag; None if the flag is absent.

    Raises:
        ConfigError: it has none, or several.
    """
    if name not in flags:
        return None
    if len(flags[name]) != 1:
        raise ConfigError(name, "needs one value", found=" ".join(flags[name]) or "none", wanted="one")
    return flags[name][0]


def read_count(flags: Mapping[str, Sequence[str]], name: str) -> int | None:
    """Return the value of a flag as a count; None if the flag is absent.

    Raises:
        ConfigError: it is not an integer above 0.
    """
    value = read_value(flags, name)
    if value is not None and not (value.isdecimal() and int(value)):
        raise ConfigError(name, "not a count", found=value, wanted="an integer above 0")
    return None if value is None else int(value)


def check_architecture(flags: Mapping[str, Sequence[str]], spec: ModelSpec) -> set[str]:
    """Compare the flags that describe the model with the model; return those that were compared.

    Raises:
        ConfigError: one of them describes another model.
    """
    checked = set()
    sizes = dict(_SIZES)
    if "--group-query-attention" in flags:
        sizes["--num-query-groups"] = lambda spec: spec.kv_heads
        checked.add("--group-query-attention")
    if spec.positions == "learned":  # other positions have no table, and so no length
        sizes["--max-position-embeddings"] = lambda spec: spec.max_seq_len
    for name, size_of in sizes.items():
        count = read_count(flags, name)
        if count is not None:
            checked.add(name)
            _compare(name, count, size_of(spec))
    for name, (name_of, translation) in _NAMES.items():
        value = read_value(flags, name)
        if value is not None:
            checked.add(name)
            _compare(name, translation.get(value, value), name_of(spec))
    for name, (description, is_fact) in _FACTS.items():
        if name in flags:
            checked.add(name)
            if not is_fact(spec):
                raise ConfigError(name, "describes another model", wanted=f"no {description}: leave it out")
    return checked


def _compare(name: str, value: object, own_value: object) -> None:
    if value != own_value:
        raise ConfigError(
            name,
            "describes another model than --load",
            found=value,
            wanted=own_value,
            hint=f"{name} {own_value}, or leave it out",
        )
