"""`learn` against training the same layer in PyTorch: Adam, annealed, with restarts, on the same examples."""

from __future__ import annotations

from functools import partial
from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.learn import instance, test_error
from benchmarks.tables import Kept, Row, markdown

CASES = (((4, 4, 2), 0.5), ((4, 4, 2), 2.0), ((8, 4, 2), 0.5), ((8, 4, 2), 2.0), ((8, 6, 3), 0.5), ((16, 8, 2), 0.5))
INSTANCES, RESTARTS, STEPS = 3, 3, 2000
RATES = (0.03, 1e-4)  # first and last
SOLVED = 1e-3  # relative test error that counts as a success of training


def table(kept: Kept) -> str:
    measured = {
        f"({', '.join(map(str, case))}) {size:g} {learner}": partial(_compared, case, size, learner)
        for case, size in CASES
        for learner in ("varpro", "PyTorch")
    }
    columns = ["(d, k, m)", "size", "learner", f"test error < {SOLVED:g}", "test error: median, worst", "s"]
    return markdown(columns, kept.rows_of("torch", measured))


def _compared(case: tuple[int, int, int], size: float, learner: str) -> Row:
    errors, spent = [], []
    for seed in range(INSTANCES):
        truth, inputs, outputs, rng = instance(*case, size, 10.0, 400 + seed)
        began = process_time()
        if learner == "varpro":
            found = kh.learn(inputs, outputs, heads=case[2], seed=seed, throw=False).params
        else:
            found = trained(inputs, outputs, case[2], seed)
        spent.append(process_time() - began)
        errors.append(test_error(found, truth, case[1], rng))
    good = sum(error < SOLVED for error in errors)
    name = "varpro" if learner == "varpro" else "PyTorch, Adam"
    row = [f"({', '.join(map(str, case))})", f"{size:g}", name, f"{good} of {INSTANCES}"]
    return [*row, f"{np.median(errors):.1e}, {max(errors):.1e}", f"{np.median(spent):.2f}"]


def trained(inputs: np.ndarray, outputs: np.ndarray, heads: int, seed: int) -> kh.AttentionLayer:
    """The best of several trainings, float64, full batches, the rate falling along half a cosine."""
    import torch

    torch.set_num_threads(1)
    tokens, labels = torch.asarray(inputs), torch.asarray(outputs)
    width, out = inputs.shape[2], outputs.shape[2]
    best, least = None, float("inf")
    for restart in range(RESTARTS):
        generator = torch.Generator().manual_seed(1000 * seed + restart)
        scores = torch.randn((heads, width, width), generator=generator, dtype=torch.float64) * (0.3 / width)
        weights = torch.randn((heads, width, out), generator=generator, dtype=torch.float64) / width**0.5
        parameters = [scores.requires_grad_(), weights.requires_grad_()]
        optimiser = torch.optim.Adam(parameters, lr=RATES[0])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS, RATES[1])
        for _ in range(STEPS):
            optimiser.zero_grad()
            attention = torch.softmax(torch.einsum("nad,mde,nbe->nmab", tokens, scores, tokens), dim=-1)
            answers = torch.einsum("nmab,nbd,mdo->nao", attention, tokens, weights)
            loss = torch.mean((answers - labels) ** 2)
            loss.backward()
            optimiser.step()
            schedule.step()
        if loss.item() < least:
            least = loss.item()
            best = kh.AttentionLayer(scores.detach().numpy().copy(), weights.detach().numpy().copy())
    assert best is not None
    return best
