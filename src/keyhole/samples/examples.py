"""Labelled examples: what may be learned from, checked, split, and counted against the parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import array_api_compat
import numpy as np

from keyhole.arrays import Floats, is_real, to_numpy
from keyhole.errors import UsageError
from keyhole.noise import Noise
from keyhole.samples.variable_projection import LayerProblem

# Examples that the certificate holds back: a tenth, within these numbers.
LEAST_HELDOUT, MOST_HELDOUT = 2, 256
# Numbers per parameter below which a fit explains the examples whatever they say.
REFUSED_RATIO, GOOD_RATIO = 1.0, 4.0
# Examples, in units of d²/(k(k − 1)), below which no start succeeds, and from which all do.
REFUSED_PAIRS, GOOD_PAIRS = 1.0, 1.5
# Normal errors that are as wide as errors of another kind, over their half-width.
UNIFORM = 3**-0.5


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and outputs as float64, and the spacing of the dtype that the outputs came in."""

    inputs: Floats  # (n, k, d)
    outputs: Floats  # (n, k, d_out)
    eps: float
    beside: Floats | None = None  # (n, k, some): a linear map of these is fitted beside the heads

    @classmethod
    def of(cls, inputs: Any, outputs: Any) -> Examples:
        """Arrays of any supported library; UsageError says what is wrong with them."""
        given = {"inputs": inputs, "outputs": outputs}
        eps = 0.0
        arrays = []
        for name, array in given.items():
            if not array_api_compat.is_array_api_obj(array):
                raise UsageError(f"{name} must be an array, not {type(array).__name__}")
            if not is_real(array):
                raise UsageError(f"{name} must hold real numbers, not {array.dtype}")
            if array.ndim != 3 or 0 in tuple(array.shape):
                shape = "(n, k, d)" if name == "inputs" else "(n, k, d_out)"
                raise UsageError(f"{name} must have shape {shape} with no size zero, not {tuple(array.shape)}")
            try:
                plain = to_numpy(array)
            except TypeError as error:
                raise UsageError(f"{name} of the dtype {array.dtype} cannot be read: {error}") from error
            if name == "outputs" and np.issubdtype(plain.dtype, np.floating):  # inputs are what they are
                eps = float(np.finfo(plain.dtype).eps)
            arrays.append(np.ascontiguousarray(plain, dtype=np.float64))
        for name, array in zip(given, arrays, strict=True):
            bad = int(np.sum(~np.isfinite(array)))
            if bad:
                raise UsageError(f"{name} must be finite: {bad:,} of {array.size:,} numbers are nan or inf")
        one, two = arrays
        if one.shape[:2] != two.shape[:2]:
            raise UsageError(
                f"inputs {one.shape} and outputs {two.shape} must agree in the number of examples and of tokens: "
                f"(n, k, d) and (n, k, d_out)"
            )
        return cls(one, two, max(eps, float(np.finfo(np.float64).eps)))

    @property
    def count(self) -> int:
        """Examples."""
        return int(self.inputs.shape[0])

    @property
    def length(self) -> int:
        """Tokens per example."""
        return int(self.inputs.shape[1])

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.inputs.shape[2])

    @property
    def outputs_per_token(self) -> int:
        """Numbers per output token."""
        return int(self.outputs.shape[2])

    def problem(self) -> LayerProblem:
        """The examples as a least-squares problem."""
        return LayerProblem(self.inputs, self.outputs, self.beside)

    def some(self, chosen: Any) -> Examples:
        """A part of the examples."""
        beside = None if self.beside is None else self.beside[chosen]
        return Examples(self.inputs[chosen], self.outputs[chosen], self.eps, beside)

    def split(self, heldout: int | None, rng: np.random.Generator) -> tuple[Examples, Examples]:
        """Examples to learn from, and others to judge by. Inputs of the same tokens are never on both sides."""
        wanted = min(max(LEAST_HELDOUT, self.count // 10), MOST_HELDOUT) if heldout is None else heldout
        kinds = self.same_inputs(in_any_order=True)
        order = rng.permutation(int(kinds.max()) + 1)
        sizes = np.bincount(kinds)[order]
        # As many kinds of inputs as make up the number wanted; at least one stays to learn from.
        needed = 1 + int(np.searchsorted(np.cumsum(sizes), wanted))
        held = np.isin(kinds, order[: min(needed, len(order) - 1)])
        return self.some(~held), self.some(held)

    def once(self) -> Examples:
        """Each input once, whatever the order of its tokens."""
        _, first = np.unique(self.same_inputs(in_any_order=True), return_index=True)
        return self if len(first) == self.count else self.some(np.sort(first))

    @cached_property
    def different(self) -> int:
        """Examples of different tokens: the same ones, even in another order, say nothing new of a layer."""
        return 1 + int(np.max(self.same_inputs(in_any_order=True), initial=-1))

    def same_inputs(self, *, in_any_order: bool = False) -> np.ndarray[Any, np.dtype[np.int64]]:  # (n,)
        """For each example the number of its input: equal ones have the same."""
        inputs = np.ascontiguousarray(self.inputs + 0.0)  # no minus zeros
        if in_any_order:
            inputs = np.sort(_as_bytes(inputs), axis=1)
        _, kinds = np.unique(_as_bytes(inputs.reshape(self.count, -1)), return_inverse=True)
        return np.asarray(kinds.reshape(-1), dtype=np.int64)

    def noise_of_repeats(self) -> tuple[float, int]:
        """Standard deviation of outputs of equal inputs around their means, and the degrees of freedom it rests on."""
        kinds = self.same_inputs()
        flat = self.outputs.reshape(self.count, -1)
        sizes = np.bincount(kinds)
        means = np.zeros((len(sizes), flat.shape[1]))
        np.add.at(means, kinds, flat)
        means /= sizes[:, None]
        freedom = (self.count - len(sizes)) * flat.shape[1]
        return float(np.sqrt(np.sum((flat - means[kinds]) ** 2) / max(1, freedom))), freedom


def _as_bytes(array: Any) -> Any:  # (…, size) -> (…,)
    """What is along the last axis as one item, to be compared as a whole."""
    return array.view(np.dtype((np.void, array.dtype.itemsize * array.shape[-1])))[..., 0]


@dataclass(frozen=True)
class ExampleCount:
    """How many numbers the examples hold against how many the layer has."""

    examples: int
    length: int
    width: int
    outputs: int
    heads: int
    rank: int | None = None  # of every score matrix; full if None
    different: int | None = None  # examples of different tokens; all if None

    @property
    def score_numbers(self) -> int:
        """Free numbers of one score matrix."""
        rank = self.width if self.rank is None else min(self.rank, self.width)
        return rank * (2 * self.width - rank)

    @property
    def parameters(self) -> int:
        """Free numbers of the layer."""
        return self.heads * (self.score_numbers + self.width * self.outputs)

    @property
    def ratio(self) -> float:
        """Numbers in the outputs over free numbers of the layer."""
        return self.examples * self.length * self.outputs / self.parameters

    @property
    def pairs(self) -> float:
        """Examples over d²/(k(k − 1)): pairs of different tokens over numbers of a score matrix."""
        return self.examples * self.length * (self.length - 1) / self.score_numbers

    def needed(self, ratio: float, pairs: float) -> int:
        """Examples that meet both conditions."""
        enough = ratio * self.parameters / (self.length * self.outputs)
        return int(np.ceil(max(enough, pairs * self.score_numbers / (self.length * max(1, self.length - 1)))))

    @property
    def once(self) -> ExampleCount:
        """Counts in which repeated examples count once: they lessen noise, and determine nothing."""
        return self if self.different is None else replace(self, examples=self.different, different=None)

    @property
    def too_few(self) -> bool:
        """Whether nothing could be learned."""
        return self.once.ratio <= REFUSED_RATIO or self.once.pairs < REFUSED_PAIRS

    @property
    def good(self) -> bool:
        """Whether both conditions are met."""
        return self.once.ratio >= GOOD_RATIO and self.once.pairs >= GOOD_PAIRS

    def sentence(self) -> str:
        """Both conditions, and what is missing."""
        once = self.once
        said = f"{once.ratio:.3g} numbers per parameter ({GOOD_RATIO:g} wanted) and "
        said += f"{once.pairs:.3g} × d²/(k(k − 1)) examples ({GOOD_PAIRS:g} wanted)"
        missing = self.needed(GOOD_RATIO, GOOD_PAIRS) - once.examples
        return said if missing <= 0 else f"{said}: {missing:,} more examples are missing"


@dataclass(frozen=True)
class LabelErrors:
    """Standard deviation of the errors, or the tolerance that they stay within."""

    deviation: float | None  # 0 for exact outputs, None where it is unknown; of a tolerance, as much as it can be
    tolerance: float = 0.0  # errors are at most this, where it is positive, and nothing else is known of them
    repeats: bool = False  # outputs of equal inputs err alike: they are rounded

    @classmethod
    def of(cls, noise: Noise | str | float | None, examples: Examples) -> LabelErrors:
        """As declared; a number is a standard deviation."""
        if isinstance(noise, int | float) and not isinstance(noise, bool):
            return cls(Noise.gaussian(float(noise)).scale if noise != 0 else 0.0)
        kind = Noise.of(noise)  # type: ignore[arg-type]  # which says what it is not
        if kind.kind == "measure":
            return cls(None)
        if kind.kind == "bounded" or kind.is_cut:
            return cls(kind.radius, tolerance=kind.radius, repeats=kind.is_cut)
        if kind.kind == "dtype":
            return cls(UNIFORM * kind.scale * float(np.sqrt(np.mean(examples.outputs**2))), repeats=True)
        if kind.kind == "rounded":
            return cls(UNIFORM * kind.scale, repeats=True)
        return cls(kind.scale)
