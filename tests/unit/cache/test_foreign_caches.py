"""Reading cache files of other tools without executing what is in them."""

import gzip
import io
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from gracetune.cache.foreign_caches import read_foreign, read_pt
from gracetune.errors import CacheError


def save(path, value):
    torch.save(value, path)
    return path


def write_archive(path, program, storages=()):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
        for name, data in storages:
            file.writestr(f"archive/data/{name}", data)
    return path


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool],
    ids=str,
)
def test_plain_tensors_are_read_as_torch_wrote_them(tmp_path, dtype):
    tensor = (torch.arange(24) % 7).view(2, 3, 4).to(dtype)
    read = read_pt(save(tmp_path / "a.pt", tensor))
    assert torch.equal(read["latents"], tensor)
    assert read["latents"].dtype == dtype


def test_dicts_views_and_other_values_are_read(tmp_path):
    base = torch.arange(12.0)
    value = {"latents": base.view(3, 4).T, "shared": base[2:5], "note": "x", "n": (1, 2.5, None)}
    read = read_pt(save(tmp_path / "a.pt", value))
    assert set(read) == {"latents", "shared"}
    assert torch.equal(read["latents"], value["latents"])
    assert torch.equal(read["shared"], value["shared"])


def test_gzipped_files_are_read(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    (tmp_path / "a.pt").write_bytes(gzip.compress(buffer.getvalue()))
    entry = read_foreign(tmp_path / "a.pt")
    assert entry.stem == "a"
    assert entry.tensors["latents"].tolist() == [1, 1, 1]


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_in_a_file_is_executed(tmp_path, protocol):
    victim = tmp_path / "created by the file"
    program = pickle.dumps({"latents": Malicious(victim)}, protocol)
    with pytest.raises(CacheError, match="holds no plain tensors"):
        read_pt(write_archive(tmp_path / "a.pt", program))
    assert not victim.exists()
    pickle.loads(program)
    assert victim.exists(), "unpickling does execute it"


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02]X\x01\x00\x00\x00aX\x01\x00\x00\x00bs.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n).",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02))tR.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x09tQ.",
        b"\x80\x02h\x05.",
        b"\x80\x02K\x07.",
    ],
)
def test_malformed_pickles_are_refused(tmp_path, program):
    path = write_archive(tmp_path / "a.pt", program, [("0", bytes(8))])
    with pytest.raises(CacheError, match=r"a\.pt holds"):
        read_pt(path)


def test_a_tensor_outside_of_its_storage_is_refused(tmp_path):
    good = save(tmp_path / "good.pt", torch.zeros(4))
    with zipfile.ZipFile(good) as file:
        names = file.namelist()
        program = file.read(next(n for n in names if n.endswith("data.pkl")))
    shape = b"K\x04\x85"
    assert program.count(shape) == 1
    for longer, match in (
        (b"K\x40\x85", "outside of its storage"),
        (shape, "shorter than its header says"),
    ):
        data = bytes(16) if longer != shape else bytes(8)
        path = write_archive(tmp_path / "bad.pt", program.replace(shape, longer), [("0", data)])
        with pytest.raises(CacheError, match=match):
            read_pt(path)


def test_damaged_files_are_refused_by_name(tmp_path):
    for name, data in (("a.pt", b"no zip"), ("b.pt", b"\x1f\x8bxx"), ("c.safetensors", b"short")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CacheError, match=name):
            read_foreign(tmp_path / name)
    with pytest.raises(CacheError, match="no cache file"):
        read_foreign(tmp_path / "d.bin")


def test_metadata_of_ai_toolkit_is_read(tmp_path):
    folder = tmp_path / "_latent_cache"
    folder.mkdir()
    path = folder / "my_cat_abcdefghij_lmnopqrstu-.safetensors"
    save_file({"latent": torch.ones(2)}, path, {"crop_width": "64", "filename": "my_cat.jpg"})
    entry = read_foreign(path)
    assert entry.stem == "my_cat"
    assert entry.metadata == {"crop_width": 64, "filename": "my_cat.jpg"}
    assert entry.tensors["latents"].tolist() == [1, 1]
