"""Sequences of several lengths are predicted together as one length at a time."""

from __future__ import annotations

import numpy as np
import pytest

from keyhole import AttentionLayer, Labels, MultiHead, OneLayer, ReluNet, Residual, SingleHead
from keyhole.arrays import numpy_space
from keyhole.families import Family
from keyhole.families.parts import Attention
from keyhole.families.parts.length_laws import LogLength
from keyhole.families.parts.links import Softcap
from keyhole.families.parts.normalisers import Sink
from keyhole.methods.batches import in_batches

WIDTH, LENGTHS = 3, (1, 2, 3, 7, 8, 40, 64)


def _members() -> dict[str, Family]:
    rng = np.random.default_rng(3)

    def head(outputs: int = 3) -> SingleHead:
        bias = rng.standard_normal(WIDTH)
        return SingleHead(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal((WIDTH, outputs)), bias)

    net = ReluNet(*(rng.standard_normal(shape) for shape in ((4, 3), (4,), (2, 4), (2,))))
    single = SingleHead(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH), None, rng.standard_normal(()))
    return {
        "single-head": single,
        "multi-head": MultiHead([head(), head()], rng.standard_normal(3)),
        "residual": Residual(head()),
        "one-layer": OneLayer(head(), net, residual=True),
        "relu-net": net,
        "labels": Labels(head(), (0, 1, 2)),
        "softcap and sink": SingleHead(
            single.score, single.value, attention=Attention(Softcap(np.asarray(2.0)), Sink(np.asarray(0.3)))
        ),
        "counts tokens": SingleHead(single.score, single.value, attention=Attention(length_law=LogLength())),
        "all positions": AttentionLayer(rng.standard_normal((2, 3, 3)), rng.standard_normal((2, 3, 2))),
    }


@pytest.mark.parametrize("name", _members())
def test_lengths_together_say_what_each_says(name: str) -> None:
    params, rng = _members()[name], np.random.default_rng(4)
    groups = [(np.array([2 * n, 2 * n + 1]), rng.standard_normal((2, length, 3))) for n, length in enumerate(LENGTHS)]
    radius = params.with_arrays({key: 1e-3 + 0 * array for key, array in params.arrays().items()})
    own = {int(where[row]): tokens[row : row + 1] for where, tokens in groups for row in range(2)}
    batches = [batch._replace(tokens=batch.tokens.copy()) for batch in in_batches(params, groups, numpy_space())]
    assert sorted(np.concatenate([batch.places for batch in batches])) == list(range(2 * len(LENGTHS)))
    apart = name in ("counts tokens", "all positions")
    assert len(batches) == (len(LENGTHS) if apart else 2)  # single tokens are alone
    for batch in batches:
        several = [
            batch.params(batch.tokens),
            batch.params.error_bar(radius, batch.tokens, 1e-15),
            batch.params.deviation(radius, batch.tokens),
            *(effect for _, effect in batch.params.effects(radius, batch.tokens)),
        ]
        for row, (place, length) in enumerate(zip(batch.places, batch.lengths, strict=True)):
            tokens = own[int(place)]
            assert tokens.shape[1] == length
            alone = [params(tokens), params.error_bar(radius, tokens, 1e-15), params.deviation(radius, tokens)]
            alone += [effect for _, effect in params.effects(radius, tokens)]
            for ours, expected in zip(several, alone, strict=True):
                assert np.allclose(ours[row], expected[0], rtol=1e-9, atol=1e-13)
