"""What the loaders of all families share."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..trust.message import Message
from ..trust.text import shown
from . import hub, inputs
from .node import Node, titled

if TYPE_CHECKING:
    from pathlib import Path

    from ..pipelines.families.spec import FamilySpec
    from ..pipelines.run.handle import PipelineHandle


WORDS = (*inputs.PRECISION_WORDS, "diffusers", "checkpoint", "Hugging Face")  # that every loader is searched by
_SHOWN = 12  # names of models that are not listed, in a message


def opens(what: str) -> str:
    """Make a loader's DESCRIPTION. what: ends with a comma where one has to follow."""
    return (
        f"Opens {what} and chooses precision and compile backend for this card. Weights are read when a later node "
        "first needs them."
    )


def wire_to(nodes: str) -> tuple[str]:
    """Make a loader's OUTPUT_TOOLTIPS. nodes: where its pipeline goes, but for the last."""
    return (f"Wire it to {nodes} and Decode Latents.",)


def loaders() -> dict[str, type[Loader]]:
    """Map the name of each diffusers pipeline to the node that loads it."""
    return {pipeline: node for node in titled(Loader) for pipeline in node.PIPELINES}


class Loader(Node):
    """A model of one of `PIPELINES`, on this machine or on the hub → pipeline."""

    PIPELINES: tuple[str, ...]  # diffusers classes that model_index.json may name
    FILES: tuple[str, ...] = ()  # folders in ComfyUI's models whose single files it loads too
    CATEGORY = inputs.LOAD
    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    FUNCTION = "load"

    @classmethod
    def models(cls) -> dict[str, Path]:
        """Map the names of all models that are there, of whatever family, to their paths."""
        files = (host.weight_files(kind).items() for kind in cls.FILES)
        return dict(chain(host.model_folders().items(), *files))

    @classmethod
    def listed(cls) -> list[str]:
        """The names of the models that this node loads."""
        from ..pipelines.models.recognised import can_be

        return [name for name, path in cls.models().items() if can_be(path, cls.PIPELINES)]

    @classmethod
    def families(cls) -> list[FamilySpec]:
        from ..pipelines.families.table import FAMILIES

        return [FAMILIES[name] for name in cls.PIPELINES]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        models = cls.listed() or [inputs.none_found(*cls._roots(), otherwise=", or fill in hub_id")]
        files = "".join(f", or a file in models/{kind}" for kind in cls.FILES)
        return {
            "required": {
                "model": (models, {"tooltip": f"A folder with model_index.json below models/diffusers{files}."}),
                "precision": inputs.precision(),
                "backend": inputs.choice(
                    inputs.BACKENDS,
                    "What OneDiff compiles with. auto: the first that works here, where compiling pays; the "
                    "report says which and why. eager: nothing.",
                ),
                "offload": inputs.choice(
                    inputs.OFFLOADS,
                    "auto: the fastest that fits the card, chosen before each stage; the report says why. none: the "
                    "model stays on the card between nodes. model: in system RAM when idle. group: the denoiser and "
                    "the text encoder stay there, and blocks are streamed to the GPU as they run. sequential: layer by "
                    "layer; slowest, least memory.",
                    default="auto",
                ),
            },
            "optional": {
                "accumulation": inputs.advanced(
                    inputs.choice(
                        inputs.ACCUMULATIONS,
                        "Half-precision accumulation in attention. auto: only on cards where it is reported right. "
                        "fast: on, with attention scores in fp32 (OneFlow); if frames turn black, choose auto. fp16: "
                        "as auto, and on a GeForce RTX with precision fp16 the denoiser's products add up in fp16, "
                        "unless the first step shows that to be too far off; for speed.",
                    )
                ),
                **inputs.from_hub(),
            },
            "hidden": inputs.node_id(),
        }

    @classmethod
    def VALIDATE_INPUTS(cls, model: str | None = None) -> bool:
        """A model that is not here is no fault where hub_id names another, of which ComfyUI knows nothing here.

        What is a fault is said when the node runs, before anything is read. `model` is the only argument, since
        ComfyUI marks every input that is one as wrong.
        """
        del model
        return True

    @classmethod
    def IS_CHANGED(cls, model: str = "", hub_id: str = "", revision: str = "", **_: Any) -> str:
        from ..pipelines.models.folder import fingerprint

        if hub_id.strip():
            found = hub.cached_commit(hub_id.strip(), revision.strip(), cls.families())
        else:
            path = inputs.entry(cls.models(), model)
            found = fingerprint(path) if path else ""
        results = host.selftest_directory()  # which 'auto' reads
        return found + fingerprint(results) if found and results.is_dir() else found

    @classmethod
    def _roots(cls) -> tuple[str, ...]:
        return ("diffusers", *cls.FILES)

    @classmethod
    def _missing(cls, model: str) -> str:
        what = "" if inputs.is_none_found(model) else f" '{shown(model, 200)}'"
        listed = cls.listed()
        others = [name for name in cls.models() if name not in listed]
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        not_listed = f"Not listed, since they cannot be read or hold other models: {', '.join(others[:_SHOWN])}{more}. "
        return Message(
            "No folder{} whose model_index.json names {}. Found: {}. Looked in: {}. {}Put one there, or fill in "
            "hub_id.",
            what,
            " or ".join(cls.PIPELINES),
            ", ".join(listed) or "none",
            host.roots_text(*cls._roots()),
            not_listed if others else "",
        )

    def load(
        self,
        model: str,
        precision: str,
        backend: str,
        offload: str,
        accumulation: str = "auto",
        hub_id: str = "",
        revision: str = "",
        download: bool = True,
        node_id: str | None = None,
    ) -> tuple[PipelineHandle]:
        from ..pipelines.errors import BadFolder
        from ..pipelines.models.recognised import family_of
        from ..pipelines.parallel.group import process_group
        from ..pipelines.run.handle import load
        from ..precision.accumulation import Accumulation
        from ..precision.policy import Precision

        families = self.families()
        if hub_id.strip():
            path = hub.fetch(hub_id.strip(), revision.strip(), families, download=download, node_id=node_id)
        else:
            path = inputs.entry(self.models(), model)
        if path is None:
            raise BadFolder(self._missing(model))
        family = family_of(path)
        handle = load(
            path,
            family if family in families else families[0],
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
        return (handle,)
