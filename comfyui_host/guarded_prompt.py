"""Insert guards into a queued prompt: at each input by which a node computes with a MODEL or a VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INSERTED = "onediff_guard_"  # prefix of inserted guards' ids
INHERIT = "inherit"  # the precision of an inserted guard; or "auto"

_GUARD = "OneDiffGuardNaNGuardNative"
_SLOTS = {"MODEL": (0, "model"), "VAE": (1, "vae")}  # type → the guard's slot and input
_OURS = "OneDiffGuard"
_ANY = {"*", "COMFY_MATCHTYPE_V3"}
_NOTHING_COMPUTED = {"INT", "FLOAT", "STRING", "BOOLEAN", "SIGMAS", "LORA_MODEL", "LOSS_MAP"}


def with_guards(
    prompt: Mapping[str, Any], classes: Mapping[str, Any], precision: str = INHERIT
) -> tuple[dict[str, Any], int]:
    """Return a prompt in API format with a guard at each use of a MODEL or VAE, and the number of guards.

    A use is a link to a node that computes with the MODEL or VAE (`_uses`). Unknown classes, broken links and slots out
    of range stay as they are.
    classes: the node classes by name.
    """
    made, taken = dict[str, Any](), set(prompt)
    guards: dict[tuple[str, int, str], str] = {}  # (source, slot, type) → the guard's id
    for id_, node in prompt.items():
        made[id_] = node
        target = _class_of(node, classes)
        inputs = node.get("inputs") if target else None
        if not isinstance(inputs, dict) or node["class_type"].startswith(_OURS):
            continue
        changed = dict[str, Any]()
        for name, value in inputs.items():
            if (kind := _kind(value, prompt, classes, target, name)) in _SLOTS and _uses(target, kind):
                source, slot = value
                if (source, slot, kind) not in guards:
                    guards[source, slot, kind] = _free_id(source, slot, taken)
                    taken.add(guards[source, slot, kind])
                changed[name] = [guards[source, slot, kind], _SLOTS[kind][0]]
        if changed:
            made[id_] = {**node, "inputs": {**inputs, **changed}}
    for (source, slot, kind), id_ in guards.items():
        settings = {"on_failure": "rerun", "exact_fp32": False, "scope": "learned", "precision": precision}
        made[id_] = {
            "class_type": _GUARD,
            "inputs": {_SLOTS[kind][1]: [source, slot], **settings},
            "_meta": {"title": f"NaN Guard ({kind}), by the setting 'Guard every workflow'"},
        }
    return made, len(guards)


def _class_of(node: Any, classes: Mapping[str, Any]) -> Any:
    type_ = node.get("class_type") if isinstance(node, dict) else None
    return classes.get(type_) if isinstance(type_, str) else None


def _kind(value: Any, prompt: Mapping[str, Any], classes: Mapping[str, Any], target: Any, name: str) -> str:
    """Return the type of a link's value; "" for no link, a broken one, or one from a node of this pack."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int):
        return ""
    source = prompt.get(value[0]) or {}
    outputs = outputs_of(_class_of(source, classes))
    if not 0 <= value[1] < len(outputs) or source["class_type"].startswith(_OURS):
        return ""
    return _inputs_of(target).get(name, "") if outputs[value[1]] in _ANY else outputs[value[1]]


def outputs_of(cls: Any) -> list[str]:
    """Return a node's output types as plain str. Packs' own str classes may be equal to other types."""
    return [str.__str__(kind) if isinstance(kind, str) else "COMBO" for kind in getattr(cls, "RETURN_TYPES", ()) or ()]


def _inputs_of(cls: Any) -> dict[str, str]:
    """Return a node's input types by name; {} if its INPUT_TYPES raises."""
    try:
        types = cls.INPUT_TYPES()
        specs = {name: spec[0] for part in ("optional", "required") for name, spec in types.get(part, {}).items()}
    except Exception:  # noqa: BLE001 - other people's code
        return {}
    return {name: str.__str__(kind) for name, kind in specs.items() if isinstance(kind, str)}


def _uses(cls: Any, kind: str) -> bool:
    """Return whether a node computes with a MODEL or VAE. If the node passes it on: only if it also outputs images
    (all-in-one samplers). Else: unless it outputs only numbers, text, schedules or training results."""
    outputs = set(outputs_of(cls))
    if kind in outputs or outputs & _ANY:
        return {"MODEL": {"LATENT", "IMAGE"}, "VAE": {"VAE", "IMAGE"}}[kind] <= outputs
    return bool(outputs - _NOTHING_COMPUTED)


def computes(cls: Any) -> bool:
    """Return whether a node has a MODEL or VAE input and computes with it."""
    declared = set(_inputs_of(cls).values())
    return any(kind in declared and _uses(cls, kind) for kind in _SLOTS)


def _free_id(source: str, slot: int, taken: set[str]) -> str:
    id_ = f"{INSERTED}{source.replace(':', '_')}_{slot}"  # a colon separates a subgraph's id from a node's
    while id_ in taken:
        id_ += "_"
    return id_
