"""What a node type takes and gives, read from a node class in this process or from a server's `/object_info`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ..trust.foreign import Foreign, fitting

WIDGET_TYPES = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"})
SEED_NAMES = frozenset({"seed", "noise_seed"})  # get a control widget without asking, in every frontend


@dataclass(frozen=True)
class InputSpec:
    name: str
    type: str  # "COMBO" for drop-downs, whichever way they were declared
    required: bool
    options: tuple[Any, ...] = ()  # of a drop-down
    config: Mapping[str, Any] = field(default_factory=dict)  # default, min, max, forceInput ...

    @property
    def is_widget(self) -> bool:
        """Whether the browser shows a widget for it, and so stores its value in `widgets_values`."""
        return self.type in WIDGET_TYPES and not self.config.get("forceInput")

    @property
    def may_have_control(self) -> bool:
        """Whether a `control_after_generate` widget may follow it."""
        return bool(self.config.get("control_after_generate")) or (self.type == "INT" and self.name in SEED_NAMES)


@dataclass(frozen=True)
class Schema:
    class_type: str
    inputs: Mapping[str, InputSpec]
    hidden: Mapping[str, str]  # name -> UNIQUE_ID, PROMPT, EXTRA_PNGINFO ...
    outputs: tuple[str, ...]  # types
    is_output: bool  # whether ComfyUI runs it without being asked by another node

    @property
    def widgets(self) -> list[InputSpec]:
        return [spec for spec in self.inputs.values() if spec.is_widget]


def from_class(class_type: str, node_class: type) -> Schema:
    """The schema of a classic node class."""
    return _schema(
        class_type,
        node_class.INPUT_TYPES(),
        getattr(node_class, "RETURN_TYPES", ()),
        bool(getattr(node_class, "OUTPUT_NODE", False)),
    )


def _nothing_is_empty(value: object) -> object:
    return {} if value is None else value


_Declaration = str | Annotated[list[Any], Field(min_length=1)]  # a type, or that and its options
_Inputs = Annotated[dict[str, _Declaration], BeforeValidator(_nothing_is_empty)]


class _DeclaredInputs(Foreign):
    required: _Inputs = {}
    optional: _Inputs = {}
    hidden: _Inputs = {}


class _NodeInfo(Foreign):
    input: Annotated[_DeclaredInputs, BeforeValidator(_nothing_is_empty)] = _DeclaredInputs()
    output: list[str | list[Any]] | None = None
    output_node: bool | None = None


def from_object_info(class_type: str, info: object) -> Schema:
    """The schema of a node type of a running ComfyUI, from its entry in `/object_info`. Raises Unreadable."""
    node = fitting(_NodeInfo, info)
    return _schema(class_type, vars(node.input), node.output or (), bool(node.output_node))


def _schema(class_type: str, declared: Mapping[str, Any], outputs: Any, is_output: bool) -> Schema:
    inputs = {
        name: _input(name, declaration, group == "required")
        for group in ("required", "optional")
        for name, declaration in (declared.get(group) or {}).items()
    }
    hidden = {
        name: str(kind[0] if isinstance(kind, (list, tuple)) else kind)
        for name, kind in (declared.get("hidden") or {}).items()
    }
    names = tuple("COMBO" if isinstance(kind, (list, tuple)) else str(kind) for kind in outputs)
    return Schema(class_type, inputs, hidden, names, is_output)


def _input(name: str, declaration: Any, required: bool) -> InputSpec:
    kind, *rest = declaration if isinstance(declaration, (list, tuple)) else (declaration,)
    config = rest[0] if rest and isinstance(rest[0], dict) else {}
    if isinstance(kind, (list, tuple)):
        return InputSpec(name, "COMBO", required, tuple(kind), config)
    options = config.get("options")
    return InputSpec(name, str(kind), required, tuple(options) if isinstance(options, (list, tuple)) else (), config)
