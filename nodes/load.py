"""The node that opens a model of any family, on this machine or on the hub."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.language import translated
from ..trust.message import Message, joined, listed, shown
from . import inputs
from .node import Node
from .report import with_surroundings

if TYPE_CHECKING:
    from pathlib import Path


_FILES = "checkpoints"  # the folder in ComfyUI's models with single files that it also loads


class LoadPipeline(Node):
    """A model of any family, on this machine or on the hub → pipeline."""

    TITLE = "Load Pipeline"
    CATEGORY = inputs.LOAD
    SEARCH_ALIASES = [
        *("Load CogVideoX", "Load CogView3-Plus", "Load CogView4", "Load Stable Video Diffusion (SVD)", "Load Wan"),
        *("CogView3", "SVD-XT", "Wan2.1", "Wan2.2", "img2vid", "text to video", "image to video", "text to image"),
        *("black video", "black image", *inputs.PRECISION_WORDS, "diffusers", "checkpoint", "Hugging Face"),
    ]
    DESCRIPTION = (
        "Opens a model of CogVideoX, CogView3-Plus, CogView4, Wan or Stable Video Diffusion (SVD), and chooses the "
        "precision for this card. Choose a folder in diffusers format (or SVD's single file), or write a Hugging Face "
        "name into hub_id to download a model. Weights are read when a later node first needs them."
    )
    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    OUTPUT_TOOLTIPS = ("Wire it to Encode Prompt, a sampler of this family and Decode Latents.",)
    FUNCTION = "load"
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def models(cls) -> dict[str, Path]:
        """Return {name: path} of all models that are there, of any family."""
        return {**host.model_folders(), **host.weight_files(_FILES)}

    @classmethod
    def listed(cls) -> list[str]:
        """Return the names of the models that this node loads."""
        from ..pipelines.models.folder import is_known

        return [name for name, path in cls.models().items() if is_known(path)]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        models = cls.listed() or [inputs.none_found("diffusers", _FILES, otherwise=", or fill in hub_id")]
        where = "A folder with model_index.json below models/diffusers, or SVD's single file in models/checkpoints."
        hub_id = (
            "A model on the Hugging Face Hub, as owner/name or the address of its page. It replaces model. Empty: "
            "model is used. Files go to the Hub's own cache. An interrupt keeps complete files."
        )
        revision = "Branch, tag or commit of hub_id. Empty: main."
        download = "For hub_id. On: download missing files, also those of newer commits. Off: use only the cache."
        return {
            "required": {"model": (models, {"tooltip": where}), "precision": inputs.precision()},
            "optional": {
                "hub_id": ("STRING", {"default": "", "tooltip": hub_id}),
                "backend": inputs.choice(
                    inputs.BACKENDS,
                    "The compiler that OneDiff uses. auto: the first that works here, once compiling pays off; the "
                    "report says which and why. eager: not compiled.",
                    advanced=True,
                ),
                "offload": inputs.choice(
                    inputs.OFFLOADS,
                    "auto: the fastest mode that fits the card, chosen before each stage; the report says why. none: "
                    "the model stays on the card between nodes. model: in system RAM when idle. group: the denoiser "
                    "and the text encoder stay in system RAM; blocks are streamed to the card as they run. "
                    "sequential: the same layer by layer; slowest, least memory.",
                    default="auto",
                    advanced=True,
                ),
                "accumulation": inputs.choice(
                    inputs.ACCUMULATIONS,
                    "Leave on auto. fast: a little faster with OneFlow, may turn frames black on some cards. fp16: "
                    "faster on GeForce RTX with precision fp16; turned off if the first step differs too much.",
                    advanced=True,
                ),
                "revision": ("STRING", {"default": "", "tooltip": revision, "advanced": True}),
                "download": inputs.flag(True, download, advanced=True),
            },
            "hidden": inputs.node_id(),
        }

    @classmethod
    def VALIDATE_INPUTS(cls, model: str | None = None) -> bool:
        """Accept any model: a missing one is no error if hub_id names another, and ComfyUI does not pass hub_id here.

        Errors are raised when the node runs, before anything is read. `model` is the only argument, since ComfyUI marks
        every input that is an argument as wrong.
        """
        return True

    @classmethod
    def IS_CHANGED(cls, model: str = "", hub_id: str = "", revision: str = "", **_: Any) -> str:
        from ..pipelines.models.folder import fingerprint

        if hub_id.strip():
            found = _cached_commit(hub_id.strip(), revision.strip())
        else:
            path = inputs.entry(cls.models(), model)
            found = fingerprint(path) if path else ""
        results = host.selftest_directory()  # which 'auto' reads
        return found + fingerprint(results) if found and results.is_dir() else found

    @classmethod
    def _missing(cls, model: str) -> str:
        offered = cls.listed()
        others = [name for name in host.model_folders() if name not in offered]
        not_listed = f" Not listed, since they cannot be read or are of other families: {listed(others, limit=300)}."
        return Message(
            "{}. Put its folder, with model_index.json, into {} (SVD's single file into models/checkpoints), or write "
            "its Hugging Face name, such as THUDM/CogVideoX-2b, into hub_id. Found: {}.{}",
            Message("No model is chosen")
            if inputs.is_none_found(model)
            else Message("Model '{}' was not found", shown(model, 200)),
            host.roots_text("diffusers"),
            ", ".join(offered) or "none",
            not_listed if others else "",
        )

    def load(
        self,
        model: str,
        precision: str,
        backend: str = "auto",
        offload: str = "auto",
        accumulation: str = "auto",
        hub_id: str = "",
        revision: str = "",
        download: bool = True,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        """Open a model, and say on the node what it will run in here, and why. Raises BadFolder, HubError, and what
        `load` of a handle raises."""
        from ..pipelines.errors import BadFolder
        from ..pipelines.insight.diagnosis import diagnose_pipeline
        from ..pipelines.models.folder import family_of
        from ..pipelines.parallel.group import process_group
        from ..pipelines.run.handle import load
        from ..precision.accumulation import Accumulation
        from ..precision.policy import Component, Precision
        from ..trust.plain import for_json

        if hub_id.strip():
            path = _fetch(hub_id.strip(), revision.strip(), download=download, node_id=node_id)
        else:
            path = inputs.entry(self.models(), model)
        if path is None:
            raise BadFolder(self._missing(model))
        handle = load(
            path,
            family_of(path),
            precision=Precision(precision),
            backend=backend,
            offload=offload,
            placement=host.placement(),
            accumulation=Accumulation(accumulation),
            profiles=host.profiles_directory(),
            compiled=host.compiled_directory(),
            selftests=host.selftest_directory(),
            ranks=process_group(),
        )
        host.linger(handle.store)
        diagnosis, plan = with_surroundings(diagnose_pipeline(handle)), handle.plan(Component.DENOISER)
        text = translated(joined("\n", (plan.reason, *handle.store.model.notes)))
        shown = {"plan": asdict(plan), "architecture": str(diagnosis.architecture), "cells": [], "before": []}
        shown |= {"text": diagnosis.text(), "diagnosis": diagnosis.as_dict()}
        return {"ui": {"text": [text], "onediff_guard": [for_json(shown)]}, "result": (handle,)}


def _cached_commit(hub_id: str, revision: str) -> str:
    """Name the commit whose whole model is in the cache, '' where there is none. It asks no server and never raises."""
    with suppress(Exception):  # whatever is wrong, running the node says it
        from ..pipelines.models import hub

        return hub.fetch(hub_id, revision, download=False).name
    return ""


def _fetch(hub_id: str, revision: str, *, download: bool, node_id: str | None) -> Path:
    """Download what the cache lacks of a model, and return its folder there. An interrupt ends the download. Raises
    HubError, BadFolder."""
    from ..pipelines.models import hub

    with host.Progress(0, node_id, unit="B") as progress:

        def told(done: int, total: int, text: str) -> None:
            progress.update(done, Message("{}, {}", text, _amount(done, total)) if total else text, total)

        folder = hub.fetch(hub_id, revision, download=download, progress=told)
    host.say(node_id, Message("{}, commit {}", hub_id, folder.name))
    return folder


def _amount(done: int, total: int) -> str:
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return Message("{:.1f} of {:.1f} {}", done / unit, total / unit, name)
