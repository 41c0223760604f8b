"""A payload truncated by another process is an error, not a SIGBUS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CUT = """
import os, sys
from pathlib import Path
import numpy as np
from mega_data.inspect import document_text, verify_dataset
from mega_data.merge import merge_datasets
from mega_schema.errors import FormatError
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter
prefix, kind = Path(sys.argv[1]), sys.argv[2]
with IndexedWriter(prefix, np.int32) as writer:
    for _ in range(20):
        writer.add(np.arange(1000))
        writer.end_document()
data = IndexedDataset(prefix)
os.truncate(f"{prefix}.bin", 4096)
try:
    if kind == "verify":
        verify_dataset(data, 1000)
    elif kind == "inspect":
        document_text(data, 19, None, 100)
    else:
        dtype = np.dtype(np.int64) if kind == "convert" else None
        merge_datasets([data], prefix.with_name("new"), dtype=dtype)
except FormatError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["verify", "inspect", "merge", "convert"])
def test_a_payload_cut_off_while_it_is_open_is_named(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", CUT, str(tmp_path / "data"), kind]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, (process.returncode, process.stderr)  # -7 is SIGBUS
    assert process.stdout.startswith(
        f"{tmp_path}/data.bin: became shorter while it was read: found 4096, wanted "
    )
    assert {path.name for path in tmp_path.iterdir()} == {"data.bin", "data.idx"}
    assert np.fromfile(tmp_path / "data.bin", np.int32).tolist() == [*range(1000), *range(24)]
