"""Headers of safetensors files: read as the library writes them, for every dtype that it can store."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.on_disk import FLOATS, header_text, read_header
from comfyui_onediff_guard.trust.foreign import Unreadable
from safetensors import torch as safetensors

STORED = list(safetensors._SIZE)
WEIGHTS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_header_of_every_dtype_of_library_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 8, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(3, 8, dtype=dtype)
    safetensors.save_file({"weight": tensor}, file := tmp_path / "a.safetensors")
    found = read_header(file).tensors["weight"]
    assert found.n_bytes == tensor.nbytes
    assert (found.dtype in FLOATS) == (dtype in WEIGHTS)


@pytest.mark.parametrize(("dtype", "bits"), {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}.items())
def test_dtypes_smaller_than_byte_are_counted_in_bits(tmp_path: Path, dtype: str, bits: int) -> None:
    """PyTorch itself has no tensors with these elements."""
    file, n_bytes = tmp_path / "a.safetensors", 24 * bits // 8
    header = json.dumps({"a": {"dtype": dtype, "shape": [24], "data_offsets": [0, n_bytes]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(n_bytes))
    assert read_header(file).tensors["a"].n_bytes == n_bytes
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Unreadable):
        read_header(file)


def test_too_long_or_truncated_header_is_refused(tmp_path: Path) -> None:
    """The library takes 12 s and 1.5 GB for one of 90 MB."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", 2**25 + 1))
    os.truncate(file, 2**26)
    for read in (read_header, header_text):
        with pytest.raises(Unreadable, match="has 33,554,433 bytes; the limit is 33,554,432"):
            read(file)
    file.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(Unreadable, match="cut off after 10 bytes"):
        header_text(file)
