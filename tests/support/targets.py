"""Boxes to recover: random heads whose facts are known, and boxes that are no head at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import keyhole as kh
from keyhole.arrays import Array, Space, namespace, to_numpy
from keyhole.oracles import Counted

Floats = npt.NDArray[np.float64]
Random = np.random.Generator

# Where a box may live: array library and dtype.
LIBRARIES = ("numpy-float64", "torch-float64", "numpy-float32", "torch-float32")


def example(library: str) -> Array:
    """An example array for the `like` argument; skips the test where the library is missing."""
    name, dtype = library.split("-")
    if name == "numpy":
        return np.zeros(1, dtype)
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # tests share the machine's cores among themselves
    return torch.zeros(1, dtype=getattr(torch, dtype))


# --- score matrices -------------------------------------------------------------------------------------------


def orthogonal(rng: Random, d: int) -> Floats:
    basis, triangle = np.linalg.qr(rng.standard_normal((d, d)))
    return basis * np.sign(np.diag(triangle))


def of_norm(matrix: Floats, norm: float) -> Floats:
    """The matrix scaled to a spectral norm."""
    return matrix * (norm / np.linalg.norm(matrix, 2))


def gaussian(rng: Random, d: int, norm: float = 1.0) -> Floats:
    return of_norm(rng.standard_normal((d, d)), norm)


def cauchy(rng: Random, d: int) -> Floats:
    return rng.standard_cauchy((d, d))


def log_normal(rng: Random, d: int) -> Floats:
    """exp(5·N) with random signs: a few entries are all there is to see."""
    return np.exp(5 * rng.standard_normal((d, d))) * rng.choice([-1.0, 1.0], (d, d))


def graded(rng: Random, d: int, condition: float) -> Floats:
    """Singular values from one down to 1/condition."""
    return orthogonal(rng, d) * np.geomspace(1.0, 1.0 / condition, d) @ orthogonal(rng, d)


def of_rank(rng: Random, d: int, rank: int, norm: float = 1.0) -> Floats:
    return of_norm(rng.standard_normal((d, rank)) @ rng.standard_normal((rank, d)), norm)


def single_entry(rng: Random, d: int) -> Floats:
    matrix = np.zeros((d, d))
    matrix[rng.integers(d), rng.integers(d)] = rng.standard_normal()
    return matrix


# --- value vectors --------------------------------------------------------------------------------------------


def normal_value(rng: Random, d: int) -> Floats:
    return rng.standard_normal(d)


def one_hot(rng: Random, d: int) -> Floats:
    value = np.zeros(d)
    value[rng.integers(d)] = rng.standard_normal()
    return value


def decades(rng: Random, d: int, count: int = 12) -> Floats:
    """Magnitudes spread evenly over so many decades."""
    return rng.permutation(np.geomspace(10.0 ** (-count / 2), 10.0 ** (count / 2), d)) * rng.choice([-1, 1], d)


# --- value matrices -------------------------------------------------------------------------------------------


def graded_matrix(rng: Random, d: int, p: int, condition: float) -> Floats:
    """Singular values from one down to 1/condition."""
    few = min(d, p)
    return orthogonal(rng, d)[:, :few] * np.geomspace(1.0, 1.0 / condition, few) @ orthogonal(rng, p)[:few]


def matrix_of_rank(rng: Random, d: int, p: int, rank: int) -> Floats:
    return rng.standard_normal((d, rank)) @ rng.standard_normal((rank, p))


def one_hot_columns(rng: Random, d: int, p: int) -> Floats:
    """Every output looks at one entry of the token; two may look at the same."""
    value = np.zeros((d, p))
    value[rng.integers(d, size=p), np.arange(p)] = rng.standard_normal(p)
    return value


# --- biases ----------------------------------------------------------------------------------------------------


def bias(rng: Random, d: int, norm: float) -> Floats:
    direction = rng.standard_normal(d)
    return direction * (norm / np.linalg.norm(direction))


# --- oracles --------------------------------------------------------------------------------------------------


def head_in(
    space: Space,
    score: Floats,
    value: Floats,
    score_bias: Floats | None = None,
    output_bias: float | Floats | None = None,
) -> kh.SingleHead:
    """A head whose parameters are numbers of the space, so that the truth is what the box holds."""
    return kh.SingleHead(
        space.asarray(score),
        space.asarray(value),
        None if score_bias is None else space.asarray(score_bias),
        None if output_bias is None else space.asarray(output_bias),
    )


def small_oracle(seed: int = 0) -> tuple[Counted, kh.SingleHead]:
    """An oracle of width 4 that counts its questions, and the head behind it."""
    rng = np.random.default_rng(seed)
    head = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))
    return Counted(kh.FunctionOracle(head, width=4, name=f"head {seed}")), head


def plain(head: kh.SingleHead) -> kh.SingleHead:
    """The same head as NumPy float64 arrays."""
    return kh.SingleHead(**{name: to_numpy(array).astype(np.float64) for name, array in head.arrays().items()})


def misses(found: kh.SingleHead, truth: kh.SingleHead, radius: kh.SingleHead) -> dict[str, float]:
    """For every part with an entry outside its radius, without any slack: by how many radii. A missing part is zero."""
    named = {}
    for name, bar in plain(radius).arrays().items():
        parts = (plain(head).arrays().get(name, np.zeros(bar.shape)) for head in (found, truth))
        error = np.abs(np.subtract(*parts))
        if not np.all(error <= bar):  # also where something is nan
            with np.errstate(divide="ignore", invalid="ignore"):
                named[name] = float(np.max(np.where(error <= bar, 0.0, error / bar)))
    return named


def right_or_admitted(result: kh.Recovery, truth: kh.SingleHead, situation: object) -> bool:
    """True when certified. Fails when certified and wrong, or when it fails without a word."""
    if not result.certified:
        assert result.message
        return False
    missed = misses(result.params, truth, result.certificate.radius)
    assert not missed, f"certified, but outside the radius by so many radii: {missed}, in {situation}"
    return True


def causal(head: kh.SingleHead) -> Callable[[Array], Array]:
    """The head at every position, each seeing no further than itself."""

    def box(tokens: Array) -> Array:
        xp = namespace(tokens)
        return xp.stack([head(tokens[:, : last + 1, :]) for last in range(tokens.shape[1])], axis=1)

    return box


def quiet(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A box at the ends of its dtype that overflows without a word, so that whoever warns is the learner."""

    def box(tokens: Array) -> Array:
        with np.errstate(all="ignore"):
            return function(tokens)

    return box


class Spy:
    """A function that remembers the longest token and the largest batch it was asked."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function = function
        self.longest = 0.0
        self.largest_batch = 0
        self.largest_bytes = 0

    def __call__(self, tokens: Array) -> Array:
        exact = to_numpy(tokens).astype(np.longdouble)
        self.longest = max(self.longest, np.sqrt(np.sum(exact**2, axis=-1)).max())
        self.largest_batch = max(self.largest_batch, len(exact))
        self.largest_bytes = max(self.largest_bytes, to_numpy(tokens).nbytes)
        return self.function(tokens)


# --- boxes of other families ----------------------------------------------------------------------------------
# Each takes (rng, width, space) and returns a function of tokens (batch, length, width).

Box = Callable[[Array], Any]


def softmax(xp: Any, logits: Array) -> Array:
    weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def _head(rng: Random, d: int, space: Space) -> kh.SingleHead:
    return head_in(space, gaussian(rng, d), normal_value(rng, d))


def two_heads(rng: Random, d: int, space: Space) -> Box:
    first, second = _head(rng, d, space), _head(rng, d, space)
    return lambda tokens: first(tokens) + second(tokens)


def faint_second_head(rng: Random, d: int, space: Space) -> Box:
    """A second head a million times fainter, which only a sharp error bar can see."""
    first, second = _head(rng, d, space), _head(rng, d, space)
    return lambda tokens: first(tokens) + 1e-6 * second(tokens)


def relu_net(rng: Random, d: int, space: Space) -> Box:
    into, bias, out = space.normal(rng, d, 2 * d), space.normal(rng, 2 * d), space.normal(rng, 2 * d)
    return lambda tokens: space.xp.clip(tokens[:, -1, :] @ into + bias, min=0.0) @ out


def hashed(rng: Random, d: int, space: Space) -> Box:
    """A random function: the same question has the same answer, and nothing else can be said."""
    salt = rng.bytes(8)

    def box(tokens: Array) -> Array:
        plain_tokens = np.ascontiguousarray(to_numpy(tokens))
        digests = [hashlib.sha256(salt + sequence.tobytes()).digest() for sequence in plain_tokens]
        return space.asarray([int.from_bytes(digest[:4], "big") / 2**32 - 0.5 for digest in digests])

    return box


def positional(rng: Random, d: int, space: Space) -> Box:
    """Attention that also likes later places."""
    head = _head(rng, d, space)

    def box(tokens: Array) -> Array:
        xp = space.xp
        logits = xp.vecdot(tokens, (tokens[:, -1, :] @ head.score.T)[:, None, :])
        places = space.asarray(np.arange(tokens.shape[1]))
        return xp.vecdot(softmax(xp, logits + 0.3 * places), tokens @ head.value)

    return box


def residual(rng: Random, d: int, space: Space) -> Box:
    """A head beside a skip connection from the last token."""
    head, skip = _head(rng, d, space), space.normal(rng, d)
    return lambda tokens: head(tokens) + tokens[:, -1, :] @ skip


def mean_and_square(rng: Random, d: int, space: Space) -> Box:
    """Tokens averaged without a softmax, plus a quadratic term."""
    value = space.normal(rng, d)
    return lambda tokens: (overlap := space.xp.mean(tokens, axis=1) @ value) + overlap**2


def last_token_only(rng: Random, d: int, space: Space) -> Box:
    value = space.normal(rng, d)
    return lambda tokens: tokens[:, -1, :] @ value


def hard_attention(rng: Random, d: int, space: Space) -> Box:
    """All weight on the token of the largest logit."""
    head = _head(rng, d, space)

    def box(tokens: Array) -> Array:
        xp = space.xp
        logits = xp.vecdot(tokens, (tokens[:, -1, :] @ head.score.T)[:, None, :])
        best = logits == xp.max(logits, axis=-1, keepdims=True)
        return xp.sum(xp.where(best, tokens @ head.value, space.zeros(1)), axis=-1)

    return box


def short_memory(rng: Random, d: int, space: Space) -> Box:
    """A head that sees two tokens only: exactly what two-token questions cannot tell."""
    head = _head(rng, d, space)
    return lambda tokens: head(tokens[:, -2:, :])


OUTPUTS = 4


def _vector_head(rng: Random, d: int, space: Space) -> kh.SingleHead:
    return head_in(space, gaussian(rng, d), rng.standard_normal((d, OUTPUTS)))


def two_vector_heads(rng: Random, d: int, space: Space) -> Box:
    first, second = _vector_head(rng, d, space), _vector_head(rng, d, space)
    return lambda tokens: first(tokens) + second(tokens)


def faint_second_vector_head(rng: Random, d: int, space: Space) -> Box:
    first, second = _vector_head(rng, d, space), _vector_head(rng, d, space)
    return lambda tokens: first(tokens) + 1e-6 * second(tokens)


def heads_beside_each_other(rng: Random, d: int, space: Space) -> Box:
    """Every output has a softmax of its own."""
    heads = [_head(rng, d, space) for _ in range(OUTPUTS)]
    return lambda tokens: space.xp.stack([head(tokens) for head in heads], axis=1)


def one_output_apart(rng: Random, d: int, space: Space) -> Box:
    """One output of several has a softmax of its own."""
    head, last = _vector_head(rng, d, space), _head(rng, d, space)
    return lambda tokens: space.xp.concat([head(tokens), last(tokens)[:, None]], axis=1)


def relu_on_top(rng: Random, d: int, space: Space) -> Box:
    """A layer of rectified neurons reads the outputs of the head."""
    head, hidden = _vector_head(rng, d, space), 2 * OUTPUTS
    into, bias, out = space.normal(rng, OUTPUTS, hidden), space.normal(rng, hidden), space.normal(rng, hidden, OUTPUTS)
    return lambda tokens: space.xp.clip(head(tokens) @ into + bias, min=0.0) @ out


def relu_beside(rng: Random, d: int, space: Space) -> Box:
    """The same with a skip connection around the neurons."""
    head, hidden = _vector_head(rng, d, space), 2 * OUTPUTS
    into, bias, out = space.normal(rng, OUTPUTS, hidden), space.normal(rng, hidden), space.normal(rng, hidden, OUTPUTS)
    return lambda tokens: (seen := head(tokens)) + space.xp.clip(seen @ into + bias, min=0.0) @ out


def tanh_on_top(rng: Random, d: int, space: Space) -> Box:
    head = _vector_head(rng, d, space)
    return lambda tokens: space.xp.tanh(head(tokens))


def skip_to_outputs(rng: Random, d: int, space: Space) -> Box:
    head, skip = _vector_head(rng, d, space), space.normal(rng, d, OUTPUTS)
    return lambda tokens: head(tokens) + tokens[:, -1, :] @ skip


def normed_tokens(rng: Random, d: int, space: Space) -> Box:
    """A head that reads tokens of norm one, as behind a layer norm."""
    head = _vector_head(rng, d, space)

    def box(tokens: Array) -> Array:
        norms = space.xp.linalg.vector_norm(tokens, axis=-1, keepdims=True)
        return head(tokens / space.xp.where(norms > 0, norms, space.xp.ones_like(norms)))

    return box


# --- boxes of other families, observed at all positions --------------------------------------------------------


def placed_everywhere(rng: Random, d: int, space: Space) -> Box:
    """Every place has an encoding, which is added to its token."""
    head, places = _vector_head(rng, d, space), space.normal(rng, 2**10, d)
    return lambda tokens: head.at_all_positions(tokens + places[: tokens.shape[1], :])


def near_everywhere(rng: Random, d: int, space: Space) -> Box:
    """Attention that fades with the distance of two places."""
    head = _vector_head(rng, d, space)

    def box(tokens: Array) -> Array:
        xp, places = space.xp, np.arange(tokens.shape[1])
        logits = tokens @ head.score @ xp.matrix_transpose(tokens)  # (batch, key token, last token)
        logits = logits - 0.3 * space.asarray(np.abs(places[:, None] - places[None, :]))
        return softmax(xp, xp.matrix_transpose(logits)) @ (tokens @ head.value)

    return box


def rotated_everywhere(rng: Random, d: int, space: Space) -> Box:
    """Tokens are rotated by an angle that grows with their place before they meet, as rotary encodings do."""
    head = _vector_head(rng, d, space)

    def box(tokens: Array) -> Array:
        xp, half = space.xp, d // 2
        angles = space.asarray(np.arange(tokens.shape[1]))[:, None] * 0.5
        cos, sin = xp.cos(angles), xp.sin(angles)
        first, second, rest = tokens[..., :half], tokens[..., half : 2 * half], tokens[..., 2 * half :]
        turned = xp.concat([cos * first - sin * second, sin * first + cos * second, rest], axis=-1)
        logits = turned @ head.score @ xp.matrix_transpose(turned)
        return softmax(xp, xp.matrix_transpose(logits)) @ (tokens @ head.value)

    return box


def two_heads_everywhere(rng: Random, d: int, space: Space) -> Box:
    first, second = _vector_head(rng, d, space), _vector_head(rng, d, space)
    return lambda tokens: first.at_all_positions(tokens) + second.at_all_positions(tokens)


def relu_everywhere(rng: Random, d: int, space: Space) -> Box:
    head = _vector_head(rng, d, space)
    return lambda tokens: space.xp.clip(head.at_all_positions(tokens), min=0.0)


def skip_everywhere(rng: Random, d: int, space: Space) -> Box:
    head, skip = _vector_head(rng, d, space), space.normal(rng, d, OUTPUTS)
    return lambda tokens: head.at_all_positions(tokens) + tokens @ skip


def window_everywhere(rng: Random, d: int, space: Space) -> Box:
    """Every position sees itself and its neighbours only."""
    head = _vector_head(rng, d, space)

    def box(tokens: Array) -> Array:
        xp, places = space.xp, np.arange(tokens.shape[1])
        logits = tokens @ head.score @ xp.matrix_transpose(tokens)
        far = space.asarray((np.abs(places[:, None] - places[None, :]) > 2).astype(np.float64))
        return softmax(xp, xp.matrix_transpose(xp.where(far > 0, space.full((1,), -xp.inf), logits))) @ (
            tokens @ head.value
        )

    return box


# --- boxes that misbehave -------------------------------------------------------------------------------------


def never_twice_the_same(rng: Random, d: int, space: Space) -> Box:
    head = _head(rng, d, space)
    return lambda tokens: head(tokens) * (1 + 1e-3 * space.normal(rng, tokens.shape[0]))


def all_noise(rng: Random, d: int, space: Space) -> Box:
    return lambda tokens: space.normal(rng, tokens.shape[0])


def answering(change: Callable[[Array, int], Any]) -> Callable[[Random, int, Space], Box]:
    """A head whose answers `change(answers, call number)` spoils."""

    def build(rng: Random, d: int, space: Space) -> Box:
        head, calls = _head(rng, d, space), iter(range(10**9))
        return lambda tokens: change(head(tokens), next(calls))

    return build


def _with_one(answers: Array, number: float) -> Array:
    answers = namespace(answers).asarray(answers, copy=True)
    answers[-1] = number
    return answers


def _raise(message: str) -> Any:
    raise RuntimeError(message)


SECOND_THOUGHTS = 3  # calls a box behaves for before it does not

nan_at_once = answering(lambda answers, call: answers * float("nan"))
nan_later = answering(lambda answers, call: answers if call < SECOND_THOUGHTS else _with_one(answers, float("nan")))
inf_later = answering(lambda answers, call: answers if call < SECOND_THOUGHTS else _with_one(answers, float("inf")))
wrong_shape = answering(lambda answers, call: answers[:-1])
one_number = answering(lambda answers, call: answers[0])
deep_shape = answering(lambda answers, call: answers[:, None, None])
changing_shape = answering(lambda answers, call: answers if call < SECOND_THOUGHTS else answers[:, None])
a_list = answering(lambda answers, call: to_numpy(answers).tolist())
nothing = answering(lambda answers, call: None)
raising = answering(lambda answers, call: answers if call < SECOND_THOUGHTS else _raise("CUDA out of memory"))
