"""Plans: descriptions that make the same tokens however they are sliced, under one key per question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
import keyhole.queries as measure
from keyhole.arrays import Space, numpy_space, to_numpy
from keyhole.errors import UsageError
from keyhole.noise import Noise
from keyhole.queries import Plan, Signature, Term, TokenRows, UnitRows, sequences


def simple(**changes: Any) -> Plan:
    """Two positions: a looked-up row, and a sum of two terms."""
    base = {"rows": np.arange(12.0).reshape(4, 3), "index": np.array([0, 2, 1, 3, 3]), "scale": 2.0} | changes
    term = Term(TokenRows(base["rows"]), base["index"], base["scale"])
    own = Term(TokenRows(np.ones((5, 3))))
    positions = base.get("positions", [[term], [own, term]])
    return Plan(base.get("stage", "stage"), base.get("count", 5), positions)


def test_equal_descriptions_have_equal_digests() -> None:
    assert simple().digest == simple().digest
    assert len(simple().digest) == 64
    # What is shown to people, and how often it is asked, is no part of the question.
    assert simple(stage="other").digest == simple().digest
    assert replace(simple(), repeats=3, first_repeat=2).digest == simple().digest


TERM = Term(TokenRows(np.arange(12.0).reshape(4, 3)), np.array([0, 2, 1, 3, 3]), 2.0)
OTHER = Term(TokenRows(np.ones((5, 3))))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": np.arange(12.0).reshape(4, 3) + 1e-15},
        {"rows": np.arange(12.0).reshape(4, 3).astype(np.float32)},
        {"rows": np.arange(12.0).reshape(4, 3)[::-1]},
        {"rows": np.arange(15.0).reshape(5, 3)},
        {"index": np.array([0, 2, 1, 3, 2])},
        {"index": None, "rows": np.arange(15.0).reshape(5, 3)},
        {"scale": np.nextafter(2.0, 3.0)},
        {"scale": -2.0},
        {"scale": np.full(5, 2.0)},
        {"count": 4},
        {"positions": [[TERM]]},
        {"positions": [[OTHER, TERM], [TERM]]},
        {"positions": [[TERM], [TERM, OTHER]]},
        {"positions": [[TERM, OTHER], [TERM]]},
        {"positions": [[TERM], [OTHER], [TERM]]},
        {"positions": [[TERM], [], [OTHER, TERM]]},
        {"positions": [[], [TERM], [OTHER, TERM]]},
    ],
    ids=",".join,
)
def test_every_ingredient_changes_the_digest(changes: dict[str, Any]) -> None:
    assert simple(**changes).digest != simple().digest


def test_all_these_digests_differ() -> None:
    zero = np.zeros((5, 3))
    plans = [
        simple(positions=[[TERM], [OTHER]]),
        simple(positions=[[TERM, OTHER]]),
        simple(positions=[[TERM, OTHER], []]),
        simple(positions=[[], [TERM, OTHER]]),
        simple(positions=[[TERM], [OTHER], []]),
        simple(positions=[[Term(TokenRows(zero))]]),
        simple(positions=[[Term(TokenRows(-zero))]]),  # −0.0 is another token to a box that looks at bits
        simple(positions=[[Term(TokenRows(zero.T.reshape(3, 5)))]]),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_the_version_is_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = simple().digest
    monkeypatch.setattr(measure, "PLAN_VERSION", measure.PLAN_VERSION + 1)
    assert simple().digest != before


def test_a_digest_is_the_same_in_every_run() -> None:
    """A journal of today must be readable tomorrow: raise PLAN_VERSION when this changes on purpose."""
    plan = Plan("value", 2, [[Term(TokenRows(np.eye(2)), np.array([0, 1]), 0.5)]])
    assert measure.PLAN_VERSION == 1
    assert plan.digest == DIGEST


DIGEST = "7b1611b6d973acd25a8ae250cd94ab804733991c35b59868f7bb214e7217e02a"


def test_libraries_agree_on_digests() -> None:
    """The journal is opened by box, and a box has one library; equal numbers still have equal keys."""
    torch = pytest.importorskip("torch")
    rows, index = np.arange(6.0).reshape(3, 2), np.array([2, 0, 1, 1])
    plans = [
        Plan("", 4, [[Term(TokenRows(convert(rows)), convert(index), 0.5)]]) for convert in (np.asarray, torch.asarray)
    ]
    assert plans[0].digest == plans[1].digest


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """Plans of every kind of term, and their width."""
    count, width = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def term() -> Term:
        size = draw(st.integers(1, 40))
        index = rng.integers(0, size, count) if draw(st.booleans()) else None
        rows = rng.standard_normal((count if index is None else size, width))
        scale = draw(st.sampled_from([1.0, 0.3, "each"]))
        return Term(TokenRows(rows), index, rng.standard_normal(count) if scale == "each" else scale)

    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return Plan("any", count, [[term() for _ in range(length)] for length in lengths]), width


def naive(plan: Plan, width: int) -> np.ndarray:
    """Tokens one by one, from the definition."""
    tokens = np.zeros((plan.count, plan.length, width))
    for n in range(plan.count):
        for place, position in enumerate(plan.positions):
            for term in position:
                row = n if term.index is None else term.index[n]
                scale = term.scale if isinstance(term.scale, float) else term.scale[n]
                tokens[n, place] += scale * term.rows.vectors[row]
    return tokens


@given(plans(), st.integers(1, 30), st.booleans())
def test_slices_make_the_same_tokens_as_the_whole(case: tuple[Plan, int], step: int, in_room: bool) -> None:
    plan, width = case
    space = numpy_space()
    whole = plan.tokens(0, plan.count, space, width)
    pieces = []
    for start in range(0, plan.count, step):
        stop = min(start + step, plan.count)
        room = np.full((stop - start) * plan.length * width, np.nan) if in_room else None
        made = plan.tokens(start, stop, space, width, room)
        assert room is None or np.shares_memory(made, room)
        pieces.append(made)
    assert np.concatenate(pieces).tobytes() == whole.tobytes()
    np.testing.assert_array_equal(whole, naive(plan, width))


def test_tokens_are_made_where_the_oracle_lives(like: object) -> None:
    space = Space.of(like)
    rows = space.asarray(np.arange(12.0).reshape(4, 3))
    plan = Plan(
        "",
        6,
        [
            [Term(TokenRows(rows), space.indices([0, 1, 2, 3, 0, 1]), 0.5)],
            [],
            [Term(TokenRows(rows), space.indices([3] * 6))],
        ],
    )
    tokens = plan.tokens(1, 5, space, 3)
    assert Space.of(tokens) == space
    assert tuple(tokens.shape) == (4, 3, 3)
    expected = np.stack([0.5 * to_numpy(rows)[[1, 2, 3, 0]], np.zeros((4, 3)), to_numpy(rows)[[3] * 4]], axis=1)
    np.testing.assert_array_equal(to_numpy(tokens), expected)


def test_the_description_is_not_changed_by_making_tokens() -> None:
    plan = simple()
    before = plan.digest
    tokens = plan.tokens(0, 5, numpy_space(), 3)
    tokens[...] = np.nan
    assert simple().digest == Plan("", 5, plan.positions).digest == before


def test_sequences_ask_exactly_what_they_are_given(like: object) -> None:
    space = Space.of(like)
    tokens = space.asarray(np.random.default_rng(0).standard_normal((5, 3, 4)))
    plan = sequences("these", tokens)
    assert (plan.count, plan.length) == (5, 3)
    np.testing.assert_array_equal(to_numpy(plan.tokens(0, 5, space, 4)), to_numpy(tokens))


# --- noise and signature --------------------------------------------------------------------------------------


def test_noise_radii() -> None:
    assert Noise.exact().radius == 0.0
    assert Noise.bounded(0.2).radius == 0.2
    assert Noise.rounded(3).radius == 0.0005
    assert Noise.rounded(-1).radius == 5.0
    assert Noise.gaussian(2.0).radius >= 8.0


@pytest.mark.parametrize(
    "words", ["rounded:3", "gaussian:0.001", "bounded:0.1", "float32", "bfloat16", "measure", "exact"]
)
def test_noise_is_declared_in_the_words_of_the_command_line(words: str) -> None:
    oracle = kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=2, noise=words)
    assert oracle.signature.noise == Noise.parse(words)
    assert oracle.signature.noise.text == words


@pytest.mark.parametrize("odd", ["loud", "rounded", "gaussian:-1", 3])
def test_words_that_are_no_noise_are_refused(odd: Any) -> None:
    with pytest.raises(UsageError, match="noise"):
        kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=2, noise=odd)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_must_be_a_positive_number(bad: float) -> None:
    for make in (Noise.gaussian, Noise.bounded):
        with pytest.raises(UsageError, match="positive"):
            make(bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 0),
        ("width", 2.5),
        ("width", "8"),
        ("max_norm", 0.0),
        ("max_norm", -1.0),
        ("max_norm", float("nan")),
        ("max_norm", float("inf")),
        ("max_length", 0),
        ("batch_limit", 0),
        ("batch_limit", -3),
        ("positions", "first"),
    ],
)
def test_a_signature_that_cannot_be_meant(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        Signature(**({"width": 3} | {field: value}))


def test_the_norm_limit_leaves_room_for_rounding() -> None:
    assert Signature(width=3).norm_limit == np.inf
    for dtype in (np.float32, np.float64):
        bounded = Signature(width=3, space=Space.of(np.zeros(1, dtype)), max_norm=2.0)
        assert 2.0 * (1 - 100 * np.finfo(dtype).eps) < bounded.norm_limit < 2.0


def test_unit_rows_are_the_rows_of_their_matrix(like: Any) -> None:
    """Whatever part of them is made, and under the key of the matrix itself."""
    space, width = Space.of(like), 5
    dense = TokenRows(space.xp.concat([space.zeros(1, width), 4.0 * space.eye(width)]))
    rows = UnitRows(space, width, 4.0)
    assert rows.count == dense.count == width + 1
    assert rows.digest == dense.digest
    for start in range(width + 1):
        for stop in range(start, width + 2):
            assert np.array_equal(to_numpy(rows.some(start, stop)), to_numpy(dense.some(start, stop)))


def test_a_table_holds_no_rows_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are many numbers on a device: the tokens are the same."""
    torch = pytest.importorskip("torch")
    space = Space.of(torch.ones(1, dtype=torch.float64))
    rng = np.random.default_rng(0)
    rows, few = (TokenRows(space.asarray(rng.standard_normal((9, 4)))) for _ in range(2))
    first, second = (space.indices(rng.integers(low, 9, 20)) for low in (0, 6))
    plan = Plan("few", 20, [[Term(rows, first, 2.0)], [Term(few, second, 0.5)]])
    wanted = plan.tokens(3, 17, space, 4)
    monkeypatch.setattr(measure, "BLOCK_NUMBERS", 1)
    monkeypatch.setattr(Space, "on_cpu", False)
    assert torch.equal(replace(plan).tokens(3, 17, space, 4), wanted)
    assert replace(plan)._table[0].shape[0] < 18
