"""A network of one hidden layer, on the last token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.activations import ACTIVATIONS, STEEPEST, activate
from keyhole.families.base import Anatomy, Family, Sensitivity, check_arrays, check_shapes
from keyhole.families.files import register
from keyhole.families.sensitivity import sensitivity_of_net


@register
@dataclass(frozen=True, eq=False)
class ReluNet(Family):
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
        check_arrays(self, "weights_in", "bias_in", "weights_out", "bias_out", "skip")
        if self.weights_in.ndim != 2 or self.weights_in.shape[1] == 0 or self.weights_out.ndim not in (1, 2):
            raise UsageError(
                "ReluNet needs weights_in (neurons, width) and weights_out (neurons,) or (outputs, neurons), "
                f"not {tuple(self.weights_in.shape)} and {tuple(self.weights_out.shape)}"
            )
        neurons, width = self.weights_in.shape
        outputs = tuple(self.weights_out.shape[:-1])
        if 0 in outputs:
            raise UsageError(f"ReluNet.weights_out has shape {tuple(self.weights_out.shape)}: there must be an output")
        check_shapes(
            self, bias_in=(neurons,), weights_out=(*outputs, neurons), bias_out=outputs, skip=(*outputs, width)
        )

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

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences, which depends on their last tokens only."""
        return self.on_vectors(tokens[:, -1, :])

    def padded(self, absent: Array) -> ReluNet:  # noqa: ARG002 - (batch, length)
        """The net: it sees last tokens only."""
        return self

    def on_vectors(self, x: Array) -> Array:  # (n, width) -> (n,) or (n, outputs)
        """Answer single tokens."""
        net = self.like(x)
        hidden = activate(self.activation, x @ net.weights_in.T + net.bias_in)
        answers = hidden @ _transpose(net.weights_out) + net.bias_out
        return answers if net.skip is None else answers + x @ _transpose(net.skip)

    def error_bar(self, radius: ReluNet, tokens: Array, rounding: float) -> Array:  # -> (batch,) or (batch, outputs)
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`: errors add in quadrature."""
        x = tokens[:, -1, :]
        xp = namespace(x)
        net, wide = self.like(x), radius.like(x)
        size = xp.linalg.vector_norm(x, axis=-1)  # (batch,)
        z = x @ net.weights_in.T + net.bias_in
        z_radius = xp.sqrt((x**2) @ (wide.weights_in**2).T + wide.bias_in**2)
        z_radius = z_radius + rounding * (
            size[:, None] * xp.linalg.vector_norm(net.weights_in, axis=1) + xp.abs(net.bias_in)
        )
        bound = STEEPEST[self.activation] * z_radius
        if self.activation == "relu":  # a neuron that is surely off errs by nothing
            bound = xp.where(z > -z_radius, bound, xp.zeros_like(bound))
        hidden = activate(self.activation, z)
        hidden_rounding = (rounding * hidden) ** 2
        squares = (bound**2 + hidden_rounding) @ _transpose(net.weights_out**2) + hidden**2 @ _transpose(
            wide.weights_out**2
        )
        total = wide.bias_out + rounding * xp.abs(net.bias_out)
        if wide.skip is not None:
            squares = squares + x**2 @ _transpose(wide.skip**2)
        if net.skip is not None:
            lengths = xp.linalg.vector_norm(net.skip, axis=-1)
            total = total + rounding * (size if net.outputs is None else size[:, None]) * lengths
        return xp.sqrt(squares) + total

    def effects(self, change: ReluNet, tokens: Array) -> Iterator[tuple[str, Array]]:
        """How far a change of each neuron, of all output weights, of the constant and of the skip moves the answers."""
        x = tokens[:, -1, :]
        xp = namespace(x)
        net, wide = self.like(x), change.like(x)
        z = x @ net.weights_in.T + net.bias_in
        moved = xp.sqrt((x**2) @ (wide.weights_in**2).T + wide.bias_in**2)
        hidden, up, down = (activate(self.activation, each) for each in (z, z + moved, z - moved))
        moved = (xp.abs(up - hidden) + xp.abs(hidden - down)) / 2  # (batch, neurons)
        out = xp.abs(_transpose(net.weights_out))  # (neurons,) or (neurons, outputs)
        for number in range(self.neurons):
            yield (
                f"neuron {number + 1}",
                moved[:, number] * out[number] if out.ndim == 1 else moved[:, number : number + 1] * out[number, :],
            )
        if self.neurons:
            yield "weights out", xp.sqrt(hidden**2 @ _transpose(wide.weights_out**2))
        yield "bias out", xp.zeros_like(xp.sum(hidden, axis=-1) if out.ndim == 1 else hidden @ out) + wide.bias_out
        if net.skip is not None and wide.skip is not None:
            yield "skip", xp.sqrt(x**2 @ _transpose(wide.skip**2))

    def of_predictions(self, tokens: Array) -> Array | None:  # noqa: ARG002 - (batch, length, width) -> (batch, outputs)
        """As a radius: errors of answers from what is known of all entries together; None where nothing is."""
        return None

    def propagate_radius(self, x: Array, radius: Array) -> Array:  # (n, width), (n, width) -> (n,) or (n, outputs)
        """How far answers may move when the entries of their argument move within `radius`, to first order."""
        xp, net = namespace(x), self.like(x)
        within = radius @ xp.abs(net.weights_in).T  # (n, neurons)
        if net.activation == "relu":  # a neuron that is surely off passes nothing on
            within = xp.where(x @ net.weights_in.T + net.bias_in > -within, within, xp.zeros_like(within))
        out = STEEPEST[net.activation] * within @ _transpose(xp.abs(net.weights_out))
        return out if net.skip is None else out + radius @ _transpose(xp.abs(net.skip))

    @property
    def constant(self) -> Array | None:
        """The answer to a token of zero; None where there is nothing else to predict."""
        if not self.neurons and self.skip is None:
            return None
        like = self.weights_in
        xp = namespace(like)
        return self(xp.zeros((1, 1, self.width), dtype=like.dtype, device=like.device))[0]

    def as_single_tokens(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, width)
        """The last ones."""
        return tokens[:, -1, :]

    def onto_kinks(self, x: Floats, rng: np.random.Generator) -> Floats:  # (n, width) -> (n, width)
        """The points moved to the kink of one neuron each: where kinks of deeper nets end, this net errs."""
        weights = floats(self.weights_in)
        squares = np.sum(weights**2, axis=1)
        (used,) = np.nonzero(squares > 0)
        if not used.size:
            return x
        chosen = rng.choice(used, x.shape[0])
        heights = np.sum(x * weights[chosen], axis=1) + floats(self.bias_in)[chosen]
        return np.asarray(x - (heights / squares[chosen])[:, None] * weights[chosen])

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens lie `size` times as far out as the typical kink of a neuron.

        A smooth neuron bends where what enters it is up to about one, if it has no bias too.
        """
        norms, biases = np.linalg.norm(floats(self.weights_in), axis=1), np.abs(floats(self.bias_in))
        reach = biases if self.activation == "relu" else np.maximum(biases, 1.0)
        used = (norms > 0) & (reach > 0)
        typical = float(np.median(reach[used] / norms[used])) if np.any(used) else 1.0
        return float(size * typical * self.width**0.5)

    @property
    def anatomy(self) -> Anatomy:
        """One net."""
        many = f"{self.neurons} neuron{'s' * (self.neurons != 1)}"
        return Anatomy(f"A net of {many} on tokens of width {self.width}", net=self)

    @property
    def counting_bound(self) -> int:
        """The fewest queries whose answers hold as many numbers as the net has, less the scales of ReLU neurons."""
        numbers = sum(int(np.prod(array.shape)) for array in self.arrays().values())
        return -(-(numbers - self.neurons * (self.activation == "relu")) // (self.outputs or 1))

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
        """Predictions, their rounding, and the first-order effect of every array."""
        return sensitivity_of_net(self, tokens, unit, looked_at)


def _transpose(array: Array) -> Array:  # (outputs, n) -> (n, outputs); (n,) stays
    return array.T if array.ndim == 2 else array
