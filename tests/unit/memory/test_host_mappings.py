"""Which of a process's memory a file backs, by the kernel's own list."""

import mmap
from pathlib import Path

import torch

from gracetune.memory.platform import anonymous_nbytes

MAPS = """\
1000-3000 r--p 00000000 08:01 17 /lib/some.so
3000-5000 rw-p 00000000 00:00 0
8000-9000 rw-p 00001000 08:01 18 /models/a b.safetensors
7f0000000000-7f0000010000 rw-p 00000000 00:00 0 [heap]
"""


def test_what_a_file_backs_is_told_from_the_rest(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text(MAPS)
    inside = [(0x1000, 1), (0x2FFF, 10), (0x8800, 100)]
    outside = [(0x3000, 1000), (0x9000, 10000), (0x10, 100000), (0x7F0000000000, 10**6)]
    assert anonymous_nbytes(tmp_path, inside) == 0
    assert anonymous_nbytes(tmp_path, [*inside, *outside]) == 1111000


def test_weights_made_here_are_private_and_those_of_a_mapped_file_are_not(tmp_path):
    proc, made = Path("/proc"), torch.zeros(1 << 20)
    assert anonymous_nbytes(proc, [(made.data_ptr(), made.nbytes)]) == made.nbytes
    (tmp_path / "weights").write_bytes(bytes(1 << 16))
    with (tmp_path / "weights").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        assert anonymous_nbytes(proc, [(tensor.data_ptr(), tensor.nbytes)]) == 0
        del tensor
        mapped.close()
