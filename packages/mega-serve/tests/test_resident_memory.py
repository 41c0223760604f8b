import mmap
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from mega_serve.execution import resident_memory
from mega_serve.execution.resident_memory import populate_in_background


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise(MADV_POPULATE_WRITE) is Linux's")
def test_arrays_become_resident_and_keep_their_content() -> None:
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("MADV_POPULATE_WRITE needs Linux 5.14")
    # a mapping of its own: numpy may reuse freed memory of this process, which is resident already
    array = np.frombuffer(mmap.mmap(-1, 96 << 20), np.uint8)
    array[7] = array[-1] = 42
    before = resident_bytes()
    thread = populate_in_background([array])
    assert thread is not None
    thread.join()
    assert resident_bytes() - before > 80 << 20
    assert array[7] == array[-1] == 42
    assert np.count_nonzero(array) == 2


def test_a_system_that_refuses_leaves_the_array_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_memory, "MADV_POPULATE_WRITE", 12345)
    array = np.frombuffer(mmap.mmap(-1, 8 << 20), np.uint8)
    before = resident_bytes() if sys.platform.startswith("linux") else 0
    thread = populate_in_background([array])
    if thread is not None:
        thread.join()
        assert resident_bytes() - before < 4 << 20
    assert not array.any()
