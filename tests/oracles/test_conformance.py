"""The conformance suite: every oracle of Keyhole passes it, and oracles that misbehave do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array
from keyhole.audit.defences import parse_defence
from keyhole.noise import Noise
from keyhole.oracles import Batched, Budgeted, Cast, Counted, Noisy, Oracle, Rounded, Wrapper
from keyhole.queries import Signature
from keyhole.targets import open_target
from keyhole.testing import OracleConformance, check_oracle
from support.serving import serving
from support.targets import example

WIDTH = 5


def head() -> kh.SingleHead:
    rng = np.random.default_rng(2)
    return kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH), output_bias=np.asarray(0.5))


def plain(**options: Any) -> Oracle:
    return kh.FunctionOracle(head(), width=WIDTH, name="a head", **options)


class TestFunctionOracle(OracleConformance):
    def make(self) -> Oracle:
        return plain()


class TestFunctionOracleWithLimits(OracleConformance):
    def make(self) -> Oracle:
        return plain(max_norm=1.5, max_length=3, batch_limit=4)


class TestAllPositions(OracleConformance):
    def make(self) -> Oracle:
        return kh.FunctionOracle(head().at_all_positions, width=WIDTH, positions="all", name="a head")


class TestSinglePrecision(OracleConformance):
    def make(self) -> Oracle:
        value = np.ones((WIDTH, 2), dtype=np.float32)
        layer = kh.SingleHead(np.eye(WIDTH, dtype=np.float32), value)
        return kh.FunctionOracle(layer, width=WIDTH, like=np.zeros(1, np.float32))


class TestTorchFunction(OracleConformance):
    def make(self) -> Oracle:
        like = example("torch-float64")
        return kh.FunctionOracle(
            lambda tokens: (tokens * tokens).sum(-1).sum(-1), width=WIDTH, like=like, name="squares"
        )


class TestDefended(OracleConformance):
    def make(self) -> Oracle:
        return parse_defence("noise:1e-3+round:2+clip:1").around(plain())


class TestTarget(OracleConformance):
    def make(self) -> Oracle:
        return open_target("demo:multi-head?heads=2&width=5&outputs=3").oracle


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        Counted,
        lambda inner: Budgeted(inner, 10**6),
        lambda inner: Batched(inner, 3),
        lambda inner: Rounded(inner, 3),
        lambda inner: Cast(inner, "float16"),
        lambda inner: Noisy(inner, 0.1, seed=4),
        lambda inner: Rounded(Counted(Batched(inner, 5)), 2),
    ],
    ids=["Wrapper", "Counted", "Budgeted", "Batched", "Rounded", "Cast", "Noisy", "nested"],
)
def test_wrappers_conform(wrap: Any) -> None:
    check_oracle(lambda: wrap(plain()))


@pytest.fixture(scope="class")
def url() -> Iterator[str]:
    with serving(plain()) as server:
        yield server.url


class OverHttp(OracleConformance):
    options: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def served(self, url: str) -> None:
        pytest.importorskip("orjson")
        self.url = url

    def make(self) -> Oracle:
        return kh.HttpOracle(self.url, **self.options)


class TestHttpOracle(OverHttp):
    options = {"binary": True}  # noqa: RUF012


class TestHttpOracleInJson(OverHttp):
    options = {"binary": False}  # noqa: RUF012


class TestHttpOracleInSmallPieces(OverHttp):
    options = {"binary": False, "batch": 2, "connections": 3}  # noqa: RUF012


# --- oracles that misbehave ------------------------------------------------------------------------------------


class Bad(Oracle):
    """Sums of tokens, and something wrong with it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls = 0
        noise = Noise.gaussian(0.5) if fault == "declared" else Noise.exact()
        self.signature = Signature(width=WIDTH, noise=noise)
        self.name = f"{object()!r}" if fault == "name" else "sums"
        self.memory = np.zeros(5000)
        self.rng = np.random.default_rng()

    def answer(self, tokens: Array) -> Array:
        self.calls += 1
        sums = tokens.sum((1, 2))
        if self.fault == "batch":
            return sums - sums.mean()
        if self.fault == "order":
            return sums + np.arange(len(sums))
        if self.fault in ("noise", "declared"):
            return sums + 0.3 * self.rng.standard_normal(len(sums))
        if self.fault == "mutates":
            tokens *= 1.0 + 1e-9
        if self.fault == "view":
            return tokens[:, 0, 0]
        if self.fault == "memory":
            room = self.memory[: len(sums)]
            room[:] = sums + self.calls * 0
            return room
        if self.fault == "shape":
            return sums if tokens.shape[1] == 1 else sums[:, None]
        if self.fault == "zero":
            return sums / (np.abs(sums) > 0)
        return sums

    def close(self) -> None:
        if self.fault == "close":
            del self.memory


def test_an_honest_oracle_passes() -> None:
    check_oracle(Bad)
    check_oracle(lambda: Bad("declared"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("batch", "one by one"),
        ("order", "one by one"),
        ("noise", "declare the noise"),
        ("mutates", "written to its tokens|two oracles"),
        ("view", "changes with the tokens"),
        ("memory", "overwritten|one by one|changes"),
        ("shape", "change their shape"),
        ("name", "address"),
        ("zero", "nan"),
        ("close", "memory"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_misbehaviour_is_found(fault: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        check_oracle(lambda: Bad(fault))
