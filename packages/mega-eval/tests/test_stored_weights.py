import pytest
import torch

from mega_eval.models.stored_weights import weight_reader
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint


@pytest.mark.parametrize(("stored", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_weights_are_read_in_the_dtype_they_are_stored_in(checkpoint_writer, tmp_path, stored, dtype):
    checkpoint = Checkpoint.open(checkpoint_writer(tmp_path / "run", stored=stored))
    read = weight_reader(checkpoint)
    rows = [row for row in table(checkpoint.spec) if row.tied_to is None]
    for name, slab in [(row.name, slab) for row in rows for slab in row.slabs(0, 1)]:
        weight = read(name, slab)
        assert weight.dtype == dtype
        assert torch.equal(weight.float(), torch.from_numpy(checkpoint.read(MODEL, name, slab)))
