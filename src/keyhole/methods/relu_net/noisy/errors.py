"""A fitted net whose predictions know how their parameters' errors hang together."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from keyhole.arrays import Array, namespace, to_numpy
from keyhole.families.relu_net import ReluNet
from keyhole.methods.relu_net.noisy.covariance import Spread


class CorrelatedErrors(ReluNet):
    """Entrywise errors of a net that also say how far off its predictions are, correlations included."""

    spread: Spread
    widened: float  # error of a prediction over its standard error

    @classmethod
    def of(cls, entries: ReluNet, spread: Spread, widened: float) -> CorrelatedErrors:
        """Entrywise errors with what stands behind them."""
        made = cls(**{field.name: getattr(entries, field.name) for field in fields(ReluNet)})
        object.__setattr__(made, "spread", spread)
        object.__setattr__(made, "widened", widened)
        return made

    def of_predictions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, outputs)
        """Errors of the net's answers, from the joint covariance of its parameters."""
        last = to_numpy(tokens[:, -1, :]).astype(np.float64)
        return self.widened * self.spread.predictions(np.concatenate([last, np.ones((last.shape[0], 1))], axis=1))


class FittedNet(ReluNet):
    """A net found by least squares: parameters that compensate for each other make no wide error bars."""

    def error_bar(self, radius: ReluNet, tokens: Array, rounding: float) -> Array:  # -> (batch,) or (batch, outputs)
        """Errors of predictions from the joint covariance of all parameters where it is known, else entry by entry."""
        errors = radius.of_predictions(tokens)
        if errors is None:
            return super().error_bar(radius, tokens, rounding)
        none = ReluNet(**{name: 0 * array for name, array in self.arrays().items()}, activation=self.activation)
        errors = errors if self.outputs is not None else errors[:, 0]
        xp = namespace(tokens)
        plain = super().error_bar(none, tokens, rounding)
        return plain + xp.asarray(errors, dtype=plain.dtype, device=plain.device)
