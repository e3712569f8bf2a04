"""Write docs/comfyui-surface.md: every function of ComfyUI that the pack calls, replaces or reads.

    python scripts/comfyui_surface.py                    write the page
    python scripts/comfyui_surface.py --read CHECKOUT    first record a ComfyUI's signatures in comfyui_signatures.json

The names are read from comfyui_host/, the only package that accesses ComfyUI: modules that it looks up among the loaded
ones, and attributes of their objects. The owner of an attribute follows from the expression in the code (OWNERS).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ROOT / "comfyui_host"
PAGE = ROOT / "docs" / "comfyui-surface.md"
SIGNATURES = Path(__file__).with_name("comfyui_signatures.json")

CALL, READ, REPLACE, WRAP = "called", "read", "replaced", "wrapped"


class Use(NamedTuple):
    how: str  # CALL, READ; REPLACE: ours is called instead; WRAP: ours is called around it
    purpose: str
    off: str  # the feature that is off if a ComfyUI lacks it, or has a different one


_MANAGEMENT, _LOADED = "comfy.model_management", "comfy.model_management.LoadedModel"
_PATCHER, _MODEL, _VAE = "comfy.model_patcher.ModelPatcher", "comfy.model_base.BaseModel", "comfy.sd.VAE"
_KINDS, _EXECUTOR = "comfy.patcher_extension.WrappersMP", "comfy.patcher_extension.WrapperExecutor"
_GUIDER, _LAYER = "comfy.samplers.CFGGuider", "comfy.ops.CastWeightBiasOp"
_QUANTISED, _CONTROLNET = "comfy.quant_ops.QuantizedTensor", "comfy.controlnet.ControlNet"
_QWEN = "comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel"
_FORMAT = "comfy.latent_formats.LatentFormat"
_SERVER, _QUEUE = "server.PromptServer", "execution.PromptQueue"
_PROVIDER = "comfy_execution.cache_provider"

_MODEL_OFF = "the guard of a MODEL"
_PLAN_OFF = "reruns apart from a plan for memory"
_VAE_OFF = "the guard of a VAE"
_CONTROLNET_OFF = "guarding ControlNets"
_RERUN_OFF = "reruns: the model goes on unguarded"
_FRESH_OFF = "loading anew what may be stale"
_LISTS = "lists of models are empty"
_EVERY_OFF = "'Guard every workflow'"
_OFFER_OFF = "the offer to run a black result again"
_NODE_OFF = "reports on other packs' nodes: the log has them"
_HISTORY_OFF = "the guard's lines in the history"
_PREVIEWS_OFF = "previews of pipelines"
_PROBE_OFF = "Numerics Probe (MODEL), which says so"
_ROOM_OFF = "pipelines under ComfyUI's memory manager: they are moved as without it"
_LINGER_OFF = "a pipeline's weights are read again where a loader is changed"

USES: dict[str, Use] = {
    # --- folders, settings, options
    "folder_paths.get_filename_list": Use(CALL, "lists of LoRAs and checkpoints", _LISTS),
    "folder_paths.get_full_path": Use(CALL, "where a LoRA or checkpoint is", _LISTS),
    "folder_paths.get_folder_paths": Use(CALL, "where models are", _LISTS),
    "folder_paths.get_input_directory": Use(CALL, "where inputs are", "the folder 'input' is taken"),
    "folder_paths.get_output_directory": Use(CALL, "where outputs go", "the folder 'output' is taken"),
    "folder_paths.get_user_directory": Use(
        CALL, "where profiles and settings are", "profiles are kept in ~/.onediff-guard, settings count as unset"
    ),
    "comfyui_version.__version__": Use(READ, "the version in reports and profiles", "it reads 'unknown'"),
    "comfy.cli_args.args": Use(READ, "start options about memory and precision", "none counts as given"),
    "comfy.cli_args.parser": Use(READ, "defaults of start options", "options that are off by default count as such"),
    "comfy.samplers.KSampler": Use(READ, "lists of samplers and schedulers", "'euler' and 'normal' are offered"),
    "nodes.NODE_CLASS_MAPPINGS": Use(READ, "what a prompt's nodes take and give", _EVERY_OFF),
    # --- server
    f"{_SERVER}.instance": Use(READ, "everything on the page", "texts on nodes, " + _EVERY_OFF),
    f"{_SERVER}.add_on_prompt_handler": Use(CALL, "prompts before they are validated", _EVERY_OFF),
    f"{_SERVER}.user_manager": Use(READ, "whose prompt it is", "users of a server share one switch"),
    f"{_SERVER}.app": Use(READ, "whose prompt it is", "users of a server share one switch"),
    "app.user_manager.UserManager.get_request_user_id": Use(
        CALL, "whose prompt it is", "users of a server share one switch"
    ),
    f"{_SERVER}.last_prompt_id": Use(READ, "the prompt that runs", _HISTORY_OFF),
    f"{_SERVER}.client_id": Use(READ, "the page that queued it", "texts on nodes while they run, reports"),
    f"{_SERVER}.prompt_queue": Use(READ, "the prompt that runs", _HISTORY_OFF),
    f"{_SERVER}.send_progress_text": Use(CALL, "texts on nodes", "texts on nodes while they run"),
    f"{_SERVER}.send_sync": Use(CALL, "reports to the page", "a guard's last report, where a run ends early"),
    f"{_QUEUE}.currently_running": Use(READ, "the prompt that runs", _HISTORY_OFF),
    f"{_QUEUE}.get_current_queue_volatile": Use(CALL, "prompts that wait", _OFFER_OFF),
    # --- execution
    "comfy_execution.utils.get_executing_context": Use(CALL, "the node that runs", _NODE_OFF),
    "comfy_execution.utils.ExecutionContext.node_id": Use(READ, "the node that runs", _NODE_OFF),
    "comfy_execution.progress.get_progress_state": Use(CALL, "the node that runs", _NODE_OFF),
    "comfy_execution.progress.ProgressRegistry.dynprompt": Use(READ, "the node that runs", _NODE_OFF),
    "comfy_execution.graph.DynamicPrompt.get_display_node_id": Use(CALL, "the node that runs", _NODE_OFF),
    "comfy_execution.graph.DynamicPrompt.get_node": Use(CALL, "the node that runs", _NODE_OFF),
    "comfy_execution.graph_utils.ExecutionBlocker": Use(
        CALL, "what a guard puts out where nothing is wired", "the node behind it says less clearly what it lacks"
    ),
    f"{_PROVIDER}.CacheProvider": Use(READ, "what nodes put out", _OFFER_OFF),
    f"{_PROVIDER}.register_cache_provider": Use(CALL, "what nodes put out", _OFFER_OFF),
    f"{_PROVIDER}.unregister_cache_provider": Use(CALL, "what nodes put out", "results go on being looked at"),
    f"{_PROVIDER}.CacheContext.node_id": Use(READ, "what nodes put out", _OFFER_OFF),
    f"{_PROVIDER}.CacheContext.class_type": Use(READ, "what nodes put out", _OFFER_OFF),
    f"{_PROVIDER}.CacheValue.outputs": Use(READ, "what nodes put out", _OFFER_OFF),
    "comfy.utils.ProgressBar": Use(CALL, "progress of pipelines", "progress is in the log"),
    "comfy.utils.ProgressBar.update_absolute": Use(CALL, "progress of pipelines", "progress on the node"),
    f"{_MANAGEMENT}.InterruptProcessingException": Use(
        READ, "whether somebody stopped a run", "a report says 'ended by an error' of a run that was stopped"
    ),
    f"{_MANAGEMENT}.throw_exception_if_processing_interrupted": Use(
        CALL, "whether somebody stops a run", "pipelines end at the end of their node alone"
    ),
    # --- the guard of a MODEL
    f"{_KINDS}.OUTER_SAMPLE": Use(READ, "a wrapper's kind", _MODEL_OFF),
    f"{_KINDS}.PREPARE_SAMPLING": Use(READ, "a wrapper's kind", _MODEL_OFF),
    f"{_KINDS}.APPLY_MODEL": Use(READ, "a wrapper's kind", _MODEL_OFF),
    f"{_EXECUTOR}.__call__": Use(CALL, "what a wrapper is around", _MODEL_OFF),
    f"{_EXECUTOR}.class_obj": Use(READ, "the model that is called", _MODEL_OFF),
    f"{_GUIDER}.outer_sample": Use(WRAP, "one report for a run", "each call reports for itself"),
    f"{_GUIDER}.model_options": Use(READ, "one report for a run", "each call reports for itself"),
    "comfy.sampler_helpers.prepare_sampling": Use(WRAP, "text that a model refines", "the guard of such text"),
    f"{_MODEL}.apply_model": Use(WRAP, "a step of the denoiser", _MODEL_OFF),
    f"{_MODEL}.extra_conds": Use(REPLACE, "text that a model refines", "the guard of such text"),
    f"{_MODEL}.diffusion_model": Use(READ, "the network", _MODEL_OFF),
    f"{_MODEL}.model_config": Use(READ, "the model's name", "reports have another name"),
    f"{_MODEL}.manual_cast_dtype": Use(READ, "what it computes in", _MODEL_OFF),
    f"{_MODEL}.get_dtype": Use(CALL, "what it computes in", _MODEL_OFF),
    f"{_MODEL}.current_patcher": Use(READ, "which weights LoRAs change", _MODEL_OFF),
    f"{_PATCHER}.patches": Use(READ, "which weights LoRAs change", _MODEL_OFF),
    f"{_PATCHER}.hook_patches": Use(READ, "which weights a prompt's LoRAs change", _MODEL_OFF),
    f"{_PATCHER}.clone": Use(CALL, "a MODEL of its own for the guard", _MODEL_OFF),
    f"{_PATCHER}.add_wrapper_with_key": Use(CALL, "puts the guard around a MODEL", _MODEL_OFF),
    f"{_PATCHER}.remove_wrappers_with_key": Use(CALL, "replaces a guard", _MODEL_OFF),
    f"{_PATCHER}.wrappers": Use(READ, "whether a MODEL has a guard", _MODEL_OFF),
    # --- reruns
    "comfy.ldm.modules.attention.attention_pytorch": Use(CALL, "attention that takes fp32", _RERUN_OFF),
    "comfy.ops.cast_bias_weight": Use(REPLACE, "weights of a layer that runs", _RERUN_OFF),
    "comfy.ops.cast_modules_with_vbar": Use(REPLACE, "weights of a block that runs", _RERUN_OFF),
    f"{_MANAGEMENT}.load_models_gpu": Use(REPLACE, "moves a model's weights", _RERUN_OFF),
    "comfy.ops.fp8_linear": Use(REPLACE, "products in fp8", _RERUN_OFF),
    "comfy.ops.linear_input_act": Use(REPLACE, "products in int8", _RERUN_OFF),
    _LAYER: Use(READ, "products of quantised layers", _RERUN_OFF),
    f"{_LAYER}.weight_function": Use(READ, "whether a weight is patched as it runs", "such weights are rounded first"),
    _QUANTISED: Use(READ, "which weights are quantised", _RERUN_OFF),
    f"{_QUANTISED}.from_float": Use(
        CALL, "rows of a quantised product", "with every layer scaled, weights are dequantised in each step"
    ),
    "comfy.ldm.hidream_o1.model.HiDreamO1Transformer.clear_kv_cache": Use(
        CALL, "what a network keeps of earlier runs", "forgetting that"
    ),
    **{
        f"{_QWEN}.{name}": Use(
            how, "what a network keeps of a run", "forgetting that, where the run goes on without its guard"
        )
        for name, how in (("reset_prefix_cache", CALL), ("prefix_cache_enabled", READ))
    },
    f"{_MANAGEMENT}.unpin_memory": Use(
        CALL, "memory that a cache had pinned", "giving back what it had pinned for a call that failed"
    ),
    "comfy.model_prefetch.pause_malloc_graph": Use(
        CALL, "keeps what a guard holds out of a plan for memory", _MODEL_OFF
    ),
    "comfy.ldm.mage_flow.model.MageTimestepProjEmbeddings.forward": Use(
        REPLACE, "timesteps as a model was trained on them", "rounding them so in a rerun"
    ),
    "comfy.model_prefetch.malloc_graph_enabled": Use(REPLACE, "a plan for memory", _PLAN_OFF),
    f"{_MANAGEMENT}.current_loaded_models": Use(READ, "what is on the card", _FRESH_OFF),
    f"{_LOADED}.model": Use(READ, "what is on the card", _FRESH_OFF),
    f"{_PATCHER}.model": Use(READ, "what is on the card", _FRESH_OFF),
    f"{_PATCHER}.current_hooks": Use(READ, "weights of hooks", _FRESH_OFF),
    f"{_PATCHER}.patch_hooks": Use(CALL, "weights of hooks", _FRESH_OFF),
    f"{_PATCHER}.loaded_size": Use(CALL, "how much of it is on the card", _FRESH_OFF),
    f"{_MODEL}.model_lowvram": Use(READ, "whether it is on the card in part", "it is loaded whole"),
    f"{_LOADED}.model_unload": Use(CALL, "takes a model off the card", _FRESH_OFF),
    f"{_LOADED}.model_load": Use(CALL, "puts a model on the card", _FRESH_OFF),
    # --- the guard of a VAE
    f"{_VAE}.first_stage_model": Use(READ, "the network", _VAE_OFF),
    f"{_VAE}.vae_dtype": Use(READ, "what it computes in", _VAE_OFF),
    f"{_VAE}.device": Use(READ, "where it computes", _VAE_OFF),
    f"{_VAE}.working_dtypes": Use(
        READ, "whether it computes in fp32 alone", "'auto' computes such a VAE in fp16, where a card has no bf16"
    ),
    **{
        f"{_VAE}.{name}": Use(REPLACE, "one report for a run", _VAE_OFF)
        for name in ("decode", "decode_tiled", "encode", "encode_tiled")
    },
    _CONTROLNET: Use(READ, "which have a network", _CONTROLNET_OFF),
    f"{_CONTROLNET}.get_control": Use(REPLACE, "the guard of a ControlNet's network", _CONTROLNET_OFF),
    f"{_CONTROLNET}.control_model": Use(READ, "the network", _CONTROLNET_OFF),
    f"{_CONTROLNET}.manual_cast_dtype": Use(READ, "what it computes in", _CONTROLNET_OFF),
    f"{_CONTROLNET}.previous_controlnet": Use(READ, "the others of a chain", _CONTROLNET_OFF),
    f"{_CONTROLNET}.multigpu_clones": Use(READ, "those for other devices", "guarding them there"),
    "comfy.ldm.models.autoencoder.AutoencoderKL.decode": Use(REPLACE, "a tile of a picture", _VAE_OFF),
    "comfy.ldm.models.autoencoder.AutoencoderKL.encode": Use(REPLACE, "a tile of a picture", _VAE_OFF),
    # --- the probe
    "comfy.sample.sample": Use(CALL, "a sampling run in fp32", _PROBE_OFF),
    "comfy.sample.prepare_noise": Use(CALL, "the noise of a seed", _PROBE_OFF),
    "comfy.sample.fix_empty_latent_channels": Use(CALL, "a model's empty latents", _PROBE_OFF),
    # --- pipelines
    f"{_MANAGEMENT}.get_torch_device": Use(CALL, "the device that computes", _ROOM_OFF),
    f"{_MANAGEMENT}.minimum_inference_memory": Use(CALL, "room for a call", "ComfyUI is not asked for room"),
    f"{_MANAGEMENT}.free_memory": Use(CALL, "room for a component", "ComfyUI is not asked for room"),
    f"{_MANAGEMENT}.soft_empty_cache": Use(CALL, "gives memory back", "PyTorch keeps it for later"),
    f"{_MANAGEMENT}.extra_reserved_memory": Use(CALL, "what --reserve-vram keeps free", "nothing counts as reserved"),
    f"{_MANAGEMENT}.get_free_memory": Use(CALL, "what is free on the card", "PyTorch is asked"),
    f"{_MANAGEMENT}.get_total_memory": Use(CALL, "what the card has", "PyTorch is asked"),
    _LOADED: Use(CALL, "a place among ComfyUI's models", _LINGER_OFF),
    f"{_LOADED}.model_loaded_memory": Use(CALL, "what could be moved away", "a model counts as a whole"),
    f"{_LOADED}.model_memory": Use(CALL, "what could be moved away", "PyTorch is asked"),
    f"{_LOADED}.device": Use(READ, "which models are on the card", "PyTorch is asked"),
    f"{_FORMAT}.process_in": Use(CALL, "latents as a decoder takes them", _PREVIEWS_OFF),
    f"{_FORMAT}.latent_dimensions": Use(READ, "whether latents are a video's", "they count as pictures'"),
    f"{_FORMAT}.latent_rgb_factors": Use(READ, "colours of latents", _PREVIEWS_OFF),
    f"{_FORMAT}.latent_rgb_factors_bias": Use(READ, "colours of latents", "previews are a little off in colour"),
    "latent_preview.get_previewer": Use(CALL, "ComfyUI's small decoders", _PREVIEWS_OFF),
    "latent_preview.LatentPreviewer.decode_latent_to_preview": Use(CALL, "ComfyUI's small decoders", _PREVIEWS_OFF),
}

OWNERS: dict[str, dict[str, str]] = {  # expression -> what it is, by file; "": in every file
    "": {
        "management": _MANAGEMENT,
        "self._management": _MANAGEMENT,
        "folder_paths": "folder_paths",
        "server": _SERVER,
        "server()": _SERVER,
        "host.server()": _SERVER,
        "host.server().prompt_queue": _QUEUE,
        "server().prompt_queue": _QUEUE,
        "server.prompt_queue": _QUEUE,
        "executor": _EXECUTOR,
        "patcher": _PATCHER,
        "clone": _PATCHER,
        "vae": _VAE,
        "loaded": _LOADED,
        "ops": "comfy.ops",
    },
    "model_calls.py": {"kinds": _KINDS, "self.model": _MODEL, "executor.class_obj": _MODEL},
    "native_guards.py": {"executor.class_obj": _GUIDER, "of": _PATCHER, "control": _CONTROLNET},
    "rerun_layers.py": {
        "each": _LOADED,
        "each.model": _PATCHER,
        "model": _MODEL,
        "executor.class_obj": _MODEL,
        "kind": _QUANTISED,
    },
    "refining.py": {"model": _MODEL, "network": "comfy.ldm.hidream_o1.model.HiDreamO1Transformer", "qwen": _QWEN},
    "placement.py": {"loaded[index]": _LOADED, "loaded.pop(index)": _LOADED},
    "previews.py": {"known": _FORMAT, "decoder": "latent_preview.LatentPreviewer", "queue": _QUEUE},
    "probe.py": {"comfy": "comfy.sample"},
    "black_output.py": {"context": f"{_PROVIDER}.CacheContext", "value": f"{_PROVIDER}.CacheValue"},
    "runs.py": {"executor": ""},
    "every_workflow.py": {"server.user_manager": "app.user_manager.UserManager"},
    "host.py": {
        "context": "comfy_execution.utils.ExecutionContext",
        "state": "comfy_execution.progress.ProgressRegistry",
        "state.dynprompt": "comfy_execution.graph.DynamicPrompt",
        "cli": "comfy.cli_args",
        "here": _SERVER,
        "utils": "comfy.utils",
    },
}
OTHERS = {"pop", "modules", "buffers", "nodes"}  # attributes of lists and of PyTorch; `nodes` is ComfyUI 0.0.1's


def module_of(name: str) -> str:
    """Return the module of a function: all parts of the name before the first capitalised one, else before the last."""
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    return ".".join(parts[:first])


# --- where the code uses them ----------------------------------------------------------------------------------------


@lru_cache
def _trees() -> dict[str, ast.Module]:
    return {file.name: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(CODE.glob("*.py"))}


def used() -> dict[str, set[str]]:
    """Return each name of ComfyUI that the code looks up -> its files. Names without a known owner are left out."""
    found: dict[str, set[str]] = {}
    for file, tree in _trees().items():
        owners = OWNERS[""] | OWNERS.get(file, {})
        for node in ast.walk(tree):
            if name := _looked_up(node, owners):
                found.setdefault(name, set()).add(file)
    return found


def _looked_up(node: ast.AST, owners: Mapping[str, str]) -> str:
    """Return the name in `owner.name`, or in `getattr(owner, "name", …)` and the like; "" for anything else."""
    match node:
        case ast.Attribute(value=of, attr=attribute):
            pass
        case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[of, ast.Constant(value=str(attribute)), *_]):
            pass
        case _:
            return ""
    owner = _module(of) or owners.get(ast.unparse(of), "")
    return f"{owner}.{attribute}" if owner and attribute not in OTHERS else ""


def _module(node: ast.AST) -> str:
    """Return the module of `sys.modules["name"]`, `sys.modules.get("name")` or `_comfy("name")`, else ""."""
    match node:
        case (
            ast.Subscript(value=modules, slice=ast.Constant(value=str(name)))
            | ast.Call(func=ast.Attribute(value=modules, attr="get"), args=[ast.Constant(value=str(name)), *_])
        ) if ast.unparse(modules) == "sys.modules":
            return name
        case ast.Call(func=ast.Name("_comfy"), args=[ast.Constant(value=str(name))]):
            return name
    return ""


def modules() -> set[str]:
    """Return ComfyUI's modules that the code looks up."""
    return {name for tree in _trees().values() for node in ast.walk(tree) if (name := _module(node))}


def files() -> dict[str, list[str]]:
    """Return each name of the table -> the files that look it up, else that have it as an attribute or a text."""
    known, named = used(), dict[str, set[str]]()
    for file, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Attribute, ast.Constant)):
                named.setdefault(str(node.attr if isinstance(node, ast.Attribute) else node.value), set()).add(file)
    wrapped = {name: {"native_guards.py"} for name, use in USES.items() if use.how == WRAP}
    of = known | wrapped
    return {name: sorted(of.get(name) or named.get(name.rpartition(".")[2], ())) for name in USES}


# --- what a ComfyUI has ----------------------------------------------------------------------------------------------


def signatures(checkout: Path) -> dict[str, str]:
    """Return a checkout's members by name: a function's arguments, "class" or "value"."""
    return {name: found for name in USES if (found := _signature(checkout, name))}


def _signature(checkout: Path, name: str) -> str:
    module = module_of(name)
    file = checkout / (module.replace(".", "/") + ".py")
    if not file.is_file():
        return ""
    tree: ast.AST | None = ast.parse(file.read_text(encoding="utf-8"))
    whole = tree
    for part in name.removeprefix(f"{module}.").split("."):
        found = tree if isinstance(tree, ast.ImportFrom) else _member(tree, part)
        while found is None and isinstance(tree, ast.ClassDef) and tree.bases:
            tree = _member(whole, ast.unparse(tree.bases[0]))
            found = _member(tree, part)
        tree = found
    match tree:
        case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
            if any(ast.unparse(each) == "property" for each in tree.decorator_list):
                return "value"
            for each in ast.walk(arguments):
                if isinstance(each, ast.arg):
                    each.annotation = None
            return f"({ast.unparse(arguments)})"
        case ast.ClassDef():
            return "class"
        case None:
            attribute = re.escape(name.rpartition(".")[2])
            set_there = re.compile(rf"\.{attribute}(: [^=\n]+)? = ")
            files = [*(checkout / "comfy").glob("*.py"), *checkout.glob("*.py")]
            return "value" if any(set_there.search(each.read_text(encoding="utf-8")) for each in files) else ""
    return "value"


def _member(tree: ast.AST | None, name: str) -> ast.AST | None:
    """Return a module's or class's member of this name: a definition, or an assignment in it or to `self`."""
    if tree is None:
        return None
    body = list(getattr(tree, "body", []))
    nested = [inner for node in body if isinstance(node, (ast.If, ast.Try, ast.With)) for inner in ast.walk(node)]
    for node in (*body, *nested):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [each.asname or each.name for each in node.names]:
            return node
        targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    if isinstance(tree, ast.ClassDef):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name("self"), attr=attribute, ctx=ast.Store()) if attribute == name:
                    return node
    return None


# --- the page ---------------------------------------------------------------------------------------------------------


def compared(name: str, versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a word per version: "yes", "other arguments" than before, "–" if missing, "?" if its file was not read."""
    words: list[str] = []
    before = ""
    for known in versions.values():
        if not (name in known or READ_WHOLE in known or module_of(name) in known.get("files", "").split()):
            words.append("?")
            continue
        now = known.get(name, "")
        words.append("–" if not now else "yes" if before in ("", now) else "other arguments")
        before = now or before
    return words


READ_WHOLE = "checkout"


def render() -> str:
    versions = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    titles = ["of ComfyUI", "used in", "how", "what for", "off without it", *versions]
    rows, places = [], files()
    for name, use in USES.items():
        where = ", ".join(f"`{file.removesuffix('.py')}`" for file in places[name])
        rows.append([f"`{name}`", where, use.how, use.purpose, use.off, *compared(name, versions)])
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, ["---"] * len(titles), *rows))
    return HEAD.format(count=len(USES)) + table


HEAD = """\
# What the pack uses of ComfyUI

`scripts/comfyui_surface.py` writes this page from the code; a test holds that it is up to date, and that it has every
name that the code looks up.

All {count} are looked up in `comfyui_host/` while ComfyUI runs, and none is imported. Where a ComfyUI lacks one, or has
it with other arguments, what needs it is off: a guard goes on without guarding and says on its node, in its report and
in the log that it is not guarded and why (`comfyui_host/compat.py`), and anything else says so in the log, once. No run
ends for it, and none comes to something else than without the pack or with the guard.
`tests/comfyui/test_surface_in_comfyui.py` hides each in turn in real ComfyUIs, and has each take or give one argument
more.

- *how*: **called** or **read** by us; **replaced** while a rerun or a guarded call runs, and put back after it;
  **wrapped** by ComfyUI's own means.
- The last columns say whether a release has it: *yes* as the one before, with *other arguments*, or not (–). *?*: that
  file was not read.

"""


def main(path: Path = PAGE) -> None:
    """Write the page, with the same bytes on every system."""
    path.write_text(render(), encoding="utf-8", newline="\n")


def note(checkout: Path) -> None:
    """Record a checkout's members in comfyui_signatures.json."""
    version = re.search(r'__version__ = "(.+)"', (checkout / "comfyui_version.py").read_text(encoding="utf-8"))
    assert version, checkout
    known = json.loads(SIGNATURES.read_text(encoding="utf-8")) if SIGNATURES.is_file() else {}
    known[version[1]] = {READ_WHOLE: "read", **signatures(checkout)}
    SIGNATURES.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        for named in sys.argv[2:]:
            note(Path(named).expanduser())
    main()
