"""`learn` against training the same layer in PyTorch: Adam, annealed, with restarts, on the same examples.

Training takes a CUDA device where there is one, and all its restarts at once; `learn` has the processor.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.tables.learn import instance, test_error

CASES = (
    *(((4, 4, 2), size) for size in (0.5, 2.0)),
    *(((8, 4, 2), size) for size in (0.5, 2.0)),
    *(((8, 6, 3), size) for size in (0.5, 2.0)),
    *(((16, 8, 4), size) for size in (0.5, 2.0)),
    ((32, 8, 4), 0.5),
)
INSTANCES, RESTARTS, STEPS = 5, 10, 3000
RATES = (0.03, 1e-4)  # first and last
SOLVED = 1e-3  # relative test error that counts as a success of training


def table(kept: Kept) -> str:
    measured = {
        f"({', '.join(map(str, case))}) {size:g} {learner}": partial(_compared, case, size, learner)
        for case, size in CASES
        for learner in ("varpro", "PyTorch")
    }
    columns = [
        "(d, k, m)",
        "size",
        "learner",
        f"test error < {SOLVED:g}",
        "test error: median, worst",
        "s by the clock",
    ]
    return markdown(columns, kept.rows_of("torch", measured))


def _compared(case: tuple[int, int, int], size: float, learner: str) -> Row:
    errors, spent = [], []
    for seed in range(INSTANCES):
        truth, inputs, outputs, rng = instance(*case, size, 10.0, 400 + seed)
        began = perf_counter()
        if learner == "varpro":
            found = kh.learn(inputs, outputs, heads=case[2], seed=seed, throw=False).params
        else:
            found = trained(inputs, outputs, case[2], seed)
        spent.append(perf_counter() - began)
        errors.append(test_error(found, truth, case[1], rng))
    good = sum(error < SOLVED for error in errors)
    name = "varpro, cpu" if learner == "varpro" else f"Adam, {device()}"
    row = [f"({', '.join(map(str, case))})", f"{size:g}", name, f"{good} of {INSTANCES}"]
    return [*row, f"{np.median(errors):.1e}, {max(errors):.1e}", f"{np.median(spent):.2f}"]


def trained(inputs: np.ndarray, outputs: np.ndarray, heads: int, seed: int) -> kh.AttentionLayer:
    """The best of several trainings, float64, full batches, the rate falling along half a cosine; all at once."""
    import torch

    place = device()
    tokens, labels = torch.asarray(inputs, device=place), torch.asarray(outputs, device=place)
    width, out = inputs.shape[2], outputs.shape[2]
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((RESTARTS, heads, width, width), generator=generator, dtype=torch.float64) * (0.3 / width)
    weights = torch.randn((RESTARTS, heads, width, out), generator=generator, dtype=torch.float64) / width**0.5
    parameters = [each.to(place).requires_grad_() for each in (scores, weights)]
    optimiser = torch.optim.Adam(parameters, lr=RATES[0])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS, RATES[1])
    for _ in range(STEPS):
        optimiser.zero_grad()
        keys = torch.einsum("rmde,nbe->rmnbd", parameters[0], tokens)
        attention = torch.softmax(torch.einsum("nad,rmnbd->rmnab", tokens, keys), dim=-1)
        answers = torch.einsum("rmnab,rmnbo->rnao", attention, torch.einsum("nbd,rmdo->rmnbo", tokens, parameters[1]))
        losses = torch.mean((answers - labels) ** 2, dim=(1, 2, 3))
        losses.sum().backward()  # Adam works entry by entry, so that the trainings do not know of each other
        optimiser.step()
        schedule.step()
    best = int(torch.argmin(losses))
    return kh.AttentionLayer(*(each.detach()[best].cpu().numpy() for each in parameters))


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
