"""`mega-train` reads the blends that `mega-data mix` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mega_data.cli import commands
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import IndexedWriter, open_dataset
from mega_train.config import DataConfig
from mega_train.data.blend_spec import DataSpec, parse_data_spec


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("a", "b c"):
        with IndexedWriter(Path(name), "uint16") as writer:
            for _ in range(200):
                writer.add(rng.integers(0, 100, 20))
                writer.end_document()


def mix(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["mix", "--data-path", "0.25", "a", "0.75", "b c", "--output", "out", *words])
    assert end.value.code == 0


def prefixes(spec: DataSpec) -> list[str]:
    return [part.prefix.name for source in spec for part in source.parts]


@pytest.mark.usefixtures("sources")
def test_the_blend_of_a_mix_names_a_dataset_for_each_split() -> None:
    mix("--split", "80,20")
    spec = parse_data_spec(DataConfig(split_paths_file=Path("out/blend.json")))
    assert prefixes(spec) == ["train_document", "valid_document"]
    sizes = [len(open_dataset(source.parts[0].prefix).documents) - 1 for source in spec]
    assert sizes[0] == pytest.approx(320, abs=40)
    assert sizes[1] == pytest.approx(80, abs=25)


@pytest.mark.usefixtures("sources")
def test_a_blend_of_weights_names_the_sources() -> None:
    mix("--weights-only")
    spec = parse_data_spec(DataConfig(path_file=Path("out/blend.txt")))
    assert prefixes(spec)[:2] == ["a", "b c"]
    assert spec.training.weights == (0.25, 0.75)
    assert all(part.prefix.is_absolute() for part in spec.training.parts)
