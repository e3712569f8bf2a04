"""Write docs/precision.md from the tables themselves: `make docs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from urllib.parse import urlsplit

from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.accumulation import (
    NEXFORT_OPTION,
    NEXFORT_SWITCH,
    SPECS,
    Accumulation,
    Mode,
    decide,
)
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, Architecture, by_capability, by_gfx
from comfyui_onediff_guard.precision.policy import Component, Plan, PlanImpossible, Precision, Variant, choose

PAGE = Path(__file__).resolve().parents[1] / "docs" / "precision.md"

CARDS = """\
# Precision by card and model

<!-- Written by `make docs` from precision/arch.py, policy.py and accumulation.py. Do not edit it here. -->

This page lists what each card can compute, and what `auto` chooses on it for each model, with the reasons. The
sampler's report has the choice for your machine. [guard.md](guard.md) explains the values of `precision`, and
[nodes.md](nodes.md#models) lists the models that load.

## Cards

Load Pipeline and `onediff-guard doctor` name your card. For NVIDIA, `sm86` means compute capability 8.6; NVIDIA has a
[list of cards by capability](https://developer.nvidia.com/cuda-gpus). A gfx name stands for all targets that begin with
it (`gfx11` for `gfx1100`); if several names fit, the longest one counts.
"""

CARD_COLUMNS = """\
- **bf16**: *native* is computed by the hardware. *emulated* is computed in fp32 and cast: correct, but slow. PyTorch's
  own check (`is_bf16_supported`) counts emulation as support, so it is not used here.
- **fast fp16**: fp16 is faster than fp32. Cards without it are *slow fp16* below, except `sm75-gtx16` (GTX 16 and the
  other Turing cards without tensor cores, recognised by name): there fp16 is NaN or black with any model, which is
  *wrong fp16* below.
- **tensor cores**: matrix units for fp16. AMD calls them matrix cores.
- **TF32**: fp32's range with fp16's mantissa. The fp32 rerun of a failed step uses it, unless `exact_fp32` is on.
  `exact_fp32` also disables TF32 for a model in precision `fp32` and for convolutions, where PyTorch allows it by
  default.
- **fp8**: the card multiplies fp8. Precision `fp8` needs it, and an NVIDIA card: nothing is quantised on AMD.
  Precision `int8` runs on NVIDIA from `sm80` on, and on CPUs.
- **half-precision accumulation**: *right* or *wrong* by users' reports, *untried* if there are no reports. See
  [below](#half-precision-accumulation).
- **fp16 accumulation pays**: *GeForce* means that GeForce cards of this compute capability multiply fp16 twice as fast
  if products accumulate in fp16, and that its professional and datacentre cards do not. The card's name tells them
  apart. See [fp16_accumulation.md](fp16_accumulation.md).

## Models

- **dtype**: the dtype in which the authors trained or published the model. *fp16 models* and *bf16 models* below refer
  to it.
- **leaves fp16's range**: activations of the denoiser are known to grow beyond 65504. Plain fp16 is NaN or black then.
- **protected**: in fp16 its denoiser has [overflow protection](overflow_protection.md) from the start. Other denoisers
  get it after their first failed call.

On this page, a model's name links to its authors' page.
"""

AUTO = """\
These are the published models. If the weights of an fp16 model are stored in bf16, the pack treats it as a fine-tune
that was trained in bf16 and may leave fp16's range. Weights stored in fp16 or fp32 change nothing.

## What `auto` chooses

This table is about the denoiser. *fp16 protected* is fp16 with
[overflow protection](overflow_protection.md). Everything that runs in fp16 or bf16 is guarded:
a call whose output is NaN or infinite is recomputed in fp32. `auto` never chooses `fp16 (plain)`.
"""

OTHERS = """\
An NVIDIA card that is newer than the table is treated as the nearest older one in it.

### The other components

Text encoders, image encoders and VAEs run in the same dtype as the denoiser.
"""

REASONS = """\
### Why

The report gives the denoiser's reason, with the names of your card and model in place of *this device* and *this
model*.
"""

REQUESTS = """\
## What the other values do

This table is about the denoiser. It runs in the dtype that you choose, unless the table says *refused*. `fp8` and
`int8` quantise the denoiser's large linear layers, and need [torchao](quantised.md). All else is bf16, including the
other components.
"""

GUARD = """\
## Guard and overflow protection

Both depend on the dtype in which the denoiser runs, whether you chose it or `auto` did.
"""

ACCUMULATION = """\
## Half-precision accumulation

Attention kernels can add up in fp16 instead of fp32. That is faster, and on some cards the result is NaN or black. The
switches for it are process-wide. They are set while a model runs, and restored afterwards. The loader's `accumulation`
selects them. For these switches, `fp16` is the same as `auto`; its effect on the denoiser's products is in
[fp16_accumulation.md](fp16_accumulation.md).
"""

SWITCHES = """\
The values of the switches while a model runs. *left* means unchanged.
"""

RULES = f"""\
- A variable that you have exported is never touched. The report names it.
- The `torch.` switches do not tell who set them: ComfyUI sets some at import. So they are set to the safe value while
  a model runs, whoever set them, and the report has their previous values. To leave them on, choose `fast`.
- If several GPUs share the process, or several runs overlap, the safest value applies to all.
- nexfort has one more setting when it compiles: its option `{NEXFORT_OPTION}` is true if
  `{NEXFORT_SWITCH}` is.
- bf16 has fp32's range, so its own switches do not change.
- If a PyTorch lacks one of the `torch.` switches, that one is skipped.
"""


@dataclass(frozen=True)
class _Device:
    """A row of the architectures, or one for devices without a row."""

    kind: str  # "Ampere"
    name: str  # "sm80"; empty if the kind is enough
    architecture: Architecture


def _devices() -> list[_Device]:
    mps = replace(ARCHITECTURES["mps"], label="Apple GPU before macOS 14", bf16="none")
    return [
        *(_Device(a.label, "" if a.label.lower() == a.name else a.name, a) for a in ARCHITECTURES.values()),
        _Device(mps.label, "", mps),
        _Device("older NVIDIA cards", "", by_capability(0, 0)),
        _Device("any other device", "", by_gfx("gfx")),
    ]


def render() -> str:
    """Return the whole page. Pure: the same tables give the same text."""
    parts = [
        CARDS,
        _cards(),
        CARD_COLUMNS,
        _models(),
        AUTO,
        _matrix(),
        OTHERS,
        _other_components(),
        REASONS,
        _table(["runs in", "reason", "models", "where"], _reasons(Precision.AUTO, _links)),
        REQUESTS,
        _requests(),
        _lacking(),
        GUARD,
        _guard_and_stream(),
        ACCUMULATION,
        _verdicts(),
        SWITCHES,
        _switches(),
        RULES,
        "".join(f"[{variant.name}]: {variant.source}\n" for variant in VARIANTS.values()),
    ]
    return "\n".join(parts)


def _cards() -> str:
    def row(group: Sequence[_Device]) -> list[str]:
        a = group[0].architecture
        names = ", ".join(f"`{device.architecture.name}`" for device in group)
        flags = map(_yes, (a.fast_fp16, a.fp16_tensor_cores, a.tf32, a.fp8))
        pays = "GeForce" if a.fp16_sums == "geforce" else "no"
        return [a.label, names, a.bf16, *flags, a.half_accumulation, pays, _link(a.source)]

    listed = [device for device in _devices() if device.architecture.known]
    alike = groupby(listed, key=lambda device: replace(device.architecture, name=""))
    titles = ["generation", "name", "bf16", "fast fp16", "tensor cores", "TF32", "fp8"]
    titles += ["half-precision accumulation", "fp16 accumulation pays", "source"]
    return _table(titles, [row(list(group)) for _, group in alike])


def _models() -> str:
    def row(v: Variant) -> list[str]:
        components = ", ".join(component.words for component in v.components)
        return [f"[{v.name}]", v.trained_in, _yes(v.leaves_fp16), _yes(v.protected), components]

    titles = ["model", "dtype", "leaves fp16's range", "protected", "components"]
    return _table(titles, map(row, VARIANTS.values()))


def _matrix() -> str:
    """Return the table in which devices with equal cells share a row, and models with equal cells share a column."""
    devices = _devices()
    columns: dict[tuple[str, ...], list[str]] = {}
    for variant in VARIANTS.values():
        plans = (choose(d.architecture, variant, Component.DENOISER, Precision.AUTO) for d in devices)
        columns.setdefault(tuple(map(_cell, plans)), []).append(variant.name)
    rows: dict[tuple[str, ...], list[_Device]] = {}
    for index, device in enumerate(devices):
        rows.setdefault(tuple(column[index] for column in columns), []).append(device)
    most_first = sorted(rows.items(), key=lambda row: -len(row[1]))
    return _table(
        ["card", *map(_links, columns.values())],
        [[_kinds(group), *(f"**{cell}**" for cell in cells)] for cells, group in most_first],
    )


def _other_components() -> str:
    """Return the fp16 table, in which components with equal cells share a row."""
    fast = next(device.architecture for device in _devices() if device.architecture.fast_fp16)
    requests = (Precision.FP16, Precision.FP16_PLAIN)
    rows: dict[tuple[str, ...], list[str]] = {}
    for component in Component:
        variant = next((v for v in VARIANTS.values() if component in v.components), None)
        if variant and component is not Component.DENOISER:
            cells = tuple(_cell(choose(fast, variant, component, request)) for request in requests)
            rows.setdefault(cells, []).append(component.words)
    titles = ["component", "if the denoiser runs in fp16", "in `fp16 (plain)`"]
    return _table(titles, [[", ".join(names), *cells] for cells, names in rows.items()])


def _reasons(request: Precision, models: Callable[[Sequence[str]], str]) -> list[list[str]]:
    cases = [
        (variant, device, _outcome(device, variant, Component.DENOISER, request))
        for variant, device in product(VARIANTS.values(), _devices())
    ]
    return [[*outcome, models(names), _where(devices)] for outcome, names, devices in _grouped(cases)]


def _requests() -> str:
    rows = [
        [f"`{request.value}`", *row]
        for request in Precision
        if request is not Precision.AUTO
        for row in _reasons(request, _which)
    ]
    return _table(["asked for", "runs in", "reason", "models", "where"], rows)


def _lacking() -> str:
    architecture = next(iter(ARCHITECTURES.values()))
    for variant, component in product(VARIANTS.values(), Component):
        if component not in variant.components:
            try:
                choose(architecture, variant, component, Precision.AUTO)
            except PlanImpossible as refused:
                return f"A component that a model lacks is refused in every precision: “{refused}”\n"
    return ""


def _guard_and_stream() -> str:
    native = next(device for device in _devices() if device.architecture.native_bf16)
    rows = []
    for request in (Precision.BF16, Precision.FP16, Precision.FP16_PLAIN, Precision.FP32):
        alike: dict[tuple[str, str], list[str]] = {}
        for variant in VARIANTS.values():
            plan = choose(_nameless(native.architecture), _anonymous(variant), Component.DENOISER, request)
            alike.setdefault((plan.guard_reason, plan.overflow_protection_reason), []).append(variant.name)
        rows += [[request.value, guard, stream, _which(names)] for (guard, stream), names in alike.items()]
    return _table(["runs in", "guarded", "overflow protection", "models"], rows)


def _verdicts() -> str:
    rows = []
    for request in Accumulation:
        alike: dict[tuple[str, str, str], list[_Device]] = {}
        for device in _devices():
            decision = decide(_nameless(device.architecture), request)
            alike.setdefault((decision.mode.value, decision.reason, decision.source), []).append(device)
        for (mode, reason, source), devices in sorted(alike.items(), key=lambda row: len(row[1])):
            rows.append([f"`{request.value}`", mode, reason, _where(devices), _link(source)])
    return _table(["asked for", "accumulation in fp16", "reason", "where", "source"], rows)


def _switches() -> str:
    used: dict[Mode, dict[str, None]] = {}
    for request, device in product(Accumulation, _devices()):
        used.setdefault(decide(device.architecture, request).mode, {})[f"`{request.value}`"] = None
    modes = [mode for mode in Mode if mode in used]
    return _table(
        ["switch", *(f"{', '.join(used[mode])}: {mode.value}" for mode in modes)],
        [[f"`{spec.name}`", *(spec.values.get(mode, "left") for mode in modes)] for spec in SPECS],
    )


def _outcome(device: _Device, variant: Variant, component: Component, request: Precision) -> tuple[str, str]:
    """Return the dtype and the reason, without the names of device and model."""
    try:
        plan = choose(_nameless(device.architecture), _anonymous(variant), component, request)
    except PlanImpossible as refused:
        return "*refused*", str(refused).replace("; this is this device.", ".")
    return plan.dtype, plan.reason


def _nameless(architecture: Architecture) -> Architecture:
    return replace(architecture, name="this device", label="this device")


def _anonymous(variant: Variant) -> Variant:
    return replace(variant, name="this model", fact=variant.fact.replace(variant.name, "this model"))


Outcome = tuple[str, ...]


def _grouped(cases: Iterable[tuple[Variant, _Device, Outcome]]) -> list[tuple[Outcome, list[str], list[_Device]]]:
    """Return each outcome once, with its models and devices; repeated only if its models have different devices."""
    outcomes: dict[Outcome, dict[str, list[_Device]]] = {}
    for variant, device, outcome in cases:
        outcomes.setdefault(outcome, {}).setdefault(variant.name, []).append(device)
    rows = []
    for outcome, by_model in outcomes.items():
        alike: dict[tuple[_Device, ...], list[str]] = {}
        for name, devices in by_model.items():
            alike.setdefault(tuple(devices), []).append(name)
        rows += [(outcome, names, list(devices)) for devices, names in alike.items()]
    return rows


_Has = dict[str, Callable[[Architecture], bool]]
_BF16: _Has = {
    "bf16 native": lambda a: a.bf16 == "native",
    "bf16 emulated": lambda a: a.bf16 == "emulated",
    "no bf16": lambda a: a.bf16 == "none",
    "no native bf16": lambda a: a.bf16 != "native",
}
_FP16: _Has = {
    "fast fp16": lambda a: a.fast_fp16,
    "no fast fp16": lambda a: not a.fast_fp16,
    "slow fp16": lambda a: not a.fast_fp16 and not a.fp16_wrong,
    "wrong fp16": lambda a: a.fp16_wrong,
}
_QUANTISES: _Has = {
    "fp8 on NVIDIA": lambda a: "fp8" in a.quantises,
    "no fp8 on NVIDIA": lambda a: "fp8" not in a.quantises,
    "int8": lambda a: "int8" in a.quantises,
    "no int8": lambda a: "int8" not in a.quantises,
}


def _where(devices: Iterable[_Device]) -> str:
    """Describe devices by a common property, else by name."""
    chosen, every = set(devices), _devices()
    if chosen == set(every):
        return "everywhere"
    for words, has in (_BF16 | _FP16 | _QUANTISES).items():
        if chosen == {device for device in every if has(device.architecture)}:
            return words
    for (bf16, first), (fp16, second) in product(_BF16.items(), _FP16.items()):
        if chosen == {device for device in every if first(device.architecture) and second(device.architecture)}:
            return f"{bf16}, {fp16}"
    if len(chosen) > len(every) / 2:
        return f"everywhere but {_kinds(device for device in every if device not in chosen)}"
    return _kinds(device for device in every if device in chosen)


def _kinds(devices: Iterable[_Device]) -> str:
    def words(kind: str, group: Iterable[_Device]) -> str:
        names = [f"`{device.name}`" for device in group if device.name]
        return f"{kind} ({', '.join(names)})" if names else kind

    return ", ".join(words(kind, group) for kind, group in groupby(devices, key=lambda device: device.kind))


def _which(names: Sequence[str]) -> str:
    """Describe models by a common property, else by name."""
    trained_in = {VARIANTS[name].trained_in for name in names}
    if len(names) == len(VARIANTS):
        return "all"
    if len(names) == sum(variant.trained_in in trained_in for variant in VARIANTS.values()):
        return f"{min(trained_in)} models"
    return _links(names)


def _links(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in names)


def _cell(plan: Plan) -> str:
    return f"{plan.dtype} protected" if plan.overflow_protection else plan.dtype


def _yes(flag: bool) -> str:
    return "yes" if flag else "–"


def _link(source: str) -> str:
    _, host, path, *_ = urlsplit(source)
    return f"[{path[1:] if host == 'github.com' else host}]({source})" if host else source


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, ["---"] * len(titles), *rows))


def main(path: Path = PAGE) -> None:
    """Write the page, with the same bytes on every system."""
    path.write_text(render(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
