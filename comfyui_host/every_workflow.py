"""Guard every workflow: a NaN Guard before each use of a MODEL or VAE in a prompt that is queued.

ComfyUI hands each prompt to its prompt handlers before it validates it. Ours puts guard nodes into a copy of those
that are to be guarded; nothing is patched, and no workflow file changes. Whether one is to be guarded says, in this
order: the prompt itself (`extra_data.onediff_guard`), the environment variable, and the settings of whoever queued it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from . import host
from .page_settings import settings_of

VARIABLE = "ONEDIFF_GUARD_EVERY_WORKFLOW"
KEY = "onediff_guard"  # in a prompt's extra_data
SETTING = "OneDiffGuard.EveryWorkflow"  # of the page (web/every_workflow.js)
FAST_FP16 = "OneDiffGuard.FastFp16"
INSERTED = "onediff_guard_"  # the ids of inserted guards begin so
INHERIT, AUTO = "inherit", "auto"  # what an inserted guard computes in

_GUARDS = {"MODEL": ("OneDiffGuardNaNGuardModel", "model"), "VAE": ("OneDiffGuardNaNGuardVAE", "vae")}
_OURS = "OneDiffGuard"
_ANY = {"*", "COMFY_MATCHTYPE_V3"}
_NOTHING_COMPUTED = {"INT", "FLOAT", "STRING", "BOOLEAN", "SIGMAS", "LORA_MODEL", "LOSS_MAP"}
_user: ContextVar[str] = ContextVar("onediff_guard_user", default="default")

logger = logging.getLogger(__name__)


def install() -> None:
    """Have ComfyUI's server, where there is one, hand us the prompts that are queued."""
    server = host.server()
    if not hasattr(server, "add_on_prompt_handler"):
        return
    server.add_on_prompt_handler(on_prompt)
    _where_it_fits(_note_users, server)
    _where_it_fits(_watch_outputs, server)


def _where_it_fits(add: Callable[[Any], None], server: Any) -> None:
    try:
        add(server)
    except Exception as error:  # noqa: BLE001 - a server of another kind
        logger.info("Guard every workflow: %s is not possible in this ComfyUI: %s", add.__name__, error)


def _watch_outputs(_server: Any) -> None:
    from .black_output import install

    install()


def on_prompt(data: Any) -> Any:
    """The request's JSON, with guards in its prompt where it is to be guarded. Never raises."""
    try:
        precision = wanted(data)
        prompt = data.get("prompt") if precision and isinstance(data, dict) else None
        if isinstance(prompt, dict):
            guarded, guards = with_guards(prompt, host.node_classes(), precision)
            if guards:
                logger.info("Guard every workflow: %d guards, precision %s", guards, precision)
                return {**data, "prompt": guarded}
    except Exception:
        logger.exception("Guard every workflow: this prompt runs as it came")
    return data


def wanted(data: Any) -> str:
    """The precision of the guards that a prompt is to have: "inherit" or "auto"; "" where it is to have none."""
    extra = data.get("extra_data") if isinstance(data, dict) else None
    settings = settings_of(_user.get())
    automatic = AUTO if settings.get(FAST_FP16) is True else INHERIT
    for asked in (extra.get(KEY) if isinstance(extra, dict) else None, os.environ.get(VARIABLE), settings.get(SETTING)):
        if asked is not None and asked != "":
            word = str(asked).strip().lower()
            return word if word in (INHERIT, AUTO) else automatic if word in ("1", "true", "yes", "on") else ""
    return ""


def with_guards(
    prompt: Mapping[str, Any], classes: Mapping[str, Any], precision: str = INHERIT
) -> tuple[dict[str, Any], int]:
    """A prompt in API format with a guard at each use of a MODEL or VAE, and how many they are.

    A node uses one where it does not hand it on. What is not as ComfyUI has it (unknown classes, broken links, slots
    out of range) stays as it is.
    classes: the node classes by name.
    """
    made: dict[str, Any] = {}
    guards: dict[tuple[str, int, str], str] = {}  # (source, slot, type) → the guard's id
    for id_, node in prompt.items():
        made[id_] = node
        target = _class_of(node, classes)
        inputs = node.get("inputs") if target else None
        if not isinstance(inputs, dict) or node["class_type"].startswith(_OURS):
            continue
        changed = dict[str, Any]()
        for name, value in inputs.items():
            if (kind := _kind(value, prompt, classes, target, name)) in _GUARDS and _uses(target, kind):
                source, slot = value
                guard = guards.setdefault((source, slot, kind), _free_id(source, slot, prompt))
                changed[name] = [guard, 0]
        if changed:
            made[id_] = {**node, "inputs": {**inputs, **changed}}
    for (source, slot, kind), id_ in guards.items():
        class_type, input_ = _GUARDS[kind]
        settings = {"on_failure": "rerun", "strict": False, "scope": "learned", "precision": precision}
        made[id_] = {
            "class_type": class_type,
            "inputs": {input_: [source, slot], **settings},
            "_meta": {"title": f"NaN Guard ({kind}), by the setting 'Guard every workflow'"},
        }
    return made, len(guards)


def _class_of(node: Any, classes: Mapping[str, Any]) -> Any:
    type_ = node.get("class_type") if isinstance(node, dict) else None
    return classes.get(type_) if isinstance(type_, str) else None


def _kind(value: Any, prompt: Mapping[str, Any], classes: Mapping[str, Any], target: Any, name: str) -> str:
    """The type of what a link hands to an input; "" where it is no link, or is not to be touched."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int):
        return ""
    source = prompt.get(value[0])
    outputs = _outputs(_class_of(source, classes))
    if not 0 <= value[1] < len(outputs) or source["class_type"].startswith(_OURS):
        return ""
    return _declared(target, name) if outputs[value[1]] in _ANY else outputs[value[1]]


def _outputs(cls: Any) -> list[str]:
    """The types of what a node puts out. Packs have strings of their own kinds there, which equal what they are not."""
    return [str.__str__(kind) if isinstance(kind, str) else "COMBO" for kind in getattr(cls, "RETURN_TYPES", ()) or ()]


def _declared(cls: Any, name: str) -> str:
    types = cls.INPUT_TYPES()
    declared = {**(types.get("optional") or {}), **(types.get("required") or {})}.get(name)
    return str.__str__(declared[0]) if declared and isinstance(declared[0], str) else ""


def _uses(cls: Any, kind: str) -> bool:
    """Whether a node computes with a MODEL or VAE: it does not hand it on, or makes pictures as well (all-in-one
    samplers); and what it puts out is not only figures, schedules and what training gives."""
    outputs = set(_outputs(cls))
    if kind in outputs or outputs & _ANY:
        return {"MODEL": {"LATENT", "IMAGE"}, "VAE": {"VAE", "IMAGE"}}[kind] <= outputs
    return bool(outputs - _NOTHING_COMPUTED)


def computes(cls: Any) -> bool:
    """Whether a node computes with a MODEL or VAE that it is given."""
    types = cls.INPUT_TYPES() if cls else {}
    specs = [spec for part in ("required", "optional") for spec in (types.get(part) or {}).values()]
    declared = {str.__str__(spec[0]) for spec in specs if spec and isinstance(spec[0], str)}
    return any(kind in declared and _uses(cls, kind) for kind in _GUARDS)


def _free_id(source: str, slot: int, prompt: Mapping[str, Any]) -> str:
    id_ = f"{INSERTED}{source.replace(':', '_')}_{slot}"  # a colon stands between a subgraph's id and a node's
    while id_ in prompt:
        id_ += "_"
    return id_


def _note_users(server: Any) -> None:
    """Have prompts be handled in a context that knows whose they are: handlers are not told."""
    from aiohttp import web

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        try:
            _user.set(server.user_manager.get_request_user_id(request))
        except Exception:  # noqa: BLE001 - an unknown user, whom ComfyUI itself refuses
            _user.set("default")
        return await handler(request)

    server.app.middlewares.append(noting)
