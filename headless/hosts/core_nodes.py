"""The core nodes of a run without ComfyUI: a closed list, with ComfyUI's names, inputs and file names.

All other nodes need a real ComfyUI (`--server`, `--comfyui`). Images are tensors [frames, height, width, channels], 0
to 1.
"""

# ruff: noqa: N802 - names and arguments are ComfyUI's

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ...comfyui_host import host
from ...trust.message import shown
from ...trust.paths import Outside
from ..comparison.frames import as_bytes
from ..errors import WorkflowError
from ..files import PREVIEW_FOLDER, check_prefix, resolve_prefix, write_counted
from . import input_images

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
METADATA = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}  # hidden inputs of all nodes that save
EXIF_MODEL, EXIF_MAKE = 0x0110, 0x010F  # the tags in which ComfyUI stores prompt and workflow


@dataclass(frozen=True)
class Video:
    """A value of type VIDEO."""

    images: torch.Tensor  # [frames, height, width, channels], 0 to 1
    fps: float


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """Return frames as uint8 [frames, height, width, channels]: NaN is black, infinity white or black by its sign."""
    frames = images.detach().float().cpu().numpy()
    if broken := int((~np.isfinite(frames)).reshape(len(frames), -1).any(1).sum()):
        logger.warning("%d of %d frames hold NaN or infinity; NaN is written as black.", broken, len(frames))
    return as_bytes(frames)


class LoadImage:
    CATEGORY = "image"
    DESCRIPTION = "Load an image from the input folder."
    RETURN_TYPES = ("IMAGE", "MASK")
    FUNCTION = "load_image"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        folder = host.input_directory()
        paths = folder.iterdir() if folder.is_dir() else ()
        names = sorted(path.name for path in paths if path.suffix.lower() in IMAGE_SUFFIXES)
        return {"required": {"image": (names, {"image_upload": True})}}

    @classmethod
    def VALIDATE_INPUTS(cls, image: object) -> bool | str:
        if image is None:  # linked: checked when the node runs
            return True
        if not isinstance(image, str):
            return f"found {shown(image)}, expected the name of an image"
        try:
            input_images.read(_input_image(image))
        except WorkflowError as fault:
            return str(fault)
        return True

    def load_image(self, image: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return IMAGE [frames, height, width, 3] and MASK [frames, height, width], 1 where transparent."""
        import torch

        pictures: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        for frame in input_images.frames(input_images.read(_input_image(image))):
            rgba = torch.from_numpy(frame.rgba)
            if pictures and rgba.shape[:2] != pictures[0].shape[:2]:
                continue
            pictures.append(rgba[..., :3])
            masks.append(1 - rgba[..., 3] if frame.has_transparency else torch.zeros(64, 64))
        same = [mask for mask in masks if mask.shape == masks[0].shape]
        return torch.stack(pictures), torch.stack(same)


class _Saver:
    """A node that writes files which contain prompt and workflow."""

    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def VALIDATE_INPUTS(cls, filename_prefix: str | None = None) -> bool | str:
        try:
            check_prefix(filename_prefix or "")
        except WorkflowError as error:
            return str(error)
        return True


class SaveImage(_Saver):
    CATEGORY = "image"
    DESCRIPTION = "Save images as PNG files in the output folder."
    KIND = "output"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"images": ("IMAGE",), "filename_prefix": ("STRING", {"default": "ComfyUI"})},
            "hidden": METADATA,
        }

    def save(self, images: torch.Tensor, filename_prefix: str = "ComfyUI", **hidden: Any) -> dict[str, Any]:
        info = PngInfo()
        for key, text in _metadata(**hidden).items():
            info.add_text(key, text)
        entries = []
        for number, picture in enumerate(_pictures(images)):
            data = BytesIO()
            picture.save(data, "PNG", pnginfo=info, compress_level=4)
            numbered = filename_prefix.replace("%batch_num%", str(number))
            entries.append(_write(self.KIND, numbered, images, ".png", data.getvalue()))
        return {"ui": {"images": entries}}


class PreviewImage(SaveImage):
    DESCRIPTION = f"Save images as PNG files in the output folder's {PREVIEW_FOLDER} folder."
    KIND = "temp"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",)}, "hidden": METADATA}

    def save(self, images: torch.Tensor, filename_prefix: str = "ComfyUI_temp", **hidden: Any) -> dict[str, Any]:
        return super().save(images, filename_prefix, **hidden)


class SaveAnimatedWEBP(_Saver):
    CATEGORY = "image/animation"
    DESCRIPTION = "Save frames as one animated WEBP in the output folder."
    METHODS: ClassVar = {"default": 4, "fastest": 0, "slowest": 6}

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "images": ("IMAGE",),
                "filename_prefix": ("STRING", {"default": "ComfyUI"}),
                "fps": ("FLOAT", {"default": 6.0, "min": 0.01, "max": 1000.0, "step": 0.01}),
                "lossless": ("BOOLEAN", {"default": True}),
                "quality": ("INT", {"default": 80, "min": 0, "max": 100}),
                "method": (list(cls.METHODS),),
            },
            "hidden": METADATA,
        }

    def save(
        self,
        images: torch.Tensor,
        filename_prefix: str,
        fps: float,
        lossless: bool,
        quality: int,
        method: str,
        **hidden: Any,
    ) -> dict[str, Any]:
        frames = _pictures(images)
        exif = frames[0].getexif()
        tags = count(EXIF_MAKE, -1)
        for key, text in _metadata(**hidden).items():
            exif[EXIF_MODEL if key == "prompt" else next(tags)] = f"{key}:{text}"
        data = BytesIO()
        frames[0].save(
            data,
            "WEBP",
            save_all=True,
            append_images=frames[1:],
            duration=int(1000.0 / fps),
            lossless=lossless,
            quality=quality,
            method=self.METHODS[method],
            exif=exif,
        )
        entry = _write("output", filename_prefix, images, ".webp", data.getvalue())
        return {"ui": {"images": [entry], "animated": (len(frames) != 1,)}}


class CreateVideo:
    CATEGORY = "image/video"
    DESCRIPTION = "Make a video of images."
    RETURN_TYPES = ("VIDEO",)
    FUNCTION = "create"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "images": ("IMAGE",),
                "fps": ("FLOAT", {"default": 30.0, "min": 1.0, "max": 120.0, "step": 1.0}),
            },
            "optional": {
                "audio": ("AUDIO",),  # no node here outputs it; listed so that links to it are valid
                "bit_depth": ("INT", {"min": 8, "max": 8, "forceInput": True}),  # in ComfyUI since 2026; no widget here
            },
        }

    def create(self, images: torch.Tensor, fps: float, **_bit_depth: int) -> tuple[Video]:
        return (Video(images, fps),)


class SaveVideo(_Saver):
    CATEGORY = "image/video"
    DESCRIPTION = "Save a video as H.264 MP4 in the output folder."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "video": ("VIDEO",),
                "filename_prefix": ("STRING", {"default": "video/ComfyUI"}),
                "format": (["auto", "mp4"], {"default": "auto"}),
            },
            "optional": {
                "codec": (["auto", "h264"], {"default": "auto"}),
                "format.codec": (["auto", "h264"], {"forceInput": True}),  # in ComfyUI since 2026; no widget here
                "format.codec.encoding": (["auto"], {"forceInput": True}),
            },
            "hidden": METADATA,
        }

    def save(
        self,
        video: Video,
        filename_prefix: str,
        prompt: Any = None,
        extra_pnginfo: Any = None,
        **_always_h264_in_mp4: str,
    ) -> dict[str, Any]:
        data = encode_mp4(to_uint8(video.images), video.fps, _metadata(prompt, extra_pnginfo))
        entry = _write("output", filename_prefix, video.images, ".mp4", data)
        return {"ui": {"images": [entry], "animated": (True,)}}


def encode_mp4(frames: np.ndarray, fps: float, metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode uint8 frames [frames, height, width, channels] as H.264 MP4; an odd side repeats its last pixel."""
    import av

    rgb = np.repeat(frames, 3, axis=3) if frames.shape[3] == 1 else frames[..., :3]
    height, width = rgb.shape[1:3]
    rgb = np.pad(rgb, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    data = BytesIO()
    with av.open(data, "w", format="mp4", options={"movflags": "use_metadata_tags"}) as container:
        container.metadata.update(metadata or {})
        stream = container.add_stream("libx264", rate=Fraction(round(fps * 1000), 1000))
        stream.height, stream.width = rgb.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in rgb:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return data.getvalue()


def _pictures(images: torch.Tensor) -> list[Image.Image]:
    frames = to_uint8(images)
    return [Image.fromarray(frame.squeeze(-1) if frame.shape[-1] == 1 else frame) for frame in frames]


def _write(kind: str, prefix: str, images: torch.Tensor, suffix: str, data: bytes) -> dict[str, str]:
    root = host.output_directory() / (PREVIEW_FOLDER if kind == "temp" else "")
    folder, stem = resolve_prefix(root, prefix, width=images.shape[2], height=images.shape[1])
    path = write_counted(folder, stem, suffix, data)
    subfolder = folder.relative_to(root).as_posix()
    return {"filename": path.name, "subfolder": "" if subfolder == "." else subfolder, "type": kind}


def _metadata(prompt: Any = None, extra_pnginfo: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return prompt and workflow as JSON texts, so that the file can be dragged into ComfyUI."""
    texts = {} if prompt is None else {"prompt": json.dumps(prompt)}
    return texts | {key: json.dumps(value) for key, value in (extra_pnginfo or {}).items()}


def _input_image(name: str) -> Path:
    image, kind = input_images.folder_of(name)
    root = host.output_directory()
    folder = {"input": host.input_directory(), "output": root, "temp": root / PREVIEW_FOLDER}[kind].resolve()
    try:
        path = input_images.find(folder, image)
    except Outside as fault:
        raise WorkflowError(f"{fault}: images are read from the {kind} folder {folder} only") from None
    if path is None:
        advice = "; choose the folder with --input" if kind == "input" else ""
        raise WorkflowError(f"there is no image '{shown(image)}' in the {kind} folder {folder}{advice}")
    return path


NODE_CLASS_MAPPINGS: dict[str, type] = {
    node.__name__: node for node in (LoadImage, SaveImage, PreviewImage, CreateVideo, SaveVideo, SaveAnimatedWEBP)
}
