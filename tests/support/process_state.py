"""Process state that a test can change for later tests: read and compared.

It imports no library: a library that is not loaded has no state. Changes that libraries make when first imported or
used are in ALLOWED, each with its reason.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

Facts = dict[Any, Any]  # compared values by name; may be nested
State = Mapping[str, Facts]  # by kind
PACKAGE = "comfyui_onediff_guard"
ABSENT = "absent"
ENDING_SECONDS = 60.0  # timeout for threads that are ending
DESCRIPTORS = "/proc/self/fd"


def variables() -> Facts:
    return dict(os.environ)


def interpreter() -> Facts:
    return {
        "working directory": Path.cwd(),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
    }


def signals() -> Facts:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def loggers() -> Facts:
    """Levels, filters and handlers, without pytest's own, which it adds to the root logger and to loggers that do not
    propagate for each phase of a test."""
    root = logging.getLogger()

    def handlers(logger: logging.Logger) -> list[logging.Handler]:
        return [handler for handler in logger.handlers if not type(handler).__module__.startswith("_pytest")]

    facts: Facts = {"disabled below": root.manager.disable, "root": (root.level, handlers(root), root.filters.copy())}
    for name, logger in root.manager.loggerDict.items():
        if type(logger) is not logging.PlaceHolder:
            own = handlers(logger) if logger.handlers else None
            facts[name] = logger.level, logger.disabled, logger.propagate, own or None, logger.filters[:]
    return facts


def warning_filters() -> Facts:
    return {**dict.fromkeys(warnings.filters, "in force"), "showwarning": warnings.showwarning}


def threads() -> Facts:
    return dict.fromkeys(threading.enumerate(), "alive")


def descriptors() -> Facts:
    """How often each file, socket and so on is open. Empty if the system does not report it."""
    found: Counter[str] = Counter()
    with suppress(FileNotFoundError):
        for number in os.listdir(DESCRIPTORS):  # noqa: PTH208 - by far the fastest
            with suppress(FileNotFoundError):  # the descriptor of listdir itself
                path = os.readlink(f"{DESCRIPTORS}/{number}")  # noqa: PTH115
                found[path.partition(":[")[0].removesuffix(" (deleted)")] += 1
    return found


def torch_flags() -> Facts:
    """Backend switches, default dtype and device, and the modes of this thread."""
    if not (torch := _loaded("torch")):
        return {}
    core, devices = torch._C, ("cpu", "cuda")
    facts: Facts = {name: _told(getattr(core, name)) for name in vars(core) if _SWITCHES.fullmatch(name)}
    if precision := getattr(core, "_get_fp32_precision_getter", None):  # since PyTorch 2.9
        facts |= {f"fp32 precision of {where}": _told(precision, *where) for where in _PRECISIONS}
    return facts | {
        "default dtype": torch.get_default_dtype(),
        "default device": str(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "function modes": core._len_torch_function_stack(),
        "dispatch modes": core._len_torch_dispatch_stack(),
        "functions can be overridden": core._is_torch_function_enabled(),
        "autocast": [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices],
    }


def torch_names() -> Facts:
    """Attributes of torch's classes and modules, to find patches of `nn.Module.register_parameter`, `torch.empty`, …"""
    if not (torch := _loaded("torch")):
        return {}
    held = {"nn.Module": torch.nn.Module, "nn.Parameter": torch.nn.Parameter, "Tensor": torch.Tensor}
    held |= {"nn.init": torch.nn.init, "nn.functional": torch.nn.functional, "torch": torch}
    told = "__warningregistry__"  # the interpreter's own memo of warnings
    return {name: {key: value for key, value in vars(of).items() if key != told} for name, of in held.items()}


def global_hooks() -> Facts:
    """Hooks on all modules of the process."""
    if not (modules := _loaded("torch.nn.modules.module")):
        return {}
    return {
        name: dict(vars(modules)[name]) for name in vars(modules) if name.startswith("_global_") and "hooks" in name
    }


def compilers() -> Facts:
    """Settings of dynamo and inductor, and whether they compile."""
    facts: Facts = {}
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if config := _loaded(name):
            facts[name] = config.get_hash().hex()
    if stance := getattr(_loaded("torch._dynamo.eval_frame"), "_stance", None):
        facts["stance"] = stance
    return facts


def pack_settings() -> Facts:
    """The pack's own process-wide settings: without a run they have no holders."""
    facts: Facts = {}
    for name in _our_modules(len(sys.modules)):
        module = _loaded(name)
        for setting in _shared_settings(module) if isinstance(module, ModuleType) else ():
            facts[name, setting] = _holders(getattr(module, setting))
    if host := _loaded(f"{PACKAGE}.comfyui_host.host"):
        facts["folders of a run"] = host._folders.get() is not host._DEFAULT_FOLDERS
    if block := _loaded(f"{PACKAGE}.pipelines.compile.block"):
        facts["listener of compiling"] = block._listener.get()
    return facts


@lru_cache(maxsize=1)
def _our_modules(loaded: int) -> list[str]:
    """loaded: number of modules, the cache key: scanning thousands takes longer than most tests."""
    del loaded
    return [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]


@cache
def _shared_settings(module: ModuleType) -> list[str]:
    kinds = {"SharedSetting", "_Holders"}
    return [name for name, value in vars(module).items() if type(value).__name__ in kinds]


def _holders(setting: Any) -> Any:
    return [*(setting._holders if hasattr(setting, "_holders") else setting.current)]


def _loaded(name: str) -> Any:
    return sys.modules.get(name)


def _told(switch: Callable[..., Any], *where: str) -> Any:
    try:
        return switch(*where)
    except RuntimeError as error:  # set by both the new and the old setting
        return str(error)[:60]


KINDS: Mapping[str, Callable[[], Facts]] = {
    "variable": variables,
    "interpreter": interpreter,
    "signal": signals,
    "logger": loggers,
    "warnings": warning_filters,
    "thread": threads,
    "descriptor": descriptors,
    "torch flag": torch_flags,
    "torch name": torch_names,
    "hooks": global_hooks,
    "compiler": compilers,
    "pack": pack_settings,
}
_SIGNALS = tuple(signal.valid_signals())
_PRECISIONS = [
    ("generic", "all"),
    *(("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")),
]
_SWITCHES = re.compile(r"_get_(cublas|cudnn|flash|math|mem_eff|mkldnn|onednn|deterministic|float32)\w*(?<!_size)")
OF_LIBRARIES = ("interpreter", "logger", "warnings", "torch name", "compiler")  # kinds that an import may change


_OURS = {PACKAGE, *sys.stdlib_module_names}


def read() -> State:
    return {kind: facts() for kind, facts in KINDS.items()}


def left_behind(before: State, modules: Sequence[str]) -> list[str]:
    """Like `changes`, but in the test that first imports a library, changes made by libraries are not compared: which
    test that is depends on their order. modules: names of the modules loaded before."""
    same = len(sys.modules) == len(modules) and next(reversed(sys.modules)) == modules[-1]
    new = not same and any(name.partition(".")[0] not in _OURS for name in sys.modules.keys() - {*modules})
    return changes(before, [kind for kind in KINDS if not (new and kind in OF_LIBRARIES)])


def changes(before: State, kinds: Iterable[str] = KINDS) -> list[str]:
    """The differences, one line each. First it waits for ending threads and collects garbage."""
    found = [kind for kind in kinds if _differences(kind, before[kind])]
    if "thread" in found:
        for thread in threading.enumerate():
            if not _allowed("thread", thread, before["thread"].get(thread, ABSENT), "alive"):
                thread.join(ENDING_SECONDS)
    if found:
        gc.collect()
    return [line for kind in found for line in _differences(kind, before[kind])]


def _differences(kind: str, before: Facts) -> list[str]:
    now = KINDS[kind]()
    if now == before:
        return []
    return [
        f"{kind} {_short(name)}: {_told_apart(old, new)}"
        for name, old, new in _flat(before, now)
        if not _allowed(kind, name, old, new)
    ]


def _flat(before: Facts, now: Facts, path: str = "") -> Iterator[tuple[Any, Any, Any]]:
    for name in {**before, **now}:
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _flat(old, new, f"{path}{name}.")
        elif old is not new and old != new:
            yield f"{path}{name}" if path else name, old, new


def _allowed(kind: str, name: Any, old: Any, new: Any) -> bool:
    return old == new or any(rule(name, old, new) for rule in ALLOWED.get(kind, {}).values())


def _short(value: Any) -> str:
    return str(value)[:120]


def _told_apart(old: Any, new: Any) -> str:
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        old, new = [each for each in old if each not in new], [each for each in new if each not in old]
    return f"{_short(old)} → {_short(new)}"


def _inductors_pool() -> Collection[Any]:
    pool = getattr(getattr(_loaded("torch._inductor.async_compile"), "AsyncCompile", None), "pool", None)
    return getattr(pool(), "_threads", ()) if pool and pool.cache_info().currsize else ()


def _has_tracker() -> bool:
    return (
        getattr(getattr(_loaded("multiprocessing.resource_tracker"), "_resource_tracker", None), "_fd", None)
        is not None
    )


Rule = Callable[[Any, Any, Any], bool]  # (name, old value, new value)
_INDUCTORS = {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
_DYNAMOS = {"nn.Module.__init__", "nn.Module.__setstate__", "nn.Module.___needs_generation_tag_patch"}
ALLOWED: Mapping[str, Mapping[str, Rule]] = {
    "variable": {
        "pytest sets the current test": lambda name, _old, _new: name == "PYTEST_CURRENT_TEST",
        "inductor exports its folders once": lambda name, old, _new: name in _INDUCTORS and old == ABSENT,
    },
    "logger": {
        "a module creates its loggers when it is imported": lambda _name, old, _new: old == ABSENT,
        "dynamo removes its trace handler when it is not used": lambda name, _old, _new: name == "torch.__trace",
    },
    "warnings": {
        "a library silences warnings of its own when it is imported": lambda name, old, _new: (
            old == ABSENT and isinstance(name, tuple) and name[2].__module__ != "builtins"
        ),
    },
    "thread": {
        "inductor keeps its compile threads": lambda thread, _old, _new: thread in _inductors_pool(),
        "a thread of an earlier test has ended": lambda _name, _old, new: new == ABSENT,
        "playwright keeps helper threads until the browser is closed": lambda thread, _old, _new: (
            _loaded("playwright") is not None and thread.name.startswith("asyncio_")
        ),
        "tqdm starts its monitor thread with the first bar and keeps it": lambda thread, _old, _new: (
            type(thread).__name__ == "TMonitor"
        ),
    },
    "descriptor": {
        "files of earlier tests are closed": lambda _name, old, new: new == ABSENT or (old != ABSENT and new < old),
        "multiprocessing keeps a pipe to its tracker": lambda name, old, new: (
            name == "pipe" and _has_tracker() and new == 1 + (0 if old == ABSENT else old)
        ),
        "matplotlib keeps used fonts open": lambda name, _old, _new: name.endswith(".ttf"),
    },
    "torch name": {
        "a submodule of torch is imported on first use": lambda _name, old, new: (
            old == ABSENT and isinstance(new, ModuleType)
        ),
        "dynamo patches nn.Module on first use": lambda name, _old, _new: name in _DYNAMOS,
        "transformers adds it to the class": lambda name, _old, _new: name == "nn.Module.smart_apply",
    },
    "pack": {
        "a module is imported, and its settings have no holders": lambda _name, old, new: old == ABSENT and not new,
    },
}
