"""PyTorch modules as black boxes: read where they are told to, refused with a remedy where they cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, to_numpy
from keyhole.errors import NonFiniteAnswer, OracleRaised, UsageError, WrongShape
from keyhole.families.torch_layouts import heads_of
from keyhole.noise import Noise
from keyhole.oracles import Counted
from keyhole.targets import open_target

torch = pytest.importorskip("torch")
nn: Any = torch.nn
WIDTH = 6


def attention(heads: int = 1, *, batch_first: bool = True, seed: int = 0, width: int = WIDTH) -> Any:
    """A layer with biases, ready to be asked."""
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(width, heads, batch_first=batch_first).double().eval()
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.bias)
    return layer


def question(batch: int = 5, length: int = 4, width: int = WIDTH, dtype: Any = torch.float64) -> Any:
    return torch.asarray(np.random.default_rng(1).standard_normal((batch, length, width))).to(dtype)


class Module(nn.Module):  # type: ignore[misc]
    """A module that is one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, tokens: Array) -> Any:
        return self.function(tokens)


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_taken_as_it_is(batch_first: bool) -> None:
    layer, tokens = attention(2, batch_first=batch_first), question()
    rows = tokens if batch_first else tokens.transpose(0, 1)
    with torch.no_grad():
        outputs = layer(rows, rows, rows)[0]
    outputs = outputs if batch_first else outputs.transpose(0, 1)
    last, every = kh.TorchOracle(layer), kh.TorchOracle(layer, positions="all")
    assert last.signature.width == WIDTH
    assert last.batch_first is batch_first
    torch.testing.assert_close(last(tokens), outputs[:, -1], rtol=0, atol=1e-14)
    torch.testing.assert_close(every(tokens), outputs, rtol=0, atol=1e-14)
    assert (last.signature.positions, every.signature.positions) == ("last", "all")
    assert not last(tokens).requires_grad
    np.testing.assert_array_equal(to_numpy(last(to_numpy(tokens))), to_numpy(last(tokens)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layers_are_taken_as_they_are(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=9, batch_first=batch_first).double()
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for module in (layer.eval(), stack.eval()):
        tokens = question()
        with torch.no_grad():
            outputs = module(tokens) if batch_first else module(tokens.transpose(0, 1)).transpose(0, 1)
        oracle = kh.TorchOracle(module)
        torch.testing.assert_close(oracle(tokens), outputs[:, -1], rtol=0, atol=1e-13)
        assert oracle.signature.width == WIDTH


@pytest.mark.parametrize("place", [0, 1, -1, -2])
def test_the_last_token_of_a_question_goes_where_the_output_is_read(place: int) -> None:
    """Attention does not mind the order, so reading elsewhere is the same box; a sum with places is not."""
    layer, tokens = attention(2), question()
    expected = kh.TorchOracle(layer)(tokens)
    torch.testing.assert_close(kh.TorchOracle(layer, positions=place)(tokens), expected, rtol=0, atol=1e-14)
    seen: list[Any] = []
    oracle = kh.TorchOracle(Module(lambda tokens: seen.append(tokens) or tokens), WIDTH, positions=place)
    torch.testing.assert_close(oracle(tokens), tokens[:, -1])
    rest = [number for number in range(4) if number != place % 4]
    torch.testing.assert_close(seen[-1][:, rest], tokens[:, :-1])


def test_a_position_that_a_sequence_does_not_have() -> None:
    oracle = kh.TorchOracle(attention(), positions=2)
    assert oracle(question(length=3)).shape == (5, WIDTH)
    with pytest.raises(WrongShape, match=r"position 2 is read, but a sequence has 1 token: .*'last', 0 or 'all'"):
        oracle(question(length=1))


def test_one_row_per_sequence_needs_no_position() -> None:
    tokens = question()
    for function, expected in (
        (lambda tokens: tokens.sum((1, 2)), tokens.sum((1, 2))),
        (lambda tokens: tokens.mean(1), tokens.mean(1)),
        (lambda tokens: tokens.sum(2), tokens[:, -1].sum(1)),  # one number per token
    ):
        torch.testing.assert_close(kh.TorchOracle(Module(function), WIDTH)(tokens), expected)
    with pytest.raises(UsageError, match="one answer per sequence, not one per position"):
        kh.TorchOracle(Module(lambda tokens: tokens.mean(1)), WIDTH, positions="all")
    later = kh.TorchOracle(Module(lambda tokens: tokens.mean(0)), WIDTH)  # (length, batch, width) to (batch, width)
    assert not later.batch_first
    torch.testing.assert_close(later(tokens), tokens.mean(1))


def test_dtype_and_device_are_those_of_the_module_unless_told() -> None:
    layer = attention().float()
    assert kh.TorchOracle(layer)(question(dtype=torch.float32)).dtype == torch.float32
    wide = kh.TorchOracle(layer, dtype="float64", device="cpu")
    assert wide.signature.space.dtype == torch.float64
    assert wide.module is not layer
    assert layer.in_proj_weight.dtype == torch.float32  # a copy was made
    assert kh.TorchOracle(layer).module is layer
    half = kh.TorchOracle(layer, dtype=torch.float16)
    assert half.signature.space.eps == torch.finfo(torch.float16).eps
    answers = half(question(dtype=torch.float32))
    assert answers.dtype == torch.float32
    torch.testing.assert_close(answers, kh.TorchOracle(layer)(question(dtype=torch.float32)), rtol=0, atol=1e-2)


def test_a_name_tells_boxes_apart() -> None:
    """The weights of 2 heads and of 3 have the same shapes; the name is what keeps their journals apart."""
    one, two = attention(2), attention(3)
    two.load_state_dict(one.state_dict())
    layers = [one, two, attention(2, seed=1), attention(2, batch_first=False)]
    names = [kh.TorchOracle(layer).name for layer in layers] + [kh.TorchOracle(one, positions=0).name]
    assert len(set(names)) == len(names)
    assert kh.TorchOracle(attention(2)).name == names[0]
    assert names[0].startswith("MultiheadAttention ")
    assert kh.TorchOracle(one, name="mine").name == "mine"
    asked = kh.TorchOracle(one, WIDTH, call=half_attention)
    assert asked.name == f"{names[0]} by half_attention"


def half_attention(module: Any, tokens: Array) -> Array:
    return 0.5 * module(tokens, tokens, tokens)[0]


def test_options_reach_the_signature() -> None:
    oracle = kh.TorchOracle(attention(), max_norm=0.1, max_length=2, noise=Noise.rounded(3), batch_limit=7)
    signature = oracle.signature
    assert (signature.max_norm, signature.max_length, signature.batch_limit) == (0.1, 2, 7)
    assert signature.noise == Noise.rounded(3)


# --- recovery ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["last", "all", 0])
def test_one_head_of_torch_is_recovered(positions: Any) -> None:
    layer = attention()
    oracle = Counted(kh.TorchOracle(layer, positions=positions))
    result = kh.recover(oracle)
    assert kh.distance(result.params, heads_of(layer)) <= 1e-10
    assert oracle.queries == result.stats.new_queries


@pytest.mark.parametrize("positions", ["last", "all"])
@pytest.mark.parametrize("biases", [0.0, 1.0])
@pytest.mark.parametrize("width", [6, 16])
def test_error_bars_cover_layers_that_store_factors(width: int, biases: float, positions: Any, fresh_seed: int) -> None:
    """Values are products of two matrices: an entry is rounded as much as its largest term, however small it is."""
    torch.manual_seed(fresh_seed)
    layer = nn.MultiheadAttention(width, 1, batch_first=True).double().eval()
    for bias in (layer.in_proj_bias, layer.out_proj.bias):
        nn.init.normal_(bias, std=biases)
    result = kh.recover(kh.TorchOracle(layer, positions=positions))
    [head], bias = heads_of(layer).heads, heads_of(layer).output_bias
    truth = {"score": head.score, "value": head.value, "score_bias": head.score_bias, "output_bias": bias}
    for name, array in truth.items():
        found, radius = (getattr(each, name) for each in (result.params, result.certificate.radius))
        if array is not None:
            assert np.all(np.abs(to_numpy(found) - array) <= to_numpy(radius)), name


@pytest.mark.parametrize("positions", ["last", "all"])
def test_one_head_of_float32_is_read_from_all_its_outputs(positions: Any) -> None:
    """What is read logit by logit has bars as wide as the answers; all outputs together tell more."""
    layer = attention(1, width=32, seed=1).float()
    result = kh.recover(kh.TorchOracle(layer, positions=positions))
    assert isinstance(result.params, kh.SingleHead)
    assert isinstance(result.certificate.radius, kh.SingleHead)
    tokens = question(20, 30, 32)
    with torch.no_grad():
        exact = to_numpy(layer.double()(tokens, tokens, tokens)[0][:, -1])
    assert np.max(np.abs(result.params(to_numpy(tokens)) - exact)) <= 1e-3 * np.max(np.abs(exact))


@pytest.mark.parametrize("seed", range(4))
def test_all_attempts_are_counted(seed: int) -> None:
    """However many methods were tried, what was asked is what is said to have been asked."""
    layer = attention(1 + seed % 2, width=8, seed=seed).float()
    counted = Counted(kh.TorchOracle(layer))
    stats = kh.recover(counted, throw=False).stats
    assert counted.queries == stats.queries + stats.heldout_queries == stats.new_queries
    assert sum(stats.stages.values()) == stats.queries


def test_two_heads_are_not_taken_for_one() -> None:
    assert not kh.recover(kh.TorchOracle(attention(2)), throw=False, method="single-head").certified


# --- refused, with the remedy -----------------------------------------------------------------------------------


class NeedsMask(nn.Module):  # type: ignore[misc]
    def forward(self, tokens: Array, mask: Array) -> Array:
        return tokens * mask


class WantsMask(nn.Module):  # type: ignore[misc]
    def forward(self, tokens: Array, mask: Array | None = None) -> Array:
        if mask is None:
            raise ValueError("no mask given")
        return tokens * mask


def half_trained() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 1, dropout=0.1)
    layer.eval()
    layer.dropout1.train()
    return layer


REFUSED: list[tuple[str, Any, dict[str, Any], type[kh.KeyholeError], str]] = [
    ("train mode", lambda: nn.MultiheadAttention(WIDTH, 1), {}, UsageError, r"train mode.*call module\.eval\(\) first"),
    ("train mode of a part", half_trained, {}, UsageError, r"train mode \(its part dropout1\).*module\.eval\(\)"),
    ("no module", lambda: abs, {}, UsageError, "must be a torch.nn.Module, not builtin"),
    ("no width", lambda: nn.Linear(3, 3).eval(), {}, UsageError, "give width="),
    ("another width", lambda: nn.Linear(3, 3).eval(), {"width": 4}, UsageError, "width 4: .*Is the width right"),
    ("a tuple", lambda: nn.LSTM(6, 3).eval(), {"width": 6}, WrongShape, r"a tuple of 2.*call=.*\[0\]"),
    ("a dict", lambda: Module(lambda x: {"y": x}), {"width": 6}, WrongShape, "a dict of 1.*call="),
    ("other lengths", lambda: nn.Flatten().eval(), {"width": 6}, WrongShape, "one row of outputs per token"),
    ("a cut length", lambda: Module(lambda x: x[:, 1:]), {"width": 6}, WrongShape, r"must answer \(2, 3, outputs\)"),
    ("a number", lambda: Module(lambda x: x.sum()), {"width": 6}, WrongShape, "one row per sequence"),
    ("a needed mask", lambda: NeedsMask().eval(), {"width": 6}, UsageError, r"wants mask besides tokens.*mask=\.\.\."),
    ("a wanted mask", lambda: WantsMask().eval(), {"width": 6}, UsageError, "no mask given.*such as a mask.*call="),
    ("a missing device", attention, {"device": "cuda:99"}, UsageError, "no device 'cuda:99' here.*use one of cpu"),
    ("no such device", attention, {"device": "gpu"}, UsageError, "no device 'gpu' here.*use one of cpu"),
    ("no weights", lambda: attention().to("meta"), {}, UsageError, "device meta, without weights"),
    ("a whole dtype", attention, {"dtype": "int64"}, UsageError, "dtype must be one of float64"),
    ("no dtype", attention, {"dtype": 3}, UsageError, "dtype must be one of float64"),
    ("no position", attention, {"positions": "first"}, UsageError, "'last', 'all' or the number"),
    ("no call", attention, {"call": 3}, UsageError, "call must be a function"),
    (
        "wrong order",
        attention,
        {"batch_first": False},
        UsageError,
        "others are in its batch.*say so of a module .batch_first=False.*export it",
    ),
    ("mixing", lambda: Module(lambda x: x - x.mean((0, 1))), {"width": 6}, UsageError, "others are in its batch"),
    (
        "dropout that stays on",
        lambda: Module(lambda tokens: nn.functional.dropout(tokens, 0.5)),
        {"width": 6},
        UsageError,
        "differently each time: switch off dropout",
    ),
    (
        "cross-attention",
        lambda: nn.MultiheadAttention(6, 1, kdim=4, vdim=4).eval(),
        {},
        UsageError,
        "no self-attention",
    ),
]


@pytest.mark.parametrize(("make", "options", "kind", "said"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_a_remedy(make: Any, options: dict[str, Any], kind: type[kh.KeyholeError], said: str) -> None:
    with pytest.raises(kind, match=f"(?s){said}"):
        kh.TorchOracle(make(), **options)


def test_the_remedies_work() -> None:
    tokens = question()
    lstm = nn.LSTM(WIDTH, 3, batch_first=True).double().eval()
    with torch.no_grad():
        expected = lstm(tokens)[0][:, -1]
    torch.testing.assert_close(kh.TorchOracle(lstm, WIDTH, call=lambda box, x: box(x)[0])(tokens), expected)
    masked = kh.TorchOracle(NeedsMask().eval(), WIDTH, call=lambda box, x: box(x, mask=2.0))
    torch.testing.assert_close(masked(tokens), 2 * tokens[:, -1])
    noisy = Module(lambda tokens: tokens + 0.1 * torch.randn_like(tokens))
    assert kh.TorchOracle(noisy, WIDTH, noise=Noise.gaussian(0.1))(tokens).shape == (5, WIDTH)


def test_a_module_that_changes_later_is_noticed() -> None:
    layer = attention()
    oracle = kh.TorchOracle(layer)
    layer.train()
    with pytest.raises(UsageError, match="train mode"):
        oracle(question())
    answers = iter([*[None] * 4, ValueError("late"), torch.nan])

    def box(tokens: Array) -> Array:
        change = next(answers, None)
        if isinstance(change, Exception):
            raise change
        return tokens if change is None else tokens * change

    oracle = kh.TorchOracle(Module(box), WIDTH)
    with pytest.raises(OracleRaised, match="ValueError: late"):
        oracle(question())
    with pytest.raises(NonFiniteAnswer):
        oracle(question())


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"TorchOracle needs torch .*pip install 'keyhole\[torch\]'"):
        kh.TorchOracle(object())


# --- on the command line ----------------------------------------------------------------------------------------

BOX = """
import torch

def layer(training=False):
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(6, 1).double().train(training)

def fresh():
    return layer(training=True)

def wide():
    return torch.nn.Linear(3, 3).eval()
"""


def test_a_python_target_may_return_a_module(tmp_path: Path) -> None:
    path = tmp_path / "box.py"
    path.write_text(BOX)
    target = open_target(f"python:{path}:layer")
    assert target.oracle.signature.width == WIDTH
    assert "MultiheadAttention" in target.oracle.name
    assert kh.recover(target.oracle).certified
    for factory, said in (("fresh", "train mode"), ("wide", "width=")):
        with pytest.raises(UsageError, match=said):
            open_target(f"python:{path}:{factory}")
