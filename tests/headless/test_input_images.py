"""An untrusted workflow can read or send images in the input folder, and no other file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from comfyui_onediff_guard.headless.errors import HeadlessError, HostError, WorkflowError
from comfyui_onediff_guard.headless.hosts import checkout, input_images
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.server.follow import run_on_server
from fake_comfy import picture
from PIL import Image

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An input folder with images and other files, below a folder with a secret and a private picture."""
    folder = tmp_path / "home" / "in"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "home" / "id_rsa").write_bytes(SECRET)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "home" / "private.png")
    for name in ("a.png", "b.jpg", "c.webp", "d.gif", "e.bmp", "f.tiff", "sub/g.png", "x [draft.png"):
        Image.new("RGB", (8, 8), "blue").save(folder / name)
    (folder / "key.png").write_bytes(SECRET)
    (folder / "short.png").write_bytes((folder / "a.png").read_bytes()[:40])
    (folder / "flipped.png").write_bytes((folder / "a.png").read_bytes().replace(b"IDAT", b"IDAX"))
    (folder / "empty.png").touch()
    (folder / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    (folder / "xbm.png").write_bytes(b"#define a_width 8\n#define a_height 1\nstatic char a_bits[] = {0xff};\n")
    (folder / "link.png").symlink_to(tmp_path / "home" / "private.png")
    (folder / "up").symlink_to(tmp_path / "home")
    (folder / "own.png").symlink_to(folder / "a.png")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.fixture
def send(comfy: Any, folder: Path, tmp_path: Path) -> Callable[..., RunResult]:
    """Run a LoadImage of this name on the stand-in server, with --input."""

    def run(name: str, class_type: str = "LoadImage", **inputs: Any) -> RunResult:
        workflow = {"1": {"class_type": class_type, "inputs": {"image": name, **inputs}}}
        return run_on_server(workflow, url=comfy.url, output_dir=tmp_path / "out", input_dir=folder)

    return run


def sent(comfy: Any) -> dict[str, list[Any]]:
    return {path: [body for which, body in comfy.requests if which == path] for path, _ in comfy.requests}


@pytest.mark.parametrize(
    "name",
    [
        "{home}/id_rsa",
        "{home}/private.png",
        "../id_rsa",
        "../private.png",
        "up/id_rsa",
        "up/private.png",
        "link.png",
        "..\\private.png",
        "sub/../../private.png",
        "../private.png [input]",
        "../a.png [output]",
        "a.png\0",
        "C:\\a.png",
        "x" * 5000,
    ],
)
def test_file_outside_input_folder_is_rejected_and_not_sent(
    comfy: Any, send: Callable[..., RunResult], folder: Path, name: str
) -> None:
    with pytest.raises(WorkflowError, match=r"node 1 \(LoadImage\): '.*Images are read from the input folder"):
        send(name.format(home=folder.parent))
    assert comfy.requests == []


@pytest.mark.parametrize("name", ["key.png", "short.png", "flipped.png", "empty.png", "eps.png", "xbm.png"])
def test_file_that_is_not_an_image_is_not_sent(comfy: Any, send: Callable[..., RunResult], name: str) -> None:
    with pytest.raises(WorkflowError, match=r"is not an image \(PNG, .*Nothing ran"):
        send(name)
    assert comfy.requests == []


@pytest.mark.parametrize("name", ["a.png", "b.jpg", "c.webp", "d.gif", "e.bmp", "f.tiff", "sub/g.png", "own.png"])
def test_image_in_input_folder_is_sent_unchanged(
    comfy: Any, send: Callable[..., RunResult], folder: Path, name: str
) -> None:
    send(name)
    assert sent(comfy)["upload"] == [(folder / name).read_bytes()]


def test_image_above_size_limit_is_not_sent(
    comfy: Any, send: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_images, "MAX_IMAGE_BYTES", 60)
    with pytest.raises(WorkflowError, match="larger than"):
        send("a.png")
    assert comfy.requests == []


@pytest.mark.parametrize("name", ["theirs.png", "a.png [output]", "a.png [temp]", "sub", "", "pipe.png"])
def test_names_without_input_file_are_sent_unchanged(comfy: Any, send: Callable[..., RunResult], name: str) -> None:
    send(name)
    assert "upload" not in sent(comfy)
    assert sent(comfy)["prompt"][0]["prompt"]["1"]["inputs"]["image"] == name


def test_folder_annotation_is_not_part_of_file_name(comfy: Any, send: Callable[..., RunResult]) -> None:
    send("a.png [input]")
    send("x [draft.png")
    names = [body["prompt"]["1"]["inputs"]["image"] for body in sent(comfy)["prompt"]]
    assert names == ["uploaded a.png", "uploaded x [draft.png"]


@pytest.mark.parametrize(
    ("declared", "uploads"),
    [
        ({"image_upload": True}, 1),
        ({"image_upload": True, "image_folder": "output"}, 0),
        ({"image_upload": True, "image_folder": "input"}, 1),
        ({"video_upload": True}, 0),
        ({}, 0),
    ],
)
def test_image_is_uploaded_if_node_declares_image_upload(
    comfy: Any, send: Callable[..., RunResult], declared: dict[str, Any], uploads: int
) -> None:
    comfy.object_info["Other"] = {"input": {"required": {"image": [[], {}], "file": ["COMBO", declared]}}}
    send("a.png", class_type="Other", file="b.jpg")
    assert len(sent(comfy).get("upload", ())) == uploads


def test_image_named_by_several_nodes_is_sent_once(comfy: Any, folder: Path, tmp_path: Path) -> None:
    loads = {str(n): {"class_type": "LoadImage", "inputs": {"image": "a.png"}} for n in range(3)}
    run_on_server(loads, url=comfy.url, output_dir=tmp_path / "out", input_dir=folder)
    assert len(sent(comfy)["upload"]) == 1
    inputs = [node["inputs"]["image"] for node in sent(comfy)["prompt"][0]["prompt"].values()]
    assert inputs == ["uploaded a.png"] * 3


@pytest.mark.parametrize(
    "answer",
    [
        {"name": "../../x.png", "subfolder": "", "type": "input"},
        {"name": "x.png", "subfolder": "/etc", "type": "input"},
        {"name": "", "subfolder": "", "type": "input"},
        {"name": 5, "subfolder": "", "type": "input"},
        {"name": "x" * 10_000},
        {"name": "x.png", "type": "output"},
        {},
        [],
        None,
    ],
)
def test_invalid_upload_answer_is_rejected(
    comfy: Any, send: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(comfy, "uploaded", answer)
    with pytest.raises(HostError, match="upload/image"):
        send("a.png")
    assert "prompt" not in sent(comfy)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", ["/upload/image", "/prompt", "/object_info/LoadImage", "/view"])
def test_redirects_are_not_followed(comfy: Any, send: Callable[..., RunResult], status: int, path: str) -> None:
    """The redirect leads to another path of the same server, which records each request."""
    arrived: list[str] = []

    def answer(request: web.Request) -> web.StreamResponse | None:
        if request.path.startswith("/stolen"):
            arrived.append(request.path)
        to = {"Location": f"http://user:secret@{request.host}/stolen"}
        return web.Response(status=status, headers=to) if request.path == path else None

    comfy.first = answer
    with pytest.raises(
        HeadlessError, match=r"redirects to http://127\.0\.0\.1:.*/stolen, which is not followed"
    ) as error:
        send("a.png")
    assert arrived == [] and "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["../id_rsa", "{home}/private.png", "link.png", "../../x [temp]"])
def test_checkout_is_not_asked_for_image_outside_input_folder(
    comfy: Any, folder: Path, tmp_path: Path, name: str
) -> None:
    """In ComfyUI 0.3.64, `get_annotated_filepath` accepts any path that a workflow names."""
    running = checkout.Running(comfy.url, tmp_path / "log", folder)
    (tmp_path / "log").touch()
    with pytest.raises(WorkflowError, match="Images are read from the input folder"):
        running.run(picture(name.format(home=folder.parent)), output_dir=tmp_path / "out")
    assert comfy.requests == []
    assert running.run(picture("sub/g.png"), output_dir=tmp_path / "out").files


@pytest.mark.parametrize("name", ["{home}/private.png", "../private.png", "link.png", "up/private.png", "a\0.png"])
def test_local_host_rejects_image_outside_input_folder(
    run: Callable[..., RunResult], folder: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "input").symlink_to(folder)
    with pytest.raises(WorkflowError, match="images are read from the input folder"):
        run(picture(name.format(home=folder.parent)))


@pytest.mark.parametrize("name", ["a.png", "a.png [input]", "b.png [output]", "c.png [temp]"])
def test_local_host_reads_image_from_annotated_folder(
    run: Callable[..., RunResult], folder: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "input").symlink_to(folder)
    (tmp_path / "out" / "temp").mkdir(parents=True)
    for path in (tmp_path / "out" / "b.png", tmp_path / "out" / "temp" / "c.png"):
        Image.new("RGB", (8, 8)).save(path)
    assert run(picture(name)).results["1"][0].shape == (1, 8, 8, 3)


@pytest.mark.parametrize(("kind", "frames"), [("MPO", 1), ("GIF", 2), ("TIFF", 2), ("WEBP", 2)])
def test_mpo_gives_one_frame_and_animations_give_all(tmp_path: Path, kind: str, frames: int) -> None:
    """ComfyUI reads one image from an MPO, a camera's JPEG, and a batch from a file with animation or pages."""
    colours = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    colours[0].save(tmp_path / "a.jpg", format=kind, save_all=True, append_images=colours[1:])
    assert len(input_images.frames(input_images.read(tmp_path / "a.jpg"))) == frames
