"""Count the bytes that scaled layers add to a step, and compare their time with the least time of the step's products.

    python scripts/benchmarks/scaled_bytes.py [--networks cogvideox-2b sdxl ...] [--size full] [--out DIR]

The networks are diffusers' classes at published sizes, with both halves of guidance if the model takes guidance.
Nothing is computed: tensors have shapes but no values. traffic.py explains the counting and its assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from comfyui_onediff_guard.precision.learned_scales import LearningMode
from comfyui_onediff_guard.precision.planned_products import PlannedMode, Scale
from comfyui_onediff_guard.precision.upcast import run_in
from measure import head, new_parser, write_json
from networks import NETWORKS, Network
from torch.utils.flop_counter import FlopCounterMode
from traffic import PRODUCTS, CountedProducts, Traffic

META = torch.device("meta")
HALF = torch.float16


@dataclass(frozen=True)
class Card:
    bytes: float  # memory, bytes per second
    flop: float  # large fp16 products, operations per second
    flop_fp32: float  # without tensor cores, operations per second


CARDS = {  # data sheets, times the share that is reached: T4 0.6, V100 0.72, H100 0.8
    "T4": Card(300e9, 40e12, 8.1e12),
    "V100": Card(850e9, 90e12, 15.7e12),
    "H100": Card(3.3e12, 790e12, 67e12),
}
PLAIN, ROOM, LOOKED, HOT, NO_ROOM, SCALED, FROM_BF16, FIRST, FP32 = (
    "fp16 (plain)",
    "learned scales, all layers have room",
    "the same, each layer's output looked at",
    "learned scales, what writes to the stream has no room",
    "learned scales, no layer has room",
    "every layer scaled",
    "the same, weights stored in bf16",
    "the same, weights read for their reach",
    "fp32",
)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--size", default="full", help="size of the networks, from networks.py")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.networks:
        rows[name] = reckoned(NETWORKS[name], args.size)
        tell(rows[name])
    result = head("scaled_bytes", "none: counted, not timed", diffusers=diffusers.__version__)
    result |= {"cards": {name: vars(card) for name, card in CARDS.items()}, "networks": rows}
    print(f"written to {write_json(result, args.out, 'paper')}")


def reckoned(network: Network, size: str) -> dict[str, Any]:
    with torch.no_grad():
        tflop = operations(network, size)
        counted = tiers(network, size)
    floors = {name: (tflop * 1e15 / card.flop, tflop * 1e15 / card.flop_fp32) for name, card in CARDS.items()}
    return {
        "said": network.said,
        "size": size,
        "tflop": round(tflop, 3),
        "floor_ms": {
            name: {"fp16": round(half, 3), "fp32": round(single, 3)} for name, (half, single) in floors.items()
        },
        "function_calls": counted[SCALED].calls,
        "tiers": {
            tier: {
                "gigabytes": {kind: round(moved / 1e9, 3) for kind, moved in traffic.bytes.items()},
                "kernels": sum(traffic.kernels.values()),
                "added_gigabytes": round((_moved(traffic) - _moved(counted[PLAIN])) / 1e9, 3),
                "cards": {
                    name: _on_card(card, *floors[name], traffic, counted[PLAIN], fp32=tier == FP32)
                    for name, card in CARDS.items()
                },
            }
            for tier, traffic in counted.items()
        },
    }


def _on_card(
    card: Card, half: float, single: float, traffic: Traffic, plain: Traffic, *, fp32: bool
) -> dict[str, float]:
    """Return a tier's figures on a card. half, single: a step's floors, ms. A step is estimated as its products at the
    floor, plus all other traffic at the memory's speed."""
    added = (_moved(traffic) - _moved(plain)) * 1e3 / card.bytes
    step = (single if fp32 else half) + _beside_products(traffic) * 1e3 / card.bytes
    plain_step = half + _beside_products(plain) * 1e3 / card.bytes
    return {
        "added_ms": round(added, 3),
        "added_of_floor": round(added / half, 4),
        "step_ms": round(step, 3),
        "of_plain": round(step / plain_step, 4),
    }


def _moved(traffic: Traffic) -> int:
    return sum(traffic.bytes.values())


def _beside_products(traffic: Traffic) -> int:
    return _moved(traffic) - traffic.bytes[PRODUCTS]


def operations(network: Network, size: str) -> float:
    """Return TFLOP of a step."""
    module, call = _made(network, size, HALF)
    with FlopCounterMode(display=False) as counter:
        module(**call)
    return counter.get_total_flops() / 1e12


def tiers(network: Network, size: str) -> dict[str, Traffic]:
    module, call = _made(network, size, HALF)
    found = {PLAIN: _counted(Traffic(module.parameters()), lambda: module(**call))}
    found[ROOM] = _planned(module, call, Scale(fp16=True))
    found[LOOKED] = _planned(module, call, Scale(fp16=True, checked=True))
    found[HOT] = _planned(module, call, Scale(fp16=True), _writers(module))
    found[NO_ROOM] = _planned(module, call, Scale(exponent=1))
    found[FIRST], found[SCALED] = _every_layer_scaled(module, call)
    _, found[FROM_BF16] = _every_layer_scaled(*_made(network, size, torch.bfloat16))
    single, fp32_call = _made(network, size, torch.float32)
    found[FP32] = _counted(Traffic(single.parameters()), lambda: single(**fp32_call))
    return found


def _every_layer_scaled(module: torch.nn.Module, call: dict[str, Any]) -> tuple[Traffic, Traffic]:
    """Return the traffic of a first step, which reads the weights for their largest values, and of a later step."""
    products = CountedProducts(HALF, Traffic())
    steps = []
    for _ in range(2):
        products.traffic = Traffic(module.parameters())
        steps.append(_counted(products.traffic, lambda: run_in(products, module, (), call)))
    return steps[0], steps[1]


def planned(module: torch.nn.Module, call: dict[str, Any], scale: Scale, hot: Iterable[str] = ()) -> PlannedMode:
    """Return the mode of a later step. All planned products have one scale, except hot layers, without room."""
    first = LearningMode()
    run_in(first, module, (), call)
    plan = dict.fromkeys((key for key, _ in first.peaks.calls), scale)
    plan |= {(id(module.get_parameter(f"{name}.weight")), 0, ""): Scale(exponent=1) for name in hot}
    return PlannedMode(plan, first.pattern)


def _planned(module: torch.nn.Module, call: dict[str, Any], scale: Scale, hot: Iterable[str] = ()) -> Traffic:
    later = planned(module, call, scale, hot)
    return _counted(Traffic(module.parameters()), lambda: run_in(later, module, (), call))


def _writers(module: torch.nn.Module) -> list[str]:
    """Return the names of the layers that write to a residual stream, as diffusers names them."""
    ends = (".to_out.0", ".ff.net.2", ".ffn.net.2")
    return [name for name, _ in module.named_modules() if name.endswith(ends)]


def _counted(traffic: Traffic, step: Callable[[], Any]) -> Traffic:
    with traffic.counting():
        step()
    return traffic


def _made(network: Network, size: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    module: Any = network.make(size, META, dtype)
    return module, network.step(module.config, size, META, dtype)


def tell(row: dict[str, Any]) -> None:
    floors = ", ".join(f"{name} {floor['fp16']:.4g} ms" for name, floor in row["floor_ms"].items())
    print(
        f"\n{row['said']}: {row['tflop']:.4g} TFLOP a step, at least {floors}; {row['function_calls']} function calls"
    )
    titles = (title for name in CARDS for title in (f"{name}: added ms", "of floor", "step ms", "of plain"))
    print(f"{'':42}{'added GB':>9}" + "".join(f"{title:>15}" for title in titles) + f"{'kernels':>9}")
    for tier, found in row["tiers"].items():
        cells = "".join(
            f"{card['added_ms']:15.4g}{card['added_of_floor']:15.1%}{card['step_ms']:15.4g}{card['of_plain']:15.3f}"
            for card in found["cards"].values()
        )
        print(f"{tier:42}{found['added_gigabytes']:9.4g}{cells}{found['kernels']:9}")
    for tier, found in row["tiers"].items():
        parts = ", ".join(f"{kind} {moved:.4g}" for kind, moved in found["gigabytes"].items() if moved)
        print(f"  GB, {tier}: {parts}")


if __name__ == "__main__":
    main()
