"""What no attacker can do better than: floors under the relative error of a recovered head, by kind of defence.

All are of the size that `keyhole.distance` measures. They bound what answers reveal, not what is known of an oracle
besides, and say nothing of a head without attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import Family, SingleHead
from keyhole.gauge import distance
from keyhole.noise import Noise
from keyhole.numerics.cramer_rao import universal_floor
from keyhole.queries import Signature

# An attacker who guesses nothing is off by the whole, so no floor is higher.
NOTHING = 1.0


@dataclass(frozen=True)
class Geometry:
    """What floors depend on."""

    width: int
    bound: int  # the counting bound
    spacing: float  # of the numbers the oracle computes with
    max_norm: float  # of a token; inf where there is no limit
    value_norm: float  # the largest of any output
    score_norm: float  # Frobenius
    outputs: int  # numbers per answer
    positions: float  # answers per query
    labels: int = 0  # how many labels there are, where answers are labels

    @classmethod
    def of(cls, params: Family, signature: Signature, top: int = 1) -> Geometry:
        """That of parameters behind a defence; of labels the `top` ones are told.

        Of what is more than one softmax head only the counting bound and rounding are known.
        """
        numbers = params.numbers()
        anatomy = numbers.anatomy
        alone = numbers.family == SingleHead.family and not numbers.words
        head = anatomy.heads[0] if alone else SingleHead(np.zeros((1, 1)), np.zeros((1, params.outputs or 1)))
        values = floats(head.value).reshape(head.width, -1)
        labels = max(2, values.shape[1]) if signature.answers == "labels" else 0
        return cls(
            width=head.width,
            bound=params.counting_bound,
            spacing=signature.space.spacing,
            max_norm=math.inf if signature.max_norm is None else signature.max_norm,
            value_norm=float(np.max(np.linalg.norm(values, axis=0))),
            score_norm=float(np.linalg.norm(floats(head.score))),
            outputs=values.shape[1],
            # Observed everywhere, a sequence of any length answers any number of times.
            labels=math.perm(labels, min(top, labels)) if alone and labels else 0,
            positions=1.0 if signature.positions == "last" else float(signature.max_length or math.inf),
        )

    @property
    def reach(self) -> float:
        """How far an answer moves at most when the score matrix changes by its own size: B³|v|·‖W‖/2."""
        return self.max_norm**3 * self.value_norm * self.score_norm / 2


def counting_floor(queries: float, bound: int) -> float:
    """Fewer answers than unknown numbers: of an oracle without any pattern, the share that was not asked remains."""
    return math.sqrt(max(0.0, 1 - queries / bound))


def gaussian_floor(deviation: float, queries: float, geometry: Geometry) -> float:
    """Cramér–Rao for any design, for unbiased estimates. Outputs count as further queries of the largest."""
    if not 0 < geometry.reach < math.inf:
        return 0.0
    answers = queries * geometry.positions * geometry.outputs
    entry = universal_floor(geometry.width, geometry.value_norm, geometry.max_norm, deviation, answers)
    return entry * geometry.width / geometry.score_norm


def bounded_floor(tolerance: float, geometry: Geometry) -> float:
    """An adversary who errs by at most τ hides ‖ΔW‖ ≤ 2τ/(B³|v|) however often he is asked."""
    return tolerance / geometry.reach if geometry.reach > 0 else 0.0


def rounding_floor(half_unit: float, queries: float, geometry: Geometry) -> float:
    """What half a unit hides, halved by every further query per number.

    Not proven: rounding is no adversary, and who bisects for the steps gains a bit per query. That is the best
    attack known, so this is what it leaves.
    """
    return bounded_floor(half_unit, geometry) * math.exp2(-max(0.0, queries / geometry.bound - 1))


def label_floor(queries: float, geometry: Geometry) -> float:
    """Rate and distortion: R bits for each of d² normal numbers leave a part 2^(−R) of them unknown."""
    bits = queries * geometry.positions * math.log2(geometry.labels)
    return math.exp2(-bits / geometry.width**2)


def projection_floor(params: Family, onto: Floats) -> float:
    """What of a head is lost behind a projection of its tokens: answers depend on nothing else. 0 of other families."""
    numbers = params.numbers()
    if numbers.family != SingleHead.family or numbers.words:
        return 0.0
    head = numbers.anatomy.heads[0]
    bias = None if head.score_bias is None else onto @ floats(head.score_bias)
    seen = SingleHead(onto @ floats(head.score) @ onto, onto @ floats(head.value), bias, head.output_bias)
    return min(NOTHING, distance(seen, head))


def floor(noise: Noise, queries: float, geometry: Geometry) -> float:
    """The highest floor that applies to these errors after so many queries."""
    if not queries:
        return NOTHING
    own = 0.0
    if noise.kind == "gaussian":
        own = gaussian_floor(noise.scale, queries, geometry)
    elif noise.kind == "bounded":
        own = bounded_floor(noise.scale, geometry)
    elif noise.kind == "rounded":
        own = rounding_floor(noise.scale, queries, geometry)
    if geometry.labels:
        own = label_floor(queries, geometry)
    counted = counting_floor(queries * geometry.positions, geometry.bound)
    # The rounding of the oracle's own numbers is all that is left of defences without a norm limit, since long tokens
    # make any fixed error small, and of answers in a short dtype: one that is nearly zero is rounded by nearly nothing.
    return min(NOTHING, max(geometry.spacing, counted, own))
