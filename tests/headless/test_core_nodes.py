"""The core nodes of the local host read and write files as ComfyUI does."""

from __future__ import annotations

import errno
import struct
import warnings
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless import files
from comfyui_onediff_guard.headless.errors import OutputError, RunFailedError, WorkflowError
from comfyui_onediff_guard.headless.hosts import core_nodes, input_images
from comfyui_onediff_guard.headless.hosts.result import RunResult
from fake_comfy import picture
from PIL import Image, ImageSequence

Run = Callable[..., RunResult]


def video(prefix: str = "video/ComfyUI", fps: float = 8) -> dict[str, Any]:
    inputs = {"video": ["5", 0], "filename_prefix": prefix, "format": "auto", "codec": "auto"}
    return {
        "5": {"class_type": "CreateVideo", "inputs": {"images": ["1", 0], "fps": fps}},
        "2": {"class_type": "SaveVideo", "inputs": inputs},
    }


def webp(**changes: Any) -> dict[str, Any]:
    inputs = {"images": ["1", 0], "filename_prefix": "w", "fps": 8.0, "lossless": True, "quality": 80}
    return {"2": {"class_type": "SaveAnimatedWEBP", "inputs": inputs | {"method": "fastest"} | changes}}


def test_save_video_writes_mp4_with_prompt(run: Run, workflow: dict[str, Any], tmp_path: Path) -> None:
    result = run(workflow | video())
    assert result.files == [tmp_path / "out" / "video" / "ComfyUI_00001_.mp4"]
    assert result.outputs["2"]["animated"] == (True,)
    with av.open(result.files[0]) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 32, 16)
        assert stream.average_rate == 8
        assert "Noise" in file.metadata["prompt"]
        assert len(list(file.decode(stream))) == 3


def test_create_video_accepts_bit_depth_8_and_rejects_10(run: Run, workflow: dict[str, Any]) -> None:
    graph = workflow | video()
    graph["5"]["inputs"]["bit_depth"] = 8
    assert run(graph).files
    graph["5"]["inputs"]["bit_depth"] = 10
    with pytest.raises(WorkflowError, match="'bit_depth' is 10, must be at most 8"):
        run(graph)


@pytest.mark.parametrize(
    "inputs",
    [
        {"format": "mp4", "codec": "h264"},
        {"format": "auto", "format.codec": "h264"},
        {"format": "auto", "format.codec": "auto", "codec": "auto"},
        {"format": "mp4", "format.codec": "h264", "format.codec.encoding": "auto", "codec": "auto"},
    ],
)
def test_save_video_accepts_old_and_new_format_inputs(
    run: Run, workflow: dict[str, Any], inputs: dict[str, str]
) -> None:
    nodes = video()
    nodes["2"]["inputs"] = {"video": ["5", 0], "filename_prefix": "v", **inputs}
    assert [file.name for file in run(workflow | nodes).files] == ["v_00001_.mp4"]


def test_unsupported_codec_is_rejected(run: Run, workflow: dict[str, Any]) -> None:
    nodes = video()
    nodes["2"]["inputs"]["format.codec"] = "av1"
    with pytest.raises(WorkflowError, match=r"'format.codec' is 'av1', expected one of 'auto', 'h264'"):
        run(workflow | nodes)


def test_mp4_with_odd_sides_is_padded_and_keeps_pixels() -> None:
    frames = np.full((2, 15, 17, 3), 200, np.uint8)
    data = core_nodes.encode_mp4(frames, 7.5)
    with av.open(BytesIO(data)) as file:
        decoded = next(file.decode(video=0)).to_ndarray(format="rgb24")
    assert decoded.shape == (16, 18, 3)
    assert abs(decoded.astype(int) - 200).max() <= 3


def test_webp_is_lossless(run: Run, workflow: dict[str, Any]) -> None:
    result = run(workflow | webp())
    expected = core_nodes.to_uint8(result.results["1"][0])
    with Image.open(result.files[0]) as file:
        frames = [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)]
        assert file.info["duration"] == 125
        assert "Noise" in file.getexif()[core_nodes.EXIF_MODEL]
    assert np.array_equal(np.stack(frames), expected)


@pytest.mark.parametrize(
    ("prefix", "subfolder", "stem"), [("x", "", "x"), ("a/x", "a", "x"), ("a\\b\\x", "a/b", "x"), ("./x", "", "x")]
)
@pytest.mark.parametrize(("kind", "root"), [("output", Path()), ("temp", Path("temp"))])
def test_saved_file_is_listed_as_in_comfyui(
    tmp_path: Path, prefix: str, subfolder: str, stem: str, kind: str, root: Path
) -> None:
    saver = core_nodes.SaveImage() if kind == "output" else core_nodes.PreviewImage()
    with host.plain_folders(models=[], input=tmp_path, output=tmp_path):
        listed = saver.save(torch.zeros(1, 2, 2, 3), prefix)["ui"]["images"]
    assert listed == [{"filename": f"{stem}_00001_.png", "subfolder": subfolder, "type": kind}]
    assert (tmp_path / root / subfolder / f"{stem}_00001_.png").is_file()


@pytest.mark.parametrize("saver", [video(), webp(), {}], ids=["mp4", "webp", "png"])
def test_nan_frames_are_saved_black_and_logged(
    run: Run, workflow: dict[str, Any], saver: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    workflow["1"]["inputs"]["kind"] = "nan"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = run(workflow | saver).files[0]
    if path.suffix == ".mp4":
        with av.open(path) as file:
            pixels = next(file.decode(video=0)).to_ndarray(format="rgb24")
    else:
        with Image.open(path) as file:
            pixels = np.array(file.convert("RGB"))
    assert pixels.max() == 0
    assert "3 of 3 frames hold NaN" in caplog.text


def test_uint8_conversion_matches_comfyui() -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 0.999, 1.0, 7.0, torch.inf, -torch.inf, torch.nan])
    images = values.reshape(1, 1, -1, 1)
    assert core_nodes.to_uint8(images).ravel().tolist() == [0, 0, 127, 254, 255, 255, 255, 0, 0]
    assert core_nodes.to_uint8(images.bfloat16()).dtype == np.uint8


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16"])
def test_load_image_returns_pixels_and_mask(run: Run, tmp_path: Path, mode: str) -> None:
    (tmp_path / "input").mkdir()
    Image.new(mode, (10, 6)).save(tmp_path / "input" / "a.png")
    images, mask = run(picture("a.png", upload="image")).results["1"]
    assert images.shape == (1, 6, 10, 3)
    assert mask.shape == ((1, 6, 10) if mode == "RGBA" else (1, 64, 64))
    assert mask.max() == (1 if mode == "RGBA" else 0)


def gradient(top: float, dtype: Any) -> np.ndarray:
    return np.linspace(0, top, 48).astype(dtype).reshape(6, 8)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("grey16.png", gradient(65535, np.uint16)),
        ("grey16.tiff", gradient(65535, np.uint16)),
        ("big_endian.tiff", gradient(65535, ">u2")),
        ("grey32.tiff", gradient(65535, np.int32)),
        ("float.tiff", gradient(1, np.float32)),
        ("float_255.tiff", gradient(255, np.float32)),
        ("outside.tiff", np.array([[-1, 0.5, 1, np.nan]], np.float32)),
        ("dark.tiff", np.zeros((2, 2), np.float32)),
    ],
)
def test_grey_image_of_more_than_8_bits_keeps_values(run: Run, tmp_path: Path, name: str, values: np.ndarray) -> None:
    """16-bit values equal those that ComfyUI 0.33 reads with PyAV."""
    (tmp_path / "input").mkdir()
    Image.fromarray(values).save(tmp_path / "input" / name)
    images, mask = run(picture(name)).results["1"]
    top = 65535 if values.dtype.kind in "iu" else max(1, 255 * (np.nanmax(values) > 1))
    expected = np.clip(np.nan_to_num(values.astype(np.float64)) / top, 0, 1)
    assert images.dtype == torch.float32
    assert np.abs(images[0].numpy() - expected[..., None]).max() < 1e-6
    assert not mask.any()
    if name in {"grey16.png", "grey16.tiff"}:
        with av.open(tmp_path / "input" / name) as file:
            read = next(file.decode(video=0)).to_ndarray(format="gbrpf32le")
        assert np.abs(images[0].numpy() - read).max() < 1e-6


def test_transparent_grey_of_16_bit_image_becomes_mask(run: Run, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    values = gradient(65535, np.uint16)
    Image.fromarray(values).save(tmp_path / "input" / "a.png", transparency=int(values[2, 3]))
    _, mask = run(picture("a.png")).results["1"]
    assert (mask[0].numpy() == (values == values[2, 3])).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.png", "no image 'no.png' in the input folder"),
        (5, "found 5, expected the name of an image"),
        ("empty.png", "is not an image"),
        ("text.png", "is not an image"),
        ("script.png", "is not an image"),
        ("bomb.png", "is not an image"),
        (".", "no image"),
    ],
)
def test_load_image_rejects_missing_or_unreadable_file(run: Run, tmp_path: Path, name: Any, message: str) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no picture")
    Image.new("RGB", (8, 8)).save(folder / "script.png", "EPS")  # which Pillow gives to Ghostscript
    (folder / "bomb.png").write_bytes(png_head(60_000, 60_000))
    with pytest.raises(WorkflowError, match=message):
        run(picture(name))


def test_load_image_limits_pixels_of_all_frames(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input").mkdir()
    pictures = [Image.new("L", (8, 8), shade) for shade in range(0, 250, 10)]
    pictures[0].save(tmp_path / "input" / "a.gif", save_all=True, append_images=pictures[1:])
    assert len(run(picture("a.gif")).results["1"][0]) == 25
    monkeypatch.setattr(input_images, "MAX_PIXELS", 24 * 64)
    with pytest.raises(RunFailedError, match="1,600 pixels in all frames together, expected at most 1,536"):
        run(picture("a.gif"))


def png_head(width: int, height: int) -> bytes:
    """The header of a PNG of this size, without pixels."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.parametrize("saver", [video("../x"), webp(filename_prefix="/x")], ids=["mp4", "webp"])
def test_prefix_outside_output_folder_is_rejected_before_run(
    run: Run, workflow: dict[str, Any], saver: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(WorkflowError, match="stay in the output folder"):
        run(workflow | saver)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("saver", [video(), webp(), {}], ids=["mp4", "webp", "png"])
def test_full_disk_leaves_no_file_and_next_run_works(
    run: Run, workflow: dict[str, Any], saver: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(OutputError, match="the disk is full"):
            run(workflow | saver)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    assert "_00001_" in run(workflow | saver).files[0].name
