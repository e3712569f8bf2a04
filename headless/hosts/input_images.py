"""Images that a workflow names: somebody else's workflow may name any file.

So a name is one of a file below the input folder, and what is read has to be an image.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

from ...trust import paths
from ..errors import WorkflowError
from ..workflow.graph import Graph, Node
from ..workflow.schema import InputSpec, Schema

IMAGE_LOADERS = frozenset({"LoadImage", "LoadImageMask"})
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000")  # each starts with bytes of its own
MAX_IMAGE_BYTES = 100 * 2**20  # what a ComfyUI takes by default
FOLDERS = ("input", "output", "temp")


def folder_of(name: str) -> tuple[str, str]:
    """An image's name without the folder that may stand behind it ("a.png [output]"), and that folder's kind, as
    ComfyUI's `annotated_filepath` tells them apart."""
    for kind in FOLDERS:
        if name.endswith(f"[{kind}]"):
            return name[: -len(kind) - 3], kind
    return name, "input"


def images_of(graph: Graph, schemas: Mapping[str, Schema]) -> Iterator[tuple[Node, str, str]]:
    """The node, input and value of each image that a workflow names: of nodes that take uploaded images.

    Videos and sounds are none: a server's own stay with the server.
    """
    for node in graph.nodes.values():
        specs = schemas[node.class_type].inputs_with(node.inputs)
        for name, value in node.inputs.items():
            spec = specs.get(name)
            if isinstance(value, str) and value and (_takes_images(spec) or _is_loader(node, name)):
                yield node, name, value


def check(graph: Graph, schemas: Mapping[str, Schema], folder: Path) -> None:
    """Raises WorkflowError where a workflow names an image outside of the folders that images are read from: older
    ComfyUIs read it all the same."""
    for node, _, value in images_of(graph, schemas):
        name, kind = folder_of(value)
        try:
            paths.inside(folder, name) if kind == "input" else paths.relative(name)
        except paths.Outside as fault:
            raise WorkflowError(
                f"{node.label}: {fault}. Images are read from the input folder {folder} only."
            ) from None


def find(folder: Path, name: str) -> Path | None:
    """The file of an image in a folder; None where there is none. Raises trust.paths.Outside."""
    path = paths.inside(folder, name)
    try:
        return path.resolve() if path.is_file() else None
    except OSError:
        return None


def read(path: Path) -> bytes:
    """An image file's bytes, whose beginning a decoder has recognised.

    Raises:
        WorkflowError: it is no image, too large, or cannot be read.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WorkflowError(f"{path} is no file.")
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise WorkflowError(f"Cannot read the image {path}: {error.strerror or error}.") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise WorkflowError(
            f"{path} is larger than {MAX_IMAGE_BYTES // 2**20} MiB, the most that is taken as an image."
        )
    if not _is_image(data):
        raise WorkflowError(f"{path} is no image ({', '.join(IMAGE_FORMATS)}).")
    return data


def decoders() -> list[str]:
    """Those of the formats that this Pillow reads. It knows more, among them some that start programs."""
    from PIL import Image

    Image.init()
    return [kind for kind in IMAGE_FORMATS if kind in Image.OPEN]


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))  # a pipe would wait


def _is_image(data: bytes) -> bool:
    from PIL import Image

    known = decoders()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels: none is decoded here
            with Image.open(BytesIO(data), formats=known) as image:
                image.verify()
    except Exception:  # noqa: BLE001 - whatever a decoder makes of a damaged file
        return False
    return True


def _takes_images(spec: InputSpec | None) -> bool:
    return (
        spec is not None
        and bool(spec.config.get("image_upload"))
        and spec.config.get("image_folder") in (None, "input")
    )


def _is_loader(node: Node, name: str) -> bool:
    return node.class_type in IMAGE_LOADERS and name == "image"
