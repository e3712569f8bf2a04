"""Which files a library reads a component's weights from, and whether they hold what the component is made of.

Headers tell: no weight is read. diffusers takes an index of shards before a single file, transformers the other way
round; both are given `use_safetensors=True`, and so read nothing but what is found here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...trust.foreign import BOM, Foreign, Unreadable, fitting, read
from ...trust.message import Message
from ...trust.text import listed, shown
from ..errors import BadFolder
from ..safetensors_header import FLOATS, Header, Tensor, read_header
from ..small_files import refuse_pointer
from .on_disk import Weights, name_of

if TYPE_CHECKING:
    import torch

STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers takes them before all others
_MOST_BUFFERS = 2**32  # bytes; CogView3-Plus' positions have 168 MB


class _ShardIndex(Foreign):
    metadata: dict[str, Any]  # both libraries need it
    weight_map: dict[str, str] = Field(min_length=1)  # tensor → file


def weights_of(path: Path, name: str, library: str) -> tuple[Weights, dict[str, Tensor]]:
    """Return the weight files of a component of a model folder, and {tensor: what their headers say of it}.

    path: the model folder.
    name: the component, and its folder.
    library: "diffusers" or "transformers".

    Raises BadFolder where there are none, where they are pickled, a variant or broken, and where shards are missing or
    not what their index says.
    """
    folder = path / name
    where, stem = f"'{name_of(path)}/{name}'", STEMS[library]
    for refused in ("adapter_config.json", *filter(_DISTRIBUTED.fullmatch, (file.name for file in folder.iterdir()))):
        if library == "transformers" and (folder / refused).exists():
            raise BadFolder(
                "{} holds {}, which would have transformers load something else than {}.safetensors. Delete that "
                "file, or get the model in its original form.",
                where,
                refused,
                stem,
            )
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    order = (index, single) if library == "diffusers" else (single, index)
    first = next((file for file in order if file.is_file()), None)
    if first is None:
        raise BadFolder(_nothing_there(where, folder, stem))
    if first == single:
        headers = {single: _header(single, path)}
        tensors = dict(headers[single].tensors)
    else:
        headers, tensors = _shards(path, index)
    sizes: Counter[str] = Counter()
    for header in headers.values():
        sizes.update(header.bytes_by_dtype)
    weights = Weights(tuple(headers), sum(file.stat().st_size for file in headers), dict(sizes) or {"F32": 0})
    return weights, tensors


def check_fit(where: str, module: torch.nn.Module, tensors: Mapping[str, Tensor], *, sharded: bool) -> None:
    """Raise BadFolder unless the files hold each of the module's tensors, of the right shape, and no others.

    where: the component, for messages.
    module: on the meta device, as its class builds it.
    tensors: what the headers say. Older names of a tensor count too where the library knows them.
    sharded: the tensors lie in several files; diffusers knows no older names then.
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if not sharded and hasattr(module, "_fix_state_dict_keys_on_load"):  # diffusers': 'query' is 'to_q'
        module._fix_state_dict_keys_on_load(found)  # pyright: ignore[reportCallIssue]
    wanted = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    names: dict[int, set[str]] = {}  # of one parameter: T5's `shared` and `encoder.embed_tokens`
    for key, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(key)
    tied = {key: group for group in names.values() for key in group}
    computed = {key for key, _ in module.named_buffers()} - wanted.keys()  # CLIP's position_ids, in older files
    ignored = re.compile("|".join(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ["$^"]))
    missing = sorted(key for key in wanted if not tied.get(key, {key}) & found.keys())
    extra = sorted(key for key in found.keys() - wanted.keys() - computed if not ignored.search(key))
    cls = type(module).__name__
    for keys, what in ((missing, "lack"), (extra, "hold")):
        if keys:
            named = listed((f"'{shown(key)}'" for key in keys), most=3, limit=100)
            tail = "needs" if keys is missing else "of the sizes in its config.json has no place for"
            raise BadFolder(
                "{}: its files {} {}, which a {} {}. Download config.json and weights again, both of the same model.",
                where,
                what,
                named,
                cls,
                tail,
            )
    for key in sorted(wanted.keys() & found.keys()):
        if found[key] != wanted[key]:
            raise BadFolder(
                "{}: '{}' has the shape {}, and {} by config.json. Download config.json and weights again, both of "
                "the same model.",
                where,
                shown(key),
                list(found[key]),
                list(wanted[key]),
            )
        dtype = tensors[key].dtype if key in tensors else "F32"
        if dtype not in FLOATS:
            raise BadFolder(
                "{}: '{}' is stored as {}, and quantised weights are not supported. Get the model in 16 or 32 bits.",
                where,
                shown(key),
                dtype,
            )
    kept = sum(buffer.numel() * 4 for key, buffer in module.named_buffers() if key in computed)
    if kept > _MOST_BUFFERS:
        raise BadFolder(
            "{}: the sizes in its config.json take {:.0f} GB for positions alone. Download it again.",
            where,
            kept / 1e9,
        )


def _nothing_there(where: str, folder: Path, stem: str) -> str:
    files = sorted(file.name for file in folder.iterdir())
    if others := [name for name in files if name.endswith(".safetensors")]:
        return Message(
            "{} holds {}, but no {}.safetensors. Rename the file that you want to use to that (a variant such as fp16 "
            "works).",
            where,
            ", ".join(map(shown, others)),
            stem,
        )
    if pickled := [name for name in files if name.endswith(_PICKLED)]:
        return Message(
            "{} holds pickled weights ({}), which can run code when loaded and are refused. Get the model in "
            "safetensors format.",
            where,
            shown(pickled[0]),
        )
    return Message("{} holds no .safetensors file. The download is incomplete: fetch it again.", where)


def _shards(path: Path, index: Path) -> tuple[dict[Path, Header], dict[str, Tensor]]:
    """Return {file: header}, and what the headers say of the tensors that the index lists, which are all that is
    loaded."""
    where = f"'{name_of(path)}/{index.parent.name}/{index.name}'"
    try:
        refuse_pointer(index, where.strip("'"))
        shards = fitting(_ShardIndex, read(index)).weight_map
        with index.open("rb") as stream:
            marked = stream.read(len(BOM)) == BOM
    except Unreadable as error:
        raise BadFolder("{} has no weight_map that can be used: {}. Fetch that file again.", where, error) from None
    except OSError as error:
        raise BadFolder("{} cannot be read: {}. Check its permissions, and the disk.", where, error) from error
    if marked:
        raise BadFolder(
            "{} begins with a byte order mark, which no library reads. Save it as UTF-8 without one.", where
        )
    names = sorted(set(shards.values()))
    if odd := [name for name in names if not _SHARD.fullmatch(name)]:
        raise BadFolder(
            "{} names '{}', which is no safetensors file beside it: others can run code when loaded, and are refused. "
            "Get the model in safetensors format.",
            where,
            shown(odd[0]),
        )
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise BadFolder(
            "'{}/{}' lacks {}. Fetch the missing files again.",
            name_of(path),
            index.parent.name,
            ", ".join(map(shown, missing)),
        )
    headers = {index.parent / name: _header(index.parent / name, path) for name in names}
    times = Counter(key for header in headers.values() for key in header.tensors)
    lies = next((f"'{shown(key)}' lies in {n} of them" for key, n in times.items() if n > 1), "") or next(
        (
            f"'{shown(key)}' is not in {name}"
            for key, name in shards.items()
            if key not in headers[index.parent / name].tensors
        ),
        "",
    )
    if lies:
        raise BadFolder("{} is of other files than those beside it: {}. Fetch all of that folder again.", where, lies)
    return headers, {key: headers[index.parent / name].tensors[key] for key, name in shards.items()}


def _header(file: Path, path: Path) -> Header:
    where = f"{name_of(path)}/{file.relative_to(path).as_posix()}"
    try:
        refuse_pointer(file, where)
        return read_header(file)
    except OSError as error:
        raise BadFolder("'{}' cannot be read: {}. Check its permissions, and the disk.", where, error) from error
    except Unreadable as error:
        raise BadFolder(
            "'{}' is not a whole safetensors file: {}. Delete it and download it again.", where, error
        ) from None
