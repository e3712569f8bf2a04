"""The model that a command was asked about."""

from __future__ import annotations

from pathlib import Path

from ...pipelines.errors import BadFolder, BadInput, BadSize

BAD_REQUEST = (BadFolder, BadInput, BadSize)  # what is wrong with a request, of the person's own making


def on_disk(model: Path) -> Path:
    """Return a model's own path, or the folder of a hub id in the cache. Raises BadInput where there is neither."""
    from ...pipelines.errors import HubError
    from ...pipelines.families.table import FAMILIES
    from ...pipelines.models.hub import fetch

    if model.exists():
        return model.resolve()
    try:
        return fetch(model.as_posix(), None, *FAMILIES.values(), download=False)
    except HubError:
        raise BadInput(
            f"There is no '{model}'. Name the folder that holds the model's model_index.json, Stable Video Diffusion's "
            "single file, or the hub id of a model that a Load node has downloaded."
        ) from None
