"""Finds the files that a library reads a component's weights from, and checks that they fit the component.

Only headers are read. diffusers prefers an index of shards to a single file, transformers the single file; both get
`use_safetensors=True`, and so read only the files that are found here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...trust.foreign import Foreign, check_whole, fitting, parse, read_bytes
from ...trust.message import Message, listed, shown
from ..errors import BadFolder
from ..small_files import MOST_VOCABULARY_BYTES, reading_file
from .on_disk import FLOATS, Tensor, Weights, bytes_by_dtype, name_of, read_header

if TYPE_CHECKING:
    import torch

STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_INSTEAD = re.compile(  # files that transformers prefers to all others
    r"adapter_config\.json|shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
)
_MOST_BUFFERS = 2**32  # bytes; CogView3-Plus' positions have 168 MB


class _ShardIndex(Foreign):
    metadata: dict[str, Any]  # both libraries need it
    weight_map: dict[str, str] = Field(min_length=1)  # tensor → file


def weights_of(path: Path, name: str, library: str) -> tuple[Weights, dict[str, Tensor]]:
    """Return the weight files of a component of a model folder, and {tensor: what their headers say of it}.

    path: the model folder. name: the component, and its folder.
    Raises BadFolder where there are none, where they are pickled, a variant or broken, and where shards are missing or
    not what their index says.
    """
    folder, stem = path / name, STEMS[library]
    where, there = f"{name_of(path)}/{name}", sorted(file.name for file in folder.iterdir())
    if library == "transformers" and (instead := next(filter(_INSTEAD.fullmatch, there), "")):
        raise BadFolder(
            "'{}' holds {}, from which transformers would load other weights than {}.safetensors. Delete that file, "
            "or get the original model.",
            *(where, instead, stem),
        )
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    order = (index, single) if library == "diffusers" else (single, index)
    first = next((file for file in order if file in there), None)
    if first is None:
        raise BadFolder(
            "'{}' has no {}. It holds {}. Formats other than .safetensors can run code when loaded and are refused. "
            "Rename a variant, such as fp16, to that name, or get the model in safetensors format.",
            *(where, single, listed(there) or "nothing"),
        )
    held: dict[str, dict[str, Tensor]] = {}  # file → its tensors by key
    shards = _shards(folder / index, f"{where}/{index}") if first == index else {}
    for file in sorted(set(shards.values())) or [single]:
        with reading_file(f"{where}/{file}"):
            held[file] = dict(read_header(folder / file).tensors)
    tensors = {key: tensor for found in held.values() for key, tensor in found.items()}
    places = {key: file for file, found in held.items() for key in found}
    if shards and (len(tensors) != sum(map(len, held.values())) or places != shards):
        wrong = sorted({*places.items()} ^ {*shards.items()})
        why = f"index and files differ on '{shown(wrong[0][0])}'" if wrong else "a tensor is in several files"
        raise BadFolder(
            "'{}/{}' does not fit the files beside it: {}. Download all of that folder again.", where, index, why
        )
    files = tuple(folder / file for file in held)
    return Weights(files, sum(file.stat().st_size for file in files), bytes_by_dtype(tensors) or {"F32": 0}), tensors


def check_fit(where: str, module: torch.nn.Module, tensors: Mapping[str, Tensor], *, sharded: bool = False) -> None:
    """Raise BadFolder unless the files hold each of the module's tensors, of the right shape, and no others.

    where: for messages. module: on the meta device, as its class builds it.
    tensors: what the headers say. Older names of a tensor count too where the library knows them.
    sharded: the tensors lie in several files; diffusers knows no older names then.
    """
    found = dict(tensors)
    if not sharded and hasattr(module, "_fix_state_dict_keys_on_load"):  # diffusers': 'query' is 'to_q'
        module._fix_state_dict_keys_on_load(found)  # pyright: ignore[reportCallIssue]
    wanted = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    names: dict[int, set[str]] = {}  # names of each parameter: T5's `shared` and `encoder.embed_tokens`
    for key, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(key)
    tied = {key: group for group in names.values() for key in group}
    computed = {key: buffer for key, buffer in module.named_buffers() if key not in wanted}  # in older CLIP files
    ignored = re.compile("|".join(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ["$^"]))
    missing = sorted(key for key in wanted if not tied.get(key, {key}) & found.keys())
    extra = sorted(key for key in found.keys() - wanted.keys() - computed.keys() if not ignored.search(key))
    for keys, what in ((missing, Message("lack")), (extra, Message("hold"))):
        if keys:
            some = listed((f"'{shown(key, 100)}'" for key in keys), most=3, limit=100)
            verb = Message("needs" if keys is missing else "does not have")
            facts = where, what, some, type(module).__name__, verb
            raise BadFolder(
                "'{}': its files {} {}, which a {} of its sizes {}. Download the whole model again.",
                *facts,
            )
    for key in sorted(wanted.keys() & found.keys()):
        if found[key].shape != wanted[key]:
            raise BadFolder(
                "'{}': '{}' has the shape {}, but {} in a model of this size. Download the whole model again.",
                *(where, shown(key), list(found[key].shape), list(wanted[key])),
            )
        if found[key].dtype not in FLOATS:
            raise BadFolder(
                "'{}': '{}' is stored as {}, and quantised weights are not supported. Get the model in 16 or 32 bits.",
                *(where, shown(key), found[key].dtype),
            )
    if (kept := sum(buffer.numel() * 4 for buffer in computed.values())) > _MOST_BUFFERS:
        raise BadFolder(
            "'{}': with the sizes in its config.json, position embeddings alone take {:.0f} GB. Download it again.",
            where,
            kept / 1e9,
        )


def _shards(index: Path, where: str) -> dict[str, str]:
    """Return {key: file} of an index of shards. Raises BadFolder if the index is invalid, or a file is missing."""
    with reading_file(where):
        check_whole(index)
        shards = fitting(_ShardIndex, parse(read_bytes(index, limit=MOST_VOCABULARY_BYTES))).weight_map
    for name in sorted(set(shards.values())):
        if not _SHARD.fullmatch(name):
            raise BadFolder(
                "'{}' names '{}', which is not a safetensors file beside it: other formats can run code when loaded "
                "and are refused. Get the model in safetensors format.",
                where,
                shown(name),
            )
        if not (index.parent / name).is_file():
            raise BadFolder(
                "'{}' names {}, which does not exist. Download the missing files again.", where, shown(name)
            )
    return shards
