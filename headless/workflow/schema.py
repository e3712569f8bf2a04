"""What a node type takes and gives, read from a node class in this process or from a server's `/object_info`.

An input may bring others along: those of a drop-down's option (`COMFY_DYNAMICCOMBO_V3`) as `format.codec`, those of a
list that grows (`COMFY_AUTOGROW_V3`) as `images.image0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...trust.foreign import Foreign, Unreadable, fitting, nothing_is_empty

DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
AUTOGROW = "COMFY_AUTOGROW_V3"
MAX_GROWN = 100  # inputs of one list, as in ComfyUI
MAX_INPUTS = 10_000  # of a node type, all options together
MAX_NAME = 1_000  # letters
NOTHING: Any = object()  # where even null is a value
WIDGETS: Mapping[str, Any] = {  # what the page shows a widget for -> what that holds at first
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
SEED_NAMES = frozenset({"seed", "noise_seed"})  # get a control widget without asking, in every frontend


@dataclass(frozen=True)
class InputSpec:
    name: str  # in full: "format.codec"
    type: str  # "COMBO" for drop-downs, whichever way they were declared
    required: bool
    options: tuple[Any, ...] = ()  # of a drop-down
    config: Mapping[str, Any] = field(default_factory=dict)  # default, min, max, forceInput ...
    brings: Mapping[str, tuple[InputSpec, ...]] = field(default_factory=dict)  # by option, the inputs that come with it
    grows: tuple[InputSpec, ...] = ()  # all that the list can have, in their order

    @property
    def forced(self) -> bool:
        """Whether it is a socket alone, whatever its type."""
        return bool(self.config.get("forceInput") or (not self.required and self.config.get("defaultInput")))

    @property
    def kind(self) -> str:
        """What a value of it is: its type, and of one that takes several ("FLOAT,INT") its widget's."""
        named = self.config.get("widgetType")
        return named if isinstance(named, str) else self.type

    @property
    def widget(self) -> str | None:
        """The kind of widget that the browser shows for it; it stores that one's value in `widgets_values`."""
        return self.kind if self.kind in WIDGETS and not self.forced else None

    @property
    def default(self) -> Any:
        """What its widget holds in a new node; NOTHING where that is not known, or there is no widget."""
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
    inputs: Mapping[str, InputSpec]  # those that it always has
    hidden: Mapping[str, str]  # name -> UNIQUE_ID, PROMPT, EXTRA_PNGINFO ...
    outputs: tuple[str, ...]  # types
    is_output: bool  # whether ComfyUI runs it without being asked by another node
    title: str = ""  # that a new node has, where that is not its type

    @property
    def widgets(self) -> list[InputSpec]:
        return [spec for spec in self.inputs.values() if spec.widget]

    def inputs_with(self, values: Mapping[str, Any]) -> dict[str, InputSpec]:
        """All inputs that a node with these values has; a list's are named in full in its stead."""
        return {spec.name: spec for spec in walk(self.inputs.values(), lambda spec: values.get(spec.name))}


def walk(specs: Iterable[InputSpec], value: Callable[[InputSpec], Any]) -> Iterator[InputSpec]:
    """These inputs, each followed by those that its value brings along; `value` is asked once for each, in order."""
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


_Declaration = str | Annotated[list[Any], Field(min_length=1)]  # a type, or that and its options
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
    """The schema of a node type of a running ComfyUI, from its entry in `/object_info`. Raises Unreadable."""
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
    """The inputs of a node type, or those that an option brings along.

    room: for as many. prefix: of their names.
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
