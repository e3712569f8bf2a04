"""Hides ComfyUI's functions from the pack only, or gives them one more argument, in a running ComfyUI.

ComfyUI itself works as before, like a ComfyUI that has renamed the function in its own code. A file in custom_nodes
imports this module. POST /hidden {"name", "how", "kind"} hides one function and restores the previous one. GET /hidden
returns the ComfyUI functions that the pack calls.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

OURS = "/ComfyUI-OneDiff-Guard/"
CHECKOUT = str(Path(inspect.getfile(import_module("folder_paths"))).parent) + "/"
MISSING, CHANGED, GONE = "missing", "changed", "gone"  # how it is hidden
REPLACED, WRAPPED = "replaced", "wrapped"  # how the pack uses it
_NOTHING = object()
called: set[str] = set()  # functions that the pack calls
asked: set[str] = set()  # hidden names that the pack accesses


def called_by_pack(depth: int = 2) -> bool:
    """Return whether the caller is the pack's own code."""
    return OURS in sys._getframe(depth).f_code.co_filename


class Hidden:
    """A descriptor that replaces an attribute of a class or a module."""

    def __init__(self, name: str, how: str, kind: str, original: Any):
        self._name, self._how, self._kind, self._original = name, how, kind, original

    def _get(self, of: Any, kind: Any = None) -> Any:
        ours = called_by_pack()
        asked.add(self._name) if ours else None
        if ours and self._how == MISSING:
            whose = "module" if isinstance(of, types.ModuleType) else (kind or type(of)).__name__
            raise AttributeError(f"'{whose}' object has no attribute '{self._name}'")
        value = self._real(of, kind)
        if self._how != CHANGED or not callable(value):
            return value
        if self._kind == REPLACED:
            return _taking_more(value) if ours else _given_more(value)
        return _requiring_more(self._name, value) if ours else value

    _get.__code__ = _get.__code__.replace(co_name="__getattr__")  # so a traceback looks like normal attribute access
    __get__ = _get

    def _real(self, of: Any, kind: Any) -> Any:
        held = getattr(of, "__dict__", {})
        for own in (held, held.get("_modules", {}), held.get("_parameters", {})):
            if self._name in own:
                return own[self._name]
        if self._original is _NOTHING:
            raise AttributeError(self._name)
        bind = getattr(type(self._original), "__get__", None)
        return bind(self._original, of, kind) if bind else self._original

    def __set__(self, of: Any, value: Any) -> None:
        more = called_by_pack() and self._how == CHANGED and self._kind == REPLACED and isinstance(of, types.ModuleType)
        vars(of)[self._name] = _given_more(value) if more else value  # the module's own code calls it

    def __delete__(self, of: Any) -> None:
        del vars(of)[self._name]


def _requiring_more(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args: Any, new_in_comfyui: int, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    changed.__name__ = changed.__qualname__ = name
    return changed


def _given_more(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Call the pack's function with one more argument, as a newer ComfyUI would."""
    return lambda *args, **kwargs: ours(*args, **kwargs, new_in_comfyui=1)


def _taking_more(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the original so that it accepts the argument."""
    return lambda *args, new_in_comfyui=0, **kwargs: original(*args, **kwargs)


class _Modules(dict[str, Any]):
    """sys.modules without one module."""

    def __init__(self, gone: str):
        super().__init__({name: module for name, module in sys.modules.items() if name != gone})
        self._gone = gone

    def get(self, name: str, default: Any = None) -> Any:
        asked.update({self._gone} & {name})
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        asked.update({self._gone} & {name})
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        asked.update({self._gone} & {name})
        raise KeyError(name)

    __missing__.__code__ = __missing__.__code__.replace(co_name="__getattr__")


class _Sys:
    """`sys` for the pack's modules, without one of ComfyUI's modules."""

    def __init__(self, gone: str):
        self.modules = _Modules(gone)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def _restore() -> None:
    while _undo:
        _undo.pop()()


_undo: list[Callable[[], None]] = []


def hide(name: str, how: str, kind: str) -> str:
    """Hide one, and return why it cannot be hidden; "" if it is. kind: how the pack uses it. name: "" for none."""
    _restore()
    asked.clear()
    for module in [*sys.modules.values()]:
        if OURS in (getattr(module, "__file__", "") or "") and "tell_once" in vars(module):
            module.tell_once.cache_clear()
    if not name:
        return ""
    if how == GONE:
        return _module_gone(name)
    owner, attribute = _owner_of(name)
    if owner is None or (isinstance(owner, types.ModuleType) and attribute not in vars(owner)):
        return "not in this ComfyUI"
    if attribute == "attention_pytorch":
        _rename_attention()
    if how == CHANGED and kind == WRAPPED:
        return _wrapped_with_more(attribute)
    if isinstance(owner, types.ModuleType):
        before = owner.__class__
        if how == CHANGED and kind == REPLACED:
            real = vars(owner)[attribute]
            vars(owner)[attribute] = _taking_more(real)
            _undo.append(lambda: vars(owner).__setitem__(attribute, real))
        owner.__class__ = type("Module", (before,), {attribute: Hidden(attribute, how, kind, _NOTHING)})
        _undo.append(lambda: setattr(owner, "__class__", before))
        return ""
    original = vars(owner).get(attribute, _NOTHING)
    inherited = inspect.getattr_static(owner, attribute, _NOTHING)
    setattr(owner, attribute, Hidden(attribute, how, kind, inherited))
    if issubclass(owner, torch.nn.Module):  # modules have their own access to submodules
        _hide_submodule(owner, attribute, how)
    _undo.append(lambda: delattr(owner, attribute) if original is _NOTHING else setattr(owner, attribute, original))
    return ""


def _hide_submodule(owner: type, attribute: str, how: str) -> None:
    def get(of: Any, name: str) -> Any:
        if name == attribute and how == MISSING and called_by_pack():
            asked.add(name)
            raise AttributeError(f"'{owner.__name__}' object has no attribute '{name}'")
        return torch.nn.Module.__getattr__(of, name)

    get.__code__ = get.__code__.replace(co_name="__getattr__")
    owner.__getattr__ = get  # pyright: ignore[reportAttributeAccessIssue]
    _undo.append(lambda: delattr(owner, "__getattr__"))


def _module_gone(name: str) -> str:
    if name not in sys.modules:
        return "not in this ComfyUI"
    for module in [*sys.modules.values()]:
        if OURS in (getattr(module, "__file__", "") or "") and vars(module).get("sys") is sys:
            vars(module)["sys"] = _Sys(name)
            _undo.append(partial(setattr, module, "sys", sys))
    return ""


def _rename_attention() -> None:
    """Rename attention functions. Otherwise only users with another pack's kernel access PyTorch's attention."""
    module = import_module("comfy.ldm.modules.attention")
    for function in {value for name, value in vars(module).items() if name.startswith("attention_")}:
        for each in {function, getattr(function, "__wrapped__", function)}:
            _undo.append(partial(setattr, each, "__name__", each.__name__))
            each.__name__ = "another"


def _owner_of(name: str) -> tuple[Any, str]:
    """Return the module or class that has it, and its name there; (None, "") if this ComfyUI has none."""
    path = name.split(".")
    for cut in range(len(path) - 1, 0, -1):
        try:
            owner = import_module(".".join(path[:cut]))
        except ImportError:
            continue
        for part in path[cut:-1]:
            owner = getattr(owner, part, None)
        return owner, path[-1]
    return None, ""


def _wrapped_with_more(function: str) -> str:
    """Make ComfyUI pass one more argument to the function that the pack wraps."""
    executor = import_module("comfy.patcher_extension").WrapperExecutor
    execute = executor.execute

    def executed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.original.__name__.lstrip("_") != function:
            return execute(self, *args, **kwargs)
        if self.idx == 0:
            args = (*args, _MORE)
        if self.is_last:
            args = tuple(each for each in args if each is not _MORE)
        return execute(self, *args, **kwargs)

    executor.execute = executed
    _undo.append(lambda: setattr(executor, "execute", execute))
    return ""


_MORE = object()


def _note(frame: Any, event: str, _arg: Any) -> None:
    """Profile function: record ComfyUI's functions that the pack calls."""
    if event != "call" or not frame.f_back or OURS not in frame.f_back.f_code.co_filename:
        return
    code = frame.f_code
    if code.co_filename.startswith(CHECKOUT) and OURS not in code.co_filename:
        file = code.co_filename.removeprefix(CHECKOUT).removesuffix(".py").replace("/", ".")
        called.add(f"{file}.{getattr(code, 'co_qualname', code.co_name)}")


class Salted:
    """Pass on MODEL, VAE and a corner of the latents. With another salt, ComfyUI caches no later node.

    broken: the MODEL has a NaN weight.
    """

    RETURN_TYPES = ("MODEL", "VAE", "LATENT")
    FUNCTION = "salted"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        wires = {"model": ("MODEL",), "vae": ("VAE",), "latent": ("LATENT",)}
        return {"required": {**wires, "salt": ("INT", {"max": 10**9}), "broken": ("BOOLEAN", {})}}

    def salted(self, model: Any, vae: Any, latent: Any, salt: int, broken: bool) -> tuple[Any, Any, Any]:
        if broken:
            with torch.inference_mode(False):
                next(model.model.diffusion_model.parameters()).data.fill_(torch.nan)
        sys.setprofile(_note if salt == 0 else None)  # for the executing thread
        return model, vae, {"samples": latent["samples"][..., :2, :2]}


class Empty:
    """Does nothing."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "pass_by"
    INPUT_TYPES = classmethod(lambda cls: {"required": {}})

    def pass_by(self) -> dict[str, Any]:
        return {}


def add_routes() -> None:
    from aiohttp import web

    routes = import_module("server").PromptServer.instance.routes

    @routes.post("/hidden")
    async def _hide(request: Any) -> Any:
        return web.json_response({"why_not": hide(**await request.json())})

    @routes.get("/hidden")
    async def _called(_request: Any) -> Any:
        return web.json_response({"called": sorted(called), "asked": sorted(asked)})


NODE_CLASS_MAPPINGS = {"TestSalted": Salted, "TestEmpty": Empty}
