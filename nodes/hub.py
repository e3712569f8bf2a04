"""How Load Pipeline takes models from the hub: a look into its cache, and a download with progress on the node."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..comfyui_host import host
from ..trust.message import Message

if TYPE_CHECKING:
    from pathlib import Path


def cached_commit(hub_id: str, revision: str) -> str:
    """Name the commit whose whole model is in the cache, '' where there is none. It asks no server and never raises."""
    with suppress(Exception):  # whatever is wrong, running the node says it
        from ..pipelines.models import hub

        return hub.fetch(hub_id, revision, download=False).name
    return ""


def fetch(hub_id: str, revision: str, *, download: bool, node_id: str | None) -> Path:
    """Download what the cache lacks of a model, and return its folder there. An interrupt ends the download.

    Raises HubError, BadFolder.
    """
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
