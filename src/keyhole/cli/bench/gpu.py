"""Heads on a GPU through PyTorch."""

from __future__ import annotations

from typing import Any

from keyhole.cli.bench.costs import Costs, Measured
from keyhole.errors import UsageError
from keyhole.families import SingleHead
from keyhole.gauge import distance
from keyhole.optional import extra
from keyhole.oracles import FunctionOracle
from keyhole.recover import recover

# Width and rank; None for full rank.
CASES: tuple[tuple[int, int | None], ...] = ((1024, None), (2048, None), (4096, None), (4096, 128))
QUICK = 2  # cases
METHOD = "single-head"


def cases(*, quick: bool) -> list[tuple[int, int | None]]:
    """What is measured."""
    return list(CASES[:QUICK] if quick else CASES)


def open_gpu() -> tuple[Any, str]:
    """PyTorch, and the name of the GPU; UsageError where there is none."""
    torch = extra("torch", "torch", "--gpu")
    if not torch.cuda.is_available():
        raise UsageError("--gpu needs a CUDA device that PyTorch sees: there is none on this machine")
    return torch, str(torch.cuda.get_device_name(0))


def measure_gpu(torch: Any, width: int, rank: int | None, seeds: range) -> Costs:
    """Recoveries of a random head in float64."""
    like = torch.zeros(1, dtype=torch.float64, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=like.dtype, device="cuda", generator=generator)

    score = normal(width, width) / width**0.5
    if rank is not None:
        score = normal(width, rank) @ normal(rank, width) / width**0.5
    truth = SingleHead(score, normal(width))
    name = f"GPU: single-head?width={width}" + ("" if rank is None else f"&rank={rank}")
    oracle = FunctionOracle(truth, width, like=like, name=name)
    truth(normal(64, 2, width))  # the first call loads kernels
    found: list[Measured] = []
    for seed in seeds:
        result = recover(oracle, METHOD, seed=seed, throw=False, progress=False)
        found.append((result, None if result.params is None else distance(result.params, truth)))
    return Costs.of(name, found)
