"""The layer of score matrices and of what neurons see of each head, with radii."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Array, Floats, Space
from keyhole.families import MultiHead, SingleHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Unrecoverable
from keyhole.methods.one_layer.cells import PlainNet, solve_value
from keyhole.methods.one_layer.several_heads.scores import Scores
from keyhole.methods.one_layer.several_heads.shares import CONTRADICTION, Shares
from keyhole.recovery import Outcome

# Radii in standard deviations of what was drawn.
DEVIATIONS = 6.0


def radius_of(draws: Floats) -> Floats:  # (draws, ...) -> (...)
    """Radii from few draws: half by those of each number itself, half by those of its whole matrix."""
    own = np.mean(draws**2, axis=0)
    whole = np.mean(own, axis=(-2, -1), keepdims=True)
    return np.asarray(DEVIATIONS * np.sqrt((own + whole) / 2))


def layer_before_net(
    space: Space, net: ReluNet, radius: ReluNet, scores: Scores, shares: Shares
) -> tuple[OneLayer, OneLayer]:
    """Without residual: values are what each neuron sees of a head, and each neuron takes one of their numbers.

    These are over how steep neurons are for single tokens, so that their kinks are as far out as those of these.
    """
    asarray, shape = space.asarray, net.weights_out.shape[:-1]
    steep = np.ones(shares.matrices.shape[1])
    norms = PlainNet.of(net, 1.0).norms
    steep[: net.neurons] = np.where(norms > 0, norms, 1.0)

    def made(own: ReluNet, weights: Floats, matrices: Floats, values: Floats, biases: Floats | None) -> OneLayer:
        skip = None if net.skip is None else asarray(weights[net.neurons :].reshape(*shape, -1))
        behind = ReluNet(
            asarray(weights[: net.neurons]), own.bias_in, own.weights_out, own.bias_out, skip, net.activation
        )
        return OneLayer(_heads(space, matrices, np.swapaxes(values / steep[:, None], 1, 2), biases), behind)

    layer = made(net, np.diag(steep), scores.matrices, shares.matrices, scores.biases)
    return layer, made(
        radius, np.zeros_like(np.diag(steep)), radius_of(scores.draws), radius_of(shares.draws), _bias_radii(scores)
    )


def layer_with_residual(
    space: Space, net: ReluNet, radius: ReluNet, scores: Scores, shares: Shares
) -> tuple[OneLayer, OneLayer, bool]:
    """With a residual: A = B − ΣM_h, values of least norm with A·V_hᵀ = M_h, and whether these are unique."""
    plain, wide, neurons = PlainNet.of(net, 1.0), PlainNet.of(radius, 1.0), net.neurons
    whole, whole_radius = plain.inner, wide.inner
    if plain.skip is not None and wide.skip is not None:
        whole, whole_radius = np.vstack([whole, plain.skip]), np.vstack([whole_radius, wide.skip])
    own = whole - np.sum(shares.matrices, axis=0)
    own_radius = np.hypot(whole_radius, radius_of(np.sum(shares.draws, axis=1)))
    values, radii, unique = [], [], True
    wider = own_radius
    for matrix, matrix_radius in zip(shares.matrices, radius_of(shares.draws), strict=True):
        value, value_radius, missed, explained, told = solve_value(own, own_radius, matrix, matrix_radius)
        if np.any(missed > explained):  # not one value for all neurons
            raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)
        values.append(value)
        radii.append(value_radius)
        unique, wider = unique and told, np.maximum(wider, own_radius + missed)
    asarray, shape = space.asarray, net.weights_out.shape[:-1]

    def made(
        own_net: ReluNet, weights: Floats, matrices: Floats, of_heads: list[Floats], biases: Floats | None
    ) -> OneLayer:
        skip: Array | None = None if net.skip is None else asarray(weights[neurons:].reshape(*shape, -1))
        behind = ReluNet(
            asarray(weights[:neurons]), own_net.bias_in, own_net.weights_out, own_net.bias_out, skip, net.activation
        )
        return OneLayer(_heads(space, matrices, np.stack(of_heads), biases), behind, residual=True)

    layer = made(net, own, scores.matrices, values, scores.biases)
    return layer, made(radius, wider, radius_of(scores.draws), radii, _bias_radii(scores)), unique


def _heads(space: Space, scores: Floats, values: Floats, biases: Floats | None) -> SingleHead | MultiHead:
    heads = [
        SingleHead(
            space.asarray(score), space.asarray(value), None if biases is None else space.asarray(biases[number])
        )
        for number, (score, value) in enumerate(zip(scores, values, strict=True))
    ]
    return MultiHead(heads).simplest()


def _bias_radii(scores: Scores) -> Floats | None:  # (heads, width)
    return None if scores.bias_draws is None else radius_of(scores.bias_draws[:, :, None, :])[:, 0]
