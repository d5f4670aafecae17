"""A network of one hidden layer, on the last token."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, ClassVar

import array_api_compat
import numpy as np
from scipy.special import erf as scipy_erf

from keyhole.arrays import Array, namespace, to_numpy
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays

# Largest slope of each activation, rounded up. All of them are z/2 plus an even function of z.
STEEPEST = {"relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
ACTIVATIONS = tuple(STEEPEST)


def activate(name: str, z: Array) -> Array:
    """The activation of this name, entry by entry."""
    xp = namespace(z)
    if name == "relu":
        return xp.where(z > 0, z, xp.zeros_like(z))
    if name == "gelu":
        return 0.5 * z * (1 + _erf(z * 0.5**0.5))
    if name == "gelu_tanh":
        return 0.5 * z * (1 + xp.tanh((2 / np.pi) ** 0.5 * z * (1 + 0.044715 * z * z)))
    return 0.5 * z * (1 + xp.tanh(0.5 * z))  # silu: z·σ(z), in the form that does not overflow


def activate_slope(name: str, z: Array) -> Array:
    """The derivative of the activation, entry by entry; at a kink that of the right side is not promised."""
    xp = namespace(z)
    if name == "relu":
        return xp.where(z > 0, xp.ones_like(z), xp.zeros_like(z))
    if name == "gelu":
        return 0.5 * (1 + _erf(z * 0.5**0.5)) + z * xp.exp(-0.5 * z * z) / (2 * np.pi) ** 0.5
    if name == "gelu_tanh":
        tanh = xp.tanh((2 / np.pi) ** 0.5 * z * (1 + 0.044715 * z * z))
        return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * (2 / np.pi) ** 0.5 * (1 + 3 * 0.044715 * z * z)
    gate = 0.5 * (1 + xp.tanh(0.5 * z))
    return gate * (1 + z * (1 - gate))


def _turned(array: Array) -> Array:  # (outputs, n) -> (n, outputs); (n,) stays
    return array.T if array.ndim == 2 else array


def _erf(z: Array) -> Array:
    """The error function, which the array API has no word for."""
    xp = namespace(z)
    return scipy_erf(z) if array_api_compat.is_numpy_namespace(xp) else xp.erf(z)


@dataclass(frozen=True, eq=False)
class ReluNet:
    """f(X) = weights_out · act(weights_in · x + bias_in) + bias_out + skip · x, x the last token.

    `act` is ReLU unless `activation` says otherwise. Zero neurons make an affine map. Calling the net computes f
    on arrays of any supported library, in the dtype and on the device of the tokens.
    """

    weights_in: Array  # (neurons, width)
    bias_in: Array  # (neurons,)
    weights_out: Array  # (neurons,) for one plain number per answer, (outputs, neurons) for several
    bias_out: Array  # () or (outputs,), as weights_out has it
    skip: Array | None = None  # (width,) or (outputs, width); None: no direct way past the neurons
    activation: str = "relu"

    family: ClassVar[str] = "relu-net"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UsageError(f"ReluNet.activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}")
        for name in ("weights_in", "bias_in", "weights_out", "bias_out", "skip"):
            array = getattr(self, name)
            if not hasattr(array, "ndim") and not (name == "skip" and array is None):
                raise UsageError(f"ReluNet.{name} must be an array, not {type(array).__name__}")
        if self.weights_in.ndim != 2 or self.weights_in.shape[1] == 0 or self.weights_out.ndim not in (1, 2):
            raise UsageError(
                "ReluNet needs weights_in (neurons, width) and weights_out (neurons,) or (outputs, neurons), "
                f"not {tuple(self.weights_in.shape)} and {tuple(self.weights_out.shape)}"
            )
        neurons, width = self.weights_in.shape
        outputs = tuple(self.weights_out.shape[:-1])
        if 0 in outputs:
            raise UsageError(f"ReluNet.weights_out has shape {tuple(self.weights_out.shape)}: there must be an output")
        expected = {
            "bias_in": (neurons,),
            "weights_out": (*outputs, neurons),
            "bias_out": outputs,
            "skip": (*outputs, width),
        }
        for name, shape in expected.items():
            array = getattr(self, name)
            if array is not None and tuple(array.shape) != shape:
                raise UsageError(f"ReluNet.{name} has shape {tuple(array.shape)}, expected {shape}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.weights_in.shape[1])

    @property
    def neurons(self) -> int:
        """Hidden neurons."""
        return int(self.weights_in.shape[0])

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return int(self.weights_out.shape[0]) if self.weights_out.ndim == 2 else None

    @property
    def words(self) -> dict[str, str]:
        """What determines the net besides numbers."""
        return {"activation": self.activation}

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "activation"}
        return {name: array for name, array in named.items() if array is not None}

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences, which depends on their last tokens only."""
        return self.on_vectors(tokens[:, -1, :])

    def on_vectors(self, x: Array) -> Array:  # (n, width) -> (n,) or (n, outputs)
        """Answer single tokens."""
        net = self.like(x)
        hidden = activate(self.activation, x @ net.weights_in.T + net.bias_in)
        answers = hidden @ _turned(net.weights_out) + net.bias_out
        return answers if net.skip is None else answers + x @ _turned(net.skip)

    def like(self, tokens: Array) -> ReluNet:
        """The same net with its parameters in the library, dtype and device of `tokens`."""
        xp = namespace(tokens)

        def moved(array: Array | None) -> Any:
            if array is None or (namespace(array) is xp and array.dtype == tokens.dtype):
                return array if array is None or array.device == tokens.device else array.to(tokens.device)
            return xp.asarray(to_numpy(array), dtype=tokens.dtype, device=tokens.device)

        names = ("weights_in", "bias_in", "weights_out", "bias_out", "skip")
        return ReluNet(**{name: moved(getattr(self, name)) for name in names}, activation=self.activation)

    def error_bar(
        self,
        radius: ReluNet,  # entrywise radii of the parameters
        tokens: Array,  # (batch, length, width)
        rounding: float,  # relative error of one inner product of unit vectors
    ) -> Array:  # (batch,) or (batch, outputs)
        """First-order bar on |f_true − f_self| when the parameters are right within `radius`.

        Errors of independent parameters add in quadrature; `rounding` covers the arithmetic of the oracle and of
        this prediction.
        """
        x = tokens[:, -1, :]
        xp = namespace(x)
        net, wide = self.like(x), radius.like(x)
        size = xp.linalg.vector_norm(x, axis=-1)  # (batch,)
        z = x @ net.weights_in.T + net.bias_in
        z_bar = xp.sqrt((x**2) @ (wide.weights_in**2).T + wide.bias_in**2)
        z_bar = z_bar + rounding * (size[:, None] * xp.linalg.vector_norm(net.weights_in, axis=1) + xp.abs(net.bias_in))
        bar = STEEPEST[self.activation] * z_bar
        if self.activation == "relu":  # a neuron that is surely off errs by nothing
            bar = xp.where(z > -z_bar, bar, xp.zeros_like(bar))
        hidden = activate(self.activation, z)
        hidden_rounding = (rounding * hidden) ** 2
        squares = (bar**2 + hidden_rounding) @ _turned(net.weights_out**2) + hidden**2 @ _turned(wide.weights_out**2)
        total = wide.bias_out + rounding * xp.abs(net.bias_out)
        if wide.skip is not None:
            squares = squares + x**2 @ _turned(wide.skip**2)
        if net.skip is not None:
            lengths = xp.linalg.vector_norm(net.skip, axis=-1)
            total = total + rounding * (size if net.outputs is None else size[:, None]) * lengths
        return xp.sqrt(squares) + total

    def onto_kinks(self, x: Any, rng: np.random.Generator) -> Any:  # (n, width) -> (n, width), NumPy
        """The points moved to the kink of one neuron each: where folds of deeper nets end, this net errs."""
        weights = np.asarray(to_numpy(self.weights_in), dtype=np.float64)
        squares = np.sum(weights**2, axis=1)
        (used,) = np.nonzero(squares > 0)
        if not used.size:
            return x
        chosen = rng.choice(used, x.shape[0])
        heights = np.sum(x * weights[chosen], axis=1) + np.asarray(to_numpy(self.bias_in), dtype=np.float64)[chosen]
        return x - (heights / squares[chosen])[:, None] * weights[chosen]

    def simplest(self) -> ReluNet:
        """The parameters in the smallest family that holds them: these."""
        return self

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens lie `size` times as far out as the typical kink of a neuron."""
        offsets = self._offsets()
        typical = float(np.median(offsets)) if offsets.size else 1.0
        return float(size * typical * self.width**0.5)

    def _offsets(self) -> Any:
        """Distances of the kinks from the origin, where they are neither zero nor infinite."""
        norms = np.linalg.norm(to_numpy(self.weights_in).astype(np.float64), axis=1)
        biases = np.abs(to_numpy(self.bias_in).astype(np.float64))
        used = (norms > 0) & (biases > 0)
        return biases[used] / norms[used]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        save_arrays(path, self.family, self.arrays(), self.words)
