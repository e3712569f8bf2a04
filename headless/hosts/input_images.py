"""Images that a workflow names. Workflow and images are untrusted: the name may be any path, the file any data.

So an image must be below the input folder (or output, temp, if the name says so), and decodable.
"""

from __future__ import annotations

import itertools
import os
import stat
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, ImageSequence

from ...trust import paths
from ...trust.message import shown
from ..errors import WorkflowError
from ..workflow.graph import Graph, GraphNode
from ..workflow.schema import InputSpec, Schema

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000")  # each has its own signature
MAX_IMAGE_BYTES = 100 * 2**20  # ComfyUI's default upload limit
MAX_PIXELS = 2**27  # of all frames together: 2 GB as float32
FOLDERS = ("input", "output", "temp")


def folder_of(name: str) -> tuple[str, str]:
    """Split an image's name ("a.png [output]") into its name and the kind of its folder (default: "input"), like
    ComfyUI's `annotated_filepath`."""
    for kind in FOLDERS:
        if name.endswith(f"[{kind}]"):
            return name[: -len(kind) - 3], kind
    return name, "input"


def images_of(
    graph: Graph, schemas: Mapping[str, Schema], folder: Path
) -> Iterator[tuple[GraphNode, str, str, Path | None]]:
    """Yield node, input and value of each image that a workflow names, and its file; None if not in the input folder.

    Only inputs for uploaded images count, not videos or sounds: a server's own files stay on the server. Raises
    WorkflowError if a name leads out of the image folders.
    """
    for node in graph.nodes.values():
        specs = schemas[node.class_type].inputs_with(node.inputs)
        for name, value in node.inputs.items():
            if not (isinstance(value, str) and value and name in specs and _takes_images(specs[name])):
                continue
            image, kind = folder_of(value)
            try:
                paths.relative(image)
                path = find(folder, image) if kind == "input" else None
            except paths.Outside as fault:
                raise WorkflowError(
                    f"{node.label}: {fault}. Images are read from the input folder {folder} only."
                ) from None
            yield node, name, value, path


def find(folder: Path, name: str) -> Path | None:
    """Return the file of an image in a folder; None if it does not exist. Raises trust.paths.Outside."""
    path = paths.inside(folder, name)
    try:
        return path.resolve() if path.is_file() else None
    except OSError:
        return None


def read(path: Path) -> bytes:
    """Return an image file's bytes, once a decoder has recognised them. Raises WorkflowError if the file is no image,
    too large, or unreadable."""
    try:
        with open(path, "rb", opener=_open) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WorkflowError(f"{path} is not a file.")
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise WorkflowError(f"Cannot read the image {path}: {error.strerror or error}.") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise WorkflowError(f"{path} is larger than {MAX_IMAGE_BYTES // 2**20} MiB, the limit for an image.")
    if not _is_image(data):
        raise WorkflowError(f"{path} is not an image ({', '.join(IMAGE_FORMATS)}).")
    return data


@dataclass(frozen=True)
class Frame:
    rgba: np.ndarray  # float32 [height, width, 4], 0 to 1, rotated as its EXIF says
    has_transparency: bool


def frames(data: bytes) -> list[Frame]:
    """Return all frames of an image file. Raises ValueError if it is damaged, or has more than MAX_PIXELS."""
    try:
        with Image.open(BytesIO(data), formats=_decoders()) as file:
            return list(_frames(file))
    except Exception as error:  # Pillow raises almost any type for damaged files
        raise ValueError(
            f"the image cannot be read ({type(error).__name__}: {shown(error, 200)}). Save it again as PNG or JPEG."
        ) from error


def _decoders() -> list[str]:
    """Return the allowed formats that this Pillow reads. It has further decoders; some start programs."""
    Image.init()
    return [kind for kind in IMAGE_FORMATS if kind in Image.OPEN]


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))  # do not wait at a pipe


def _is_image(data: bytes) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about many pixels: none is decoded here
            with Image.open(BytesIO(data), formats=_decoders()) as image:
                image.verify()
    except Exception:  # noqa: BLE001 - whatever a decoder makes of a damaged file
        return False
    return True


def _takes_images(spec: InputSpec) -> bool:
    return bool(spec.config.get("image_upload")) and spec.config.get("image_folder") in (None, "input")


def _frames(file: Image.Image) -> Iterator[Frame]:
    pixels = 0
    several = itertools.islice(ImageSequence.Iterator(file), 1 if file.format == "MPO" else None)  # as ComfyUI does
    for frame in several:
        pixels += frame.width * frame.height
        if not 0 < pixels <= MAX_PIXELS:
            raise ValueError(f"{pixels:,} pixels in all frames together, expected at most {MAX_PIXELS:,}")
        upright = ImageOps.exif_transpose(frame)
        deep = _deep(upright)
        if deep is None:
            rgba = np.array(upright.convert("RGBA"), dtype=np.float32) / 255
        else:
            opaque = np.array(upright) != upright.info.get("transparency")
            rgba = np.stack([deep, deep, deep, opaque.astype(np.float32)], axis=-1)
        yield Frame(rgba, upright.has_transparency_data)


def _deep(image: Image.Image) -> np.ndarray | None:
    """Return grey of more than 8 bits as float32, 0 to 1, which Pillow would clip at 255; None for all other images.

    16 bits are scaled as in ComfyUI 0.33. Floats up to 1 stay unchanged; ComfyUI turns them black.
    """
    whole = image.mode == "I" or image.mode.startswith("I;16")
    if not whole and image.mode != "F":
        return None
    grey = np.nan_to_num(np.array(image, dtype=np.float32), posinf=np.inf)
    top = 65535 if whole else 1 if grey.max() <= 1 else 255
    return np.clip(grey / top, 0, 1)
