"""What is known so far: sketches of scores while a run lasts, and pictures of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

import keyhole as kh
from keyhole.live.heatmap import MOST_CELLS, pictures
from keyhole.progress import Silent
from keyhole.queries import Sketch


class Looking(Silent):
    """Takes every sketch it is offered."""

    def __init__(self) -> None:
        self.seen: list[Sketch] = []
        self.discards = 0

    def sketched(self, so_far: Callable[[], Sketch | None]) -> None:
        found = so_far()
        if found is not None:
            self.seen.append(found)

    def discarded(self) -> None:
        self.seen.clear()
        self.discards += 1


@pytest.mark.parametrize("rank", [3, 8])
def test_sketches_are_the_score_on_what_was_read(rng: np.random.Generator, rank: int) -> None:
    """Directions are orthonormal, so that a sketch is a projection of the truth and leaves the rest of its norm."""
    head = kh.SingleHead(rng.standard_normal((8, rank)) @ rng.standard_normal((rank, 8)), rng.standard_normal(8))
    plain = kh.recover(kh.FunctionOracle(head, width=8))
    looking = Looking()
    watched = kh.recover(kh.FunctionOracle(head, width=8), observer=looking)
    assert np.array_equal(watched.params.score, plain.params.score)  # looking changes nothing, to the last bit
    assert watched.stats.stages == plain.stats.stages
    known = [sketch.known for sketch in looking.seen]
    assert known == sorted(known)
    assert known[-1] == 1.0
    assert len(set(known)) >= rank
    whole = np.linalg.norm(head.score) ** 2
    for sketch in looking.seen:
        found = sketch.matrices["score"]
        assert np.linalg.norm(found - head.score) ** 2 + np.linalg.norm(found) ** 2 == pytest.approx(whole, rel=1e-8)
    errors = [sketch.error for sketch in looking.seen if sketch.known < 1]
    assert 0 < max(errors) < 1e-6
    fresh = [list(sketch.heldout) for sketch in looking.seen if sketch.heldout]
    assert all(later[: len(sooner)] == sooner for sooner, later in pairwise(fresh))  # one plan after the other
    assert 0 < max(fresh[-1]) <= watched.certificate.worst_error


def test_sketches_of_a_mistaken_family_are_discarded() -> None:
    rng = np.random.default_rng(5)
    heads = [kh.SingleHead(rng.standard_normal((5, 5)) / 3, rng.standard_normal(5)) for _ in range(2)]
    # A second head so faint that a few queries do not show it is taken for none at first.
    for loudness, mistakes in ((1e-10, 1), (1.0, 0)):
        looking = Looking()
        both = kh.MultiHead([heads[0], kh.SingleHead(heads[1].score, loudness * heads[1].value)])
        result = kh.recover(kh.FunctionOracle(both, width=5), observer=looking)
        assert result.method == "multi-head"
        assert looking.discards == mistakes
        assert list(looking.seen[-1].matrices) == ["score of head 0", "score of head 1"]
    early = [sketch.matrices for sketch in looking.seen if 0.5 < sketch.known < 1][-1]
    for found in (early["score of head 0"], early["score of head 1"]):  # on a hyperplane of its last tokens
        rests = [np.linalg.svdvals(found - head.score) for head in heads]
        assert min(rest[1] for rest in rests) < 1e-6


def test_pictures_are_small_and_keep_what_stands_out() -> None:
    matrix = np.zeros((700, 300))
    matrix[650, 200] = -4.0
    matrix[0, 0] = 2.0
    matrix[5, 5] = np.nan
    (drawn,) = pictures({"score": matrix})
    assert (drawn["shape"], drawn["cells"], drawn["largest"]) == ([700, 300], [MOST_CELLS, MOST_CELLS], 4.0)
    (empty,) = pictures({"nothing": np.zeros((0, 3))})
    assert (empty["cells"], empty["data"]) == ([0, 3], "")
