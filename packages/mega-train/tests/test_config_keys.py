"""A setting has one name: its key is its flag with underscores."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from mega_schema.app.config import ConfigKey, config_keys, load_config, to_dict, to_toml
from mega_schema.errors import ConfigError
from mega_train.config import RunConfig

KEYS = list(config_keys(RunConfig))
DOCS = Path(__file__).parents[3] / "docs/howto"
RULE = "hint: a key is its flag with underscores; did you mean"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_every_key_is_its_flag_with_underscores(key: ConfigKey) -> None:
    on, *off = (flag.removeprefix("--").replace("-", "_") for flag in key.declared.split("/"))
    if off:
        assert off == [f"no_{on}"]
    assert key.name == (on.removeprefix("no_") if key.field.default is True else on)
    # a switch that is on by default needs a flag that turns it off, and only such a switch has one
    assert ("--no-" in key.declared) == (key.field.default is True)


def test_no_two_settings_have_one_key() -> None:
    assert [name for name, count in Counter(key.name for key in KEYS).items() if count > 1] == []


def test_what_is_written_has_these_keys() -> None:
    wanted = {key.dotted for key in KEYS}
    config = to_dict(RunConfig())
    assert {f"{section}.{name}" for section, values in config.items() for name in values} == wanted
    written = tomllib.loads(to_toml(RunConfig()))
    assert {f"{section}.{name}" for section, values in written.items() for name in values} < wanted


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("parallel.tp", "parallel.tensor_model_parallel_size"),
        ("parallel.pp", "parallel.pipeline_model_parallel_size"),
        ("parallel.virtual", "parallel.num_virtual_stages_per_pipeline_rank"),
        ("model.layers", "model.num_layers"),
        ("batch.micro", "batch.micro_batch_size"),
        ("batch.sequence_length", "batch.seq_length"),
        ("checkpoint.interval", "checkpoint.save_interval"),
        ("checkpoint.no_load_optim", "checkpoint.load_optim"),
        ("train.lr", "optimizer.lr"),
        ("parallel.tensor-model-parallel-size", "parallel.tensor_model_parallel_size"),
    ],
)
def test_a_key_that_is_no_flag_is_unknown(key: str, closest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, None, {}, [f"{key}=1"])
    assert str(caught.value) == f"--set: {key}: unknown key; {RULE} {closest}?"


@pytest.mark.parametrize("page", ["train.md", "blend.md"])
def test_a_file_of_the_documents_is_a_configuration(page: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "run.toml"
    file.write_text(block)
    assert load_config(RunConfig, file, {}) != RunConfig()
