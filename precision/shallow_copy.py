"""Shallow copies of a module ("shells"): they share its weights, and have parts replaced. The module stays as it is."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .dtypes import HALF_DTYPES

Make = Callable[[torch.nn.Module], torch.nn.Module]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
          "_forward_hooks_always_called")  # fmt: skip


def add_hook(
    shell: torch.nn.Module,
    before: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> None:
    """Let a shell change its arguments, by name, and its result. It uses PyTorch's hooks, which also run around another
    shell that replaces its forward."""
    names = [*inspect.signature(shell.forward).parameters]
    shell.__dict__.update({name: OrderedDict(shell.__dict__[name]) for name in HOOKS})  # not the module's
    if before:
        shell.register_forward_pre_hook(
            lambda _, args, given: ((), before(dict(zip(names, args, strict=False)) | given)), with_kwargs=True
        )
    if after:
        shell.register_forward_hook(lambda *given: after(given[-1]))


def without_hooks(module: torch.nn.Module) -> dict[str, OrderedDict[int, Any]]:
    """Return a module's hook attributes with only the hooks that `add_hook` added."""
    kinds = {name: module.__dict__[name] for name in HOOKS if name in module.__dict__}
    ours = {n for hooks in kinds.values() for n, hook in hooks.items() if getattr(hook, "__module__", "") == __name__}
    return {name: OrderedDict((n, hook) for n, hook in hooks.items() if n in ours) for name, hooks in kinds.items()}


def shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a shallow copy, without attributes that are bound methods of the module itself. transformers 4 leaves such
    on layers whose outputs it recorded; the copy would call the original's, with nothing replaced."""
    shell = copy.copy(module)
    own = shell.__dict__.get("forward")
    if getattr(own, "__func__", None) is type(module).forward:
        del shell.__dict__["forward"]
    return shell


def replace_submodules(module: torch.nn.Module, replacements: Mapping[str, Make]) -> torch.nn.Module:
    """Return a shell of `module` in which each named submodule is replaced by its function's result. Only the modules
    above those are copied."""
    if make := replacements.get(""):
        return make(module)
    shells: dict[str, torch.nn.Module] = {}

    def shell_at(path: str) -> torch.nn.Module:
        if path not in shells:
            shell = shells[path] = shallow_copy(module.get_submodule(path))
            shell.__dict__["_modules"] = dict(shell._modules)
            if path:
                above, _, name = path.rpartition(".")
                shell_at(above)._modules[name] = shell
        return shells[path]

    for path, make in replacements.items():
        above, _, name = path.rpartition(".")
        if not any(part in replacements for part in accumulate(above.split("."), "{}.{}".format)):
            shell_at(above)._modules[name] = make(module.get_submodule(path))
    return shell_at("")


def reporting(
    module: torch.nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.nn.Module:
    """Return a shell that reports another dtype and device than its weights have, for diffusers pipelines.

    dtype: with float32, a pipeline passes float32, and keeps latents in it.
    device: the device that computes; the weights may be elsewhere between calls.
    """
    shell, kind = shallow_copy(module), type(module)
    says: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if dtype is not None:
        says["dtype"] = property(lambda _self: dtype)
    if device is not None:
        says["device"] = property(lambda _self: device)
    shell.__class__ = type(kind.__name__, (kind,), says)
    return shell


def with_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> torch.nn.Module:
    """Return a shell of `module` that calls `forward`, without the module's hooks."""
    shell = shallow_copy(module)
    shell.__dict__.update({name: OrderedDict() for name in HOOKS if name in shell.__dict__})
    shell.__dict__["forward"] = forward  # setattr would make a module a submodule of both
    return shell


class IdentityMemo:
    """Memoise a function by tensor identity, for arguments that are the same at every step, as a prompt is. Nobody may
    write to the tensors meanwhile.

    kept: number of tensors, the latest ones: a step may make several calls, each with its own prompt.
    """

    def __init__(self, kept: int = 2):
        self._kept = kept
        self._made: list[tuple[torch.Tensor, Any]] = []

    def of(self, given: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        """Return `make(tensor)`, computed now or earlier."""
        for known, made in self._made:
            if known is given:
                return made
        made = make(given)
        self._made = [*self._made, (given, made)][-self._kept :]
        return made


@cache
def mixin_class(base: type[torch.nn.Module], kind: type[torch.nn.Module]) -> type[Any]:
    """Return a class that derives from `base`, then `kind`, and has `kind`'s name."""
    return type(kind.__name__, (base, kind), {"__module__": base.__module__})


def copy_with_base(layer: torch.nn.Module, base: type[torch.nn.Module], **state: Any) -> Any:
    """Return a shallow copy of `layer` with the mixin `base` before its own class, and `state` as attributes."""
    copied = shallow_copy(layer)
    copied.__class__ = mixin_class(base, type(layer))
    copied.__dict__.update(state)  # setattr would register tensors and modules in `layer` too
    return copied


def structural_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a shell whose submodules are shells too: replacing a part at any depth does not change `module`.

    Parameters and buffers are the same objects, and stay so when either is moved to another device.
    """
    shells: dict[int, torch.nn.Module] = {}

    def copied(part: torch.nn.Module) -> torch.nn.Module:
        if id(part) not in shells:
            shell = shells[id(part)] = shallow_copy(part)
            shell.__dict__["_modules"] = {
                name: None if child is None else copied(child) for name, child in part._modules.items()
            }
        return shells[id(part)]

    return copied(module)


class KeptInFp32:
    """A mixin for a layer: half inputs become float32, and floating outputs get `outside`'s dtype.

    A float32 output would make the residual stream float32, which the half-precision layers after it refuse. A value
    that does not fit becomes infinite, and the guard sees it.
    """

    outside: torch.nn.Parameter  # without elements; its dtype is the output's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        made = super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return pytree.tree_map_only(torch.Tensor, self._narrowed, made)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.outside.dtype) if tensor.is_floating_point() else tensor


def keep_in_fp32(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a layer and its children compute in float32 and return `dtype`.

    It keeps its place, type and weight names, by which adapters and scaled layers find it.
    """
    if isinstance(layer, KeptInFp32):
        return
    outside = torch.nn.Parameter(torch.empty(0, dtype=dtype, device=next(layer.parameters()).device), False)
    layer.float()
    layer.__class__ = mixin_class(KeptInFp32, type(layer))
    # First: diffusers' VAEs take the dtype of the first weight below for that of the activations.
    layer._parameters = {"outside": outside, **layer._parameters}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
