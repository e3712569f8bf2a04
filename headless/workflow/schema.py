"""The inputs and outputs of a node type, read from a node class in this process or from a server's `/object_info`.

An input may add further inputs: a drop-down's option (`COMFY_DYNAMICCOMBO_V3`) adds `format.codec`, a growing list
(`COMFY_AUTOGROW_V3`) adds `images.image0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...trust.foreign import Foreign, Unreadable, fitting, nothing_is_empty

DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
AUTOGROW = "COMFY_AUTOGROW_V3"
MAX_GROWN = 100  # most inputs of one growing list, as in ComfyUI
MAX_INPUTS = 10_000  # most inputs of a node type, over all options
MAX_NAME = 1_000  # characters
NOTHING: Any = object()  # no value; None (JSON null) is a value
WIDGETS: Mapping[str, Any] = {  # widget type of ComfyUI's page -> value of a new widget
    "INT": 0,
    "FLOAT": 0,
    "STRING": "",
    "BOOLEAN": False,
    "COMBO": NOTHING,
    DYNAMIC_COMBO: NOTHING,
    "MARKDOWN": "",
    "PAINTER": "",
    "COLOR": "#000000",
    "COLORS": [],
    "BOUNDING_BOX": {"x": 0, "y": 0, "width": 512, "height": 512},
    "BOUNDING_BOXES": [],
    "COMPOSITOR": {},
    "CURVE": {"points": [[0, 0], [1, 1]], "interpolation": "monotone_cubic"},
    "RANGE": {"min": 0.0, "max": 1.0},
    "VIDEO_EDIT": {},
    "IMAGECOMPARE": ["", ""],
}
SEED_NAMES = frozenset({"seed", "noise_seed"})  # always have a control widget, in every frontend


@dataclass(frozen=True)
class InputSpec:
    name: str  # the full name: "format.codec"
    type: str  # "COMBO" for drop-downs, however they are declared
    required: bool
    options: tuple[Any, ...] = ()  # a drop-down's values
    config: Mapping[str, Any] = field(default_factory=dict)  # default, min, max, forceInput ...
    brings: Mapping[str, tuple[InputSpec, ...]] = field(default_factory=dict)  # option -> inputs that it adds
    grows: tuple[InputSpec, ...] = ()  # all inputs that a growing list can have, in order

    @property
    def forced(self) -> bool:
        """Whether it is only a socket, whatever its type."""
        return bool(self.config.get("forceInput") or (not self.required and self.config.get("defaultInput")))

    @property
    def kind(self) -> str:
        """Its type; for an input of several types ("FLOAT,INT"), its widget's type."""
        named = self.config.get("widgetType")
        return named if isinstance(named, str) else self.type

    @property
    def widget(self) -> str | None:
        """The type of its widget on the page, which saves the value in `widgets_values`; None if it has no widget."""
        return self.kind if self.kind in WIDGETS and not self.forced else None

    @property
    def default(self) -> Any:
        """The value of its widget in a new node; NOTHING if it is unknown, or if it has no widget."""
        if self.widget is None:
            return NOTHING
        if self.options:
            return (not self.brings and self.config.get("default")) or self.options[0]
        return self.config.get("default", WIDGETS[self.widget])

    @property
    def may_have_control(self) -> bool:
        """Whether a `control_after_generate` widget may follow it."""
        return bool(self.config.get("control_after_generate")) or (self.type == "INT" and self.name in SEED_NAMES)


@dataclass(frozen=True)
class Schema:
    class_type: str
    inputs: Mapping[str, InputSpec]  # the inputs that it always has
    hidden: Mapping[str, str]  # name -> UNIQUE_ID, PROMPT, EXTRA_PNGINFO ...
    outputs: tuple[str, ...]  # types
    is_output: bool  # whether it is an output node, which ComfyUI runs in any case
    title: str = ""  # a new node's title, if it differs from the type

    @property
    def widgets(self) -> list[InputSpec]:
        return [spec for spec in self.inputs.values() if spec.widget]

    def inputs_with(self, values: Mapping[str, Any]) -> dict[str, InputSpec]:
        """Return all inputs of a node with these values, by full name. A growing list is replaced by its inputs."""
        return {spec.name: spec for spec in walk(self.inputs.values(), lambda spec: values.get(spec.name))}


def walk(specs: Iterable[InputSpec], value: Callable[[InputSpec], Any]) -> Iterator[InputSpec]:
    """Yield these inputs, each followed by the inputs that its value adds. Calls `value` in the same order."""
    for spec in specs:
        if spec.grows:
            yield from spec.grows
        else:
            yield spec
            option = value(spec)
            yield from walk(spec.brings.get(option, ()) if isinstance(option, str) else (), value)


def from_class(class_type: str, node_class: type) -> Schema:
    return _schema(
        class_type,
        node_class.INPUT_TYPES(),
        getattr(node_class, "RETURN_TYPES", ()),
        bool(getattr(node_class, "OUTPUT_NODE", False)),
        getattr(node_class, "TITLE", ""),
    )


_Declaration = str | Annotated[list[Any], Field(min_length=1)]  # a type, or a list of a type and its options
_Declarations = Annotated[dict[str, _Declaration], BeforeValidator(nothing_is_empty)]


class _DeclaredInputs(Foreign):
    required: _Declarations = {}
    optional: _Declarations = {}
    hidden: _Declarations = {}


_Inputs = Annotated[_DeclaredInputs, BeforeValidator(nothing_is_empty)]


class _Option(Foreign):
    key: str
    inputs: _Inputs = _DeclaredInputs()


class _DynamicCombo(Foreign):
    options: list[_Option]


class _Template(Foreign):
    input: _DeclaredInputs
    names: list[str] | None = None
    prefix: str = ""
    min: int = 1
    max: int = MAX_GROWN


class _Autogrow(Foreign):
    template: _Template


class _NodeInfo(Foreign):
    input: _Inputs = _DeclaredInputs()
    output: list[str | list[Any]] | None = None
    output_node: bool | None = None
    display_name: str | None = None


def from_object_info(class_type: str, info: object) -> Schema:
    """Return the schema of a running ComfyUI's node type from its entry in `/object_info`. Raises Unreadable."""
    node = fitting(_NodeInfo, info)
    return _schema(class_type, vars(node.input), node.output or (), bool(node.output_node), node.display_name or "")


def _schema(class_type: str, declared: Mapping[str, Any], outputs: Any, is_output: bool, title: str) -> Schema:
    inputs = {spec.name: spec for spec in _inputs(declared, iter(range(MAX_INPUTS)))}
    hidden = {name: _type(declaration) for name, declaration in (declared.get("hidden") or {}).items()}
    names = tuple("COMBO" if isinstance(kind, (list, tuple)) else str(kind) for kind in outputs)
    return Schema(class_type, inputs, hidden, names, is_output, title)


def _type(declaration: Any) -> str:
    return str(declaration[0] if isinstance(declaration, (list, tuple)) else declaration)


def _inputs(declared: Mapping[str, Any], room: Iterator[int], prefix: str = "") -> list[InputSpec]:
    """Return the inputs of a node type, or the inputs that an option adds. Raises Unreadable.

    room: one item for each input that is still allowed. prefix: of their names.
    """
    return [
        _input(f"{prefix}{name}", declaration, group == "required", room)
        for group in ("required", "optional")
        for name, declaration in (declared.get(group) or {}).items()
    ]


def _input(name: str, declaration: Any, required: bool, room: Iterator[int]) -> InputSpec:
    if next(room, None) is None or len(name) > MAX_NAME:
        raise Unreadable(f"it has more than {MAX_INPUTS:,} inputs, or one with more than {MAX_NAME:,} letters")
    kind, *rest = declaration if isinstance(declaration, (list, tuple)) else (declaration,)
    config = rest[0] if rest and isinstance(rest[0], dict) else {}
    if isinstance(kind, (list, tuple)):
        return InputSpec(name, "COMBO", required, tuple(kind), config)
    if kind == DYNAMIC_COMBO:
        options = fitting(_DynamicCombo, config).options
        brings = {option.key: tuple(_inputs(vars(option.inputs), room, f"{name}.")) for option in options}
        return InputSpec(name, kind, required, tuple(brings), config, brings)
    if kind == AUTOGROW:
        template = fitting(_Autogrow, config).template
        names = template.names or [f"{template.prefix}{number}" for number in range(min(template.max, MAX_GROWN))]
        first = next(iter([*template.input.required.values(), *template.input.optional.values()]), None)
        least = template.min if template.input.required else 0
        grows = tuple(
            _input(f"{name}.{each}", first, number < least, room)
            for number, each in enumerate(names[:MAX_GROWN])
            if first
        )
        return InputSpec(name, kind, required, config=config, grows=grows)
    options = config.get("options")
    return InputSpec(name, str(kind), required, tuple(options) if isinstance(options, (list, tuple)) else (), config)
