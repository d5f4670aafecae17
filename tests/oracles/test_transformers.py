"""Layers of transformers models as black boxes, and whole models layer by layer: tiny random ones, from disk."""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import to_numpy
from keyhole.cli import main
from keyhole.errors import FileError, UsageError
from keyhole.families.forms import Rotary
from keyhole.families.projections import factored
from keyhole.families.torch_layouts import heads_of, weights_of
from keyhole.methods import METHODS
from keyhole.oracles.transformers.places import attention_in
from keyhole.recover_model import load_layers, load_weights
from keyhole.targets import open_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from benchmarks.support.architectures import ARCHITECTURES, random_model  # noqa: E402
from benchmarks.support.architectures import WIDTH as ARCHITECTURE_WIDTH  # noqa: E402
from support.transformers_models import HEADS, IDS, KINDS, WIDTH, made, model_of  # noqa: E402 - imports PyTorch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        model_of(kind).save_pretrained(root / kind)
    return root


@pytest.fixture
def bert(folders: Path, tmp_path: Path) -> Path:
    """A folder with a model, to be spoilt."""
    for file in (folders / "bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def tokens(batch: int = 4, length: int = 5) -> Any:
    return torch.asarray(np.random.default_rng(2).standard_normal((batch, length, WIDTH)))


def inside(model: Any, layer: Any) -> tuple[Any, Any]:
    """What a layer of a model was given and what it answered, when the model itself was used."""
    seen: list[Any] = []
    hook = layer.register_forward_hook(
        lambda _module, args, given, outputs: seen.append((args or (given["hidden_states"],), outputs)),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(input_ids=IDS)
    hook.remove()
    (vectors, *_), outputs = seen[0]
    return vectors, outputs[0] if isinstance(outputs, tuple) else outputs


# --- one layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_answers_as_it_does_in_its_model(kind: str, layer: int) -> None:
    """Mask, rotary positions, residual and normalisation are those of the model's own code."""
    model = model_of(kind)
    place = attention_in(model)[layer]
    for part, module in (("layer", place.layer), ("attention-block", place.module)):
        if part == "attention-block" and kind in ("gpt2", "llama"):
            continue
        vectors, expected = inside(model, module)
        answers = kh.TransformersOracle(model, layer, part, positions="all")(vectors)  # type: ignore[arg-type]
        torch.testing.assert_close(answers, expected, rtol=0, atol=1e-12)
    if kind in ("gpt2", "llama"):
        vectors, expected = inside(model, place.module)
        answers = kh.TransformersOracle(model, layer, positions="all")(vectors)
        torch.testing.assert_close(answers, expected, rtol=0, atol=1e-12)
        before = place.layer.ln_1 if kind == "gpt2" else place.layer.input_layernorm
        x = tokens()
        block = kh.TransformersOracle(model, layer, "attention-block", positions="all")(x)
        with torch.no_grad():
            bare = kh.TransformersOracle(model, layer, positions="all")(before(x))
        torch.testing.assert_close(block, x + bare, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "roberta", "albert", "gpt2"])
def test_the_attention_part_is_its_heads(kind: str) -> None:
    for layer in (0, -1):
        oracle = kh.TransformersOracle(model_of(kind), layer)
        heads = oracle.heads()
        assert (len(heads.heads), heads.width, heads.outputs) == (HEADS, WIDTH, WIDTH)
        np.testing.assert_allclose(to_numpy(oracle(tokens())), heads(to_numpy(tokens())), rtol=0, atol=1e-13)
        if kind != "gpt2":
            every = kh.TransformersOracle(model_of(kind), layer, positions="all")
            expected = heads.at_all_positions(to_numpy(tokens()))
            np.testing.assert_allclose(to_numpy(every(tokens())), expected, rtol=0, atol=1e-13)


def test_a_causal_mask_holds_whatever_computes_attention() -> None:
    """Attention of GPT-2 that is given no mask sees everything if it is eager, and the past alone if not."""
    model = made("gpt2")
    answers = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        answers.append(kh.TransformersOracle(model, 0, positions="all")(tokens()))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-13)
    changed = tokens()
    changed[:, -1] += 1.0
    again = kh.TransformersOracle(model, 0, positions="all")(changed)
    torch.testing.assert_close(again[:, :-1], answers[1][:, :-1], rtol=0, atol=1e-13)


def test_rotary_layers_are_boxes_but_no_heads() -> None:
    oracle = kh.TransformersOracle(model_of("llama"), 0)
    assert oracle(tokens(1, 4)).shape == (1, WIDTH)
    assert not torch.allclose(oracle(tokens()), oracle(tokens()[:, [1, 0, 2, 3, 4]]))  # positions matter
    with pytest.raises(UsageError, match="by their position"):
        oracle.heads()
    with pytest.raises(UsageError, match="by their position"):
        weights_of(heads_of(attention_in(model_of("bert"))[0].module), oracle.module)
    assert not kh.recover(oracle, method="single-head", throw=False).certified


def test_rotary_layers_with_biases_are_heads_of_that_form() -> None:
    """GPT-NeoX turns one pair of four; keys and queries have biases."""
    oracle = kh.TransformersOracle(random_model("GPTNeoX"), 0, precision="float64")
    weights = {name: to_numpy(each.detach()) for name, each in oracle.place.module.named_parameters()}
    rows = [0, 2, 3, 4, 1, 5, 6, 7]  # the two that turn are a pair, and so are any two of the others
    count, width = 4, ARCHITECTURE_WIDTH
    each = weights["query_key_value.weight"].reshape(count, 3, 8, width)
    own = weights["query_key_value.bias"].reshape(count, 3, 8)
    heads, constant = [], weights["dense.bias"]
    for head in range(count):
        (query, key, value), (query_bias, key_bias, value_bias) = each[head], own[head]
        project = weights["dense.weight"][:, 8 * head : 8 * head + 8].T
        size, angles = 8**-0.5, np.array([1.0, 0.0, 0.0, 0.0])
        form = Rotary(size * query[rows], key[rows], angles, size * query_bias[rows], key_bias[rows])
        heads.append(kh.FormHead(form, value.T @ project))
        constant = constant + value_bias @ project
    given = torch.asarray(np.random.default_rng(2).standard_normal((4, 9, width)))
    expected = to_numpy(oracle(given))
    assert np.allclose(kh.MultiHead(heads, constant)(to_numpy(given)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_the_same_box(kind: str, folders: Path) -> None:
    from_disk, here = kh.TransformersOracle(folders / kind, 1), kh.TransformersOracle(model_of(kind), 1)
    assert from_disk.name == here.name
    torch.testing.assert_close(from_disk(tokens()), here(tokens()), rtol=0, atol=0)
    others = [kh.TransformersOracle(model_of(kind), 0), kh.TransformersOracle(model_of(kind), 1, "layer")]
    others.append(kh.TransformersOracle(model_of(kind), 1, positions=0))
    assert len({each.name for each in [here, *others]}) == 4


def test_stored_dtype_unless_told(tmp_path: Path) -> None:
    made("bert").float().save_pretrained(tmp_path)
    assert kh.TransformersOracle(tmp_path, 0).signature.space.dtype == torch.float32
    oracle = kh.TransformersOracle(tmp_path, 0, dtype="float64", max_norm=3.0, max_length=7, batch_limit=5)
    signature = oracle.signature
    assert signature.space.dtype == torch.float64
    assert (signature.max_norm, signature.max_length, signature.batch_limit) == (3.0, 7, 5)


def test_targets(folders: Path) -> None:
    target = open_target(f"transformers:{folders / 'bert'}#layer=-1&positions=all&dtype=float32")
    signature = target.oracle.signature
    assert (signature.positions, signature.width, signature.space.dtype) == ("all", WIDTH, torch.float32)
    assert target.label.startswith("the attention of width 12 at encoder.layer.1.attention in ")
    assert target.label.endswith(", observed at all positions")
    assert open_target(f"transformers:{folders / 'bert'}#layer=0&part=layer").oracle.name.endswith(" layer")


# --- any architecture -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_opens_as_it_is_in_its_model(name: str) -> None:
    """Masks, windows, rotary tables, multipliers and norms are those of a run of the model: of longer sequences too."""
    model = random_model(name)
    places = attention_in(model)
    assert len(places) == {"Albert": 1, **dict.fromkeys(("Bart", "MT5", "T5", "Whisper"), 4)}.get(name, 2)
    for number in (0, len(places) - 1):
        crossed = number and len(places) == 4  # its layers attend to an encoder besides
        oracle = kh.TransformersOracle(model, number, positions="all")
        vectors, expected = within(model, places[number].entries[0], places[number].exit)
        torch.testing.assert_close(oracle(vectors), expected, rtol=1e-11, atol=1e-11)
        vectors, expected = within(model, places[number].layer, places[number].layer)
        if crossed:
            with pytest.raises(UsageError, match="attend to an encoder too"):
                kh.TransformersOracle(model, number, "layer")
        else:
            whole = kh.TransformersOracle(model, number, "layer", positions="all")
            torch.testing.assert_close(whole(vectors), expected, rtol=1e-11, atol=1e-11)
        block = kh.TransformersOracle(model, number, "attention-block", positions="all")(vectors)
        assert block.shape == vectors.shape
        assert not torch.allclose(block, expected)


def within(model: Any, begin: Any, end: Any, length: int = 12) -> tuple[Any, Any]:
    """What one module is given first and another answers, in a run of the model on `length` tokens."""
    given: list[Any] = []
    answered: list[Any] = []

    def note(_module: Any, args: Any, kwargs: Any) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.ndim == 3]
        given.extend(tensors[:1])

    hooks = [begin.register_forward_pre_hook(note, with_kwargs=True)]
    hooks.append(end.register_forward_hook(lambda _module, _args, outputs: answered.append(outputs)))
    ids = torch.arange(5, 5 + length)[None]
    inputs = {
        "pixel_values": lambda: {"pixel_values": torch.randn(1, 3, 24, 24, dtype=torch.float64)},
        "input_features": lambda: {"input_features": torch.randn(1, 8, 128, dtype=torch.float64)},
    }.get(model.main_input_name, lambda: {"input_ids": ids})()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")  # the other knows no float64
    with torch.no_grad():
        model(**inputs)
    model.set_experts_implementation(before)
    for hook in hooks:
        hook.remove()
    return given[0], answered[0][0] if isinstance(answered[0], tuple) else answered[0]


def test_a_window_is_kept() -> None:
    """Tokens out of the window of four move no answer."""
    oracle = kh.TransformersOracle(random_model("Mistral"), 0)
    x = torch.randn(1, 8, ARCHITECTURE_WIDTH, dtype=torch.float64)
    near, far = x.clone(), x.clone()
    far[:, :4] += 1.0
    near[:, 4] += 1.0
    torch.testing.assert_close(oracle(far), oracle(x), rtol=0, atol=1e-14)
    assert not torch.allclose(oracle(near), oracle(x))


def test_what_a_layer_is_given_must_depend_on_lengths_alone() -> None:
    """A model that gives a layer what its tokens say is refused, not asked otherwise than it is."""
    model = made("bert")
    plain = model.encoder.forward

    def forward(hidden: Any, attention_mask: Any = None, **given: Any) -> Any:
        return plain(hidden, attention_mask=torch.tanh(hidden.sum(-1))[:, None, None, :], **given)

    model.encoder.forward = forward
    with pytest.raises(UsageError, match="otherwise than in a run of BertModel"):
        kh.TransformersOracle(model, 1, "layer")


def test_arithmetic_in_float32_inside_is_known_and_widened() -> None:
    """Llama makes its rotary tables in float32 whatever it is in; BERT computes in its own dtype."""
    model = random_model("Llama")
    narrow = kh.TransformersOracle(model, 0)
    wide = kh.TransformersOracle(model, 0, precision="float64")
    assert (narrow.narrowed, narrow.signature.space.eps) == (True, np.finfo(np.float32).eps)
    assert "precision='float64'" in narrow.facts()["precision"]
    assert (wide.narrowed, wide.signature.space.eps) == (False, np.finfo(np.float64).eps)
    assert wide.name != narrow.name
    assert not kh.TransformersOracle(random_model("Bert"), 0).narrowed
    x = torch.randn(2, 9, ARCHITECTURE_WIDTH, dtype=torch.float64)
    off = float((wide(x) - narrow(x)).abs().max())
    assert 1e-10 < off < 1e-5
    attention, frequencies = model.layers[0].self_attn, model.rotary_emb.inv_freq.double()
    angles = torch.arange(9, dtype=torch.float64)[:, None] * torch.cat([frequencies, frequencies])
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        plain = attention(x, position_embeddings=(angles.cos()[None], angles.sin()[None]), attention_mask=mask)[0]
    torch.testing.assert_close(wide(x), plain[:, -1], rtol=0, atol=1e-12)
    in_float32 = kh.TransformersOracle(copy.deepcopy(model).float(), 0, precision="float64")
    assert in_float32.signature.space.dtype == torch.float64
    for options in ({"precision": "float16"}, {"precision": "float64", "dtype": "float32"}):
        with pytest.raises(UsageError, match="precision"):
            kh.TransformersOracle(model, 0, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("part", ["attention", "attention-block"])
def test_layers_of_short_dtypes_open_and_are_admitted(part: str, dtype: str) -> None:
    """What is read behind float64 only ends TOO_NOISY, whatever a method takes it for; long tokens overflow float16."""
    oracle = kh.TransformersOracle(model_of("llama"), 0, part, dtype=dtype)
    assert oracle.signature.space.eps == torch.finfo(getattr(torch, dtype)).eps
    result = kh.recover(oracle, throw=False)
    infinite = dtype == "float16" and result.outcome is kh.Outcome.ORACLE_FAILED
    assert infinite or result.outcome is kh.Outcome.TOO_NOISY, result.message
    assert dtype != "float32" or "form rotary" in result.message


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Bert", {}),
        ("Llama", {"form": "rotary"}),
        ("GPTJ", {"form": "rotary"}),
        ("Mistral", {"form": "rotary", "position_bias": "window"}),
        ("Gemma2", {"form": "rotary", "link": "softcap", "position_bias": "window"}),
        ("Qwen3", {"form": "qk-norm-rotary", "position_bias": "window"}),
        ("Mpt", {"position_bias": "alibi"}),
        ("GptOss", {"form": "rotary", "normaliser": "sink", "position_bias": "window"}),
    ],
)
def test_hints_name_parts_by_config_and_modules(name: str, parts: dict[str, str]) -> None:
    hints = kh.TransformersOracle(random_model(name), 0, precision="float64").hints
    assert [{key: each for key, each in hint.items() if key != "frequencies"} for hint in hints] == [parts] * bool(
        parts
    )


@pytest.mark.parametrize(("name", "place"), [("GPT2", "before"), ("Bert", "after")])
def test_hints_say_where_the_norm_of_a_block_is(name: str, place: str) -> None:
    hints = kh.TransformersOracle(random_model(name), 0, "attention-block", precision="float64").hints
    assert hints == ({"place": place},)


def test_a_hint_chooses_what_is_tried_and_nothing_rests_on_it() -> None:
    """With its own hint a layer is certified at once; with that of another it is admitted or read all the same."""
    oracle = open_target_of("StableLm")  # of whose keys one pair in four turns
    result = kh.recover(oracle, throw=False)
    assert result.certified
    assert result.stats.queries < 400
    x = torch.randn(8, 7, ARCHITECTURE_WIDTH, dtype=torch.float64)
    np.testing.assert_allclose(result.params(to_numpy(x)), to_numpy(oracle(x)), rtol=0, atol=1e-9)
    plain = kh.TransformersOracle(random_model("OPT"), 0)
    plain.hints = oracle.hints
    result = kh.recover(plain, throw=False)
    assert result.certified
    np.testing.assert_allclose(result.params(to_numpy(x)), to_numpy(plain(x)), rtol=0, atol=1e-8)


def open_target_of(name: str) -> kh.TransformersOracle:
    return kh.TransformersOracle(random_model(name), 0, precision="float64")


def test_lengths_end_where_positions_do() -> None:
    assert kh.TransformersOracle(model_of("bert"), 0).signature.max_length == 16
    assert kh.TransformersOracle(model_of("roberta"), 0).signature.max_length == 14
    assert kh.TransformersOracle(model_of("bert"), 0, max_length=5).signature.max_length == 5
    assert kh.TransformersOracle(random_model("Mpt"), 0).signature.max_length == 96  # which it calls max_seq_len


def test_the_number_of_the_largest_output_is_told(folders: Path) -> None:
    text = f"transformers:{folders / 'bert'}#layer=0&dtype=float64"
    oracle, numbers = open_target(f"{text}&answers=labels").oracle, open_target(text).oracle
    assert oracle.signature.answers == "labels"
    assert oracle.name != numbers.name
    assert torch.equal(oracle(tokens()), numbers(tokens()).argmax(dim=-1).double())


# --- weights and products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "roberta", "albert", "gpt2"])
def test_heads_go_back_into_the_model(kind: str) -> None:
    """Model to products, products to other weights, and the model with them answers the same."""
    model = copy.deepcopy(model_of(kind))
    with torch.no_grad():
        before = model(input_ids=IDS).last_hidden_state
    found = {
        f"{place.name}.{name}": array
        for place in attention_in(model)
        for name, array in weights_of(heads_of(place.module), place.module).items()
    }
    own = dict(model.named_parameters())
    moved = [name for name, array in found.items() if not np.allclose(own[name].detach().numpy(), array)]
    assert len(moved) > len(found) // 2  # other weights
    load_weights(model, found)
    with torch.no_grad():
        after = model(input_ids=IDS).last_hidden_state
    assert float((after - before).abs().max()) <= 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_of_torch_there_and_back(heads: int, bias: bool) -> None:
    torch.manual_seed(heads)
    layer = torch.nn.MultiheadAttention(WIDTH, heads, bias=bias, batch_first=True).double().eval()
    if bias:
        torch.nn.init.normal_(layer.in_proj_bias)
        torch.nn.init.normal_(layer.out_proj.bias)
    truth, oracle = heads_of(layer), kh.TorchOracle(layer)
    np.testing.assert_allclose(to_numpy(oracle(tokens())), truth(to_numpy(tokens())), rtol=0, atol=1e-13)
    other = torch.nn.MultiheadAttention(WIDTH, heads, bias=bias, batch_first=True).double().eval()
    load_weights(other, weights_of(truth, other))
    torch.testing.assert_close(kh.TorchOracle(other)(tokens()), oracle(tokens()), rtol=0, atol=1e-13)
    assert kh.distance(heads_of(other), truth) <= 1e-13
    if not bias:
        shifted = kh.MultiHead(truth.heads, np.ones(WIDTH))
        with pytest.raises(UsageError, match="made without a bias"):
            weights_of(shifted, layer)


def test_missing_heads_are_zero_and_others_are_refused() -> None:
    layer = torch.nn.MultiheadAttention(WIDTH, 3).double().eval()
    truth = heads_of(layer)
    few = kh.MultiHead(truth.heads[:2], truth.output_bias)
    other = torch.nn.MultiheadAttention(WIDTH, 3).double().eval()
    load_weights(other, weights_of(few, other))
    assert kh.distance(heads_of(other), few) <= 1e-13
    rng = np.random.default_rng(0)
    full = kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal((WIDTH, WIDTH)))
    for heads, said in (
        (kh.MultiHead([*truth.heads, truth.heads[0]]), "4 heads do not fit in a layer of 3"),
        (full, "rank above 4"),
        (kh.SingleHead(np.eye(3), np.eye(3)), "do not fit in MultiheadAttention, which has width 12"),
    ):
        with pytest.raises(UsageError, match=said):
            weights_of(heads, layer)
    with pytest.raises(UsageError, match="plain number"):
        factored(kh.SingleHead(np.eye(3), np.ones(3)), 1, 3, 1.0)
    with pytest.raises(UsageError, match=r"no attention module of a known kind; known: nn\.MultiheadAttention"):
        heads_of(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="a token of their own"):
        heads_of(torch.nn.MultiheadAttention(4, 2, add_zero_attn=True))


def test_weights_of_another_model_are_refused() -> None:
    model = made("bert")
    with pytest.raises(UsageError, match="has no 'nonsense'"):
        load_weights(model, {"nonsense": np.zeros(3)})
    with pytest.raises(UsageError, match=r"has shape \(12, 12\)"):
        load_weights(model, {"encoder.layer.0.attention.self.query.weight": np.zeros(3)})


# --- a whole model ----------------------------------------------------------------------------------------------


def test_a_whole_model_is_recovered_and_loaded_back(tmp_path: Path) -> None:
    """Models of one head, which the method single-head knows; the methods for several heads are used the same way."""
    model = made("bert", heads=1)
    named: list[str] = []
    found = kh.recover_model(
        model, method="single-head", journal=tmp_path / "answers", done=lambda name, _result: named.append(name)
    )
    assert found.certified
    assert named == list(found.layers) == [place.name for place in attention_in(model)]
    for place in attention_in(model):
        assert kh.distance(found.layers[place.name].params, heads_of(place.module)) <= 1e-8
    found.save(tmp_path / "layers.safetensors")
    heads, weights = load_layers(tmp_path / "layers.safetensors")
    assert list(heads) == named
    with torch.no_grad():
        before = model(input_ids=IDS).last_hidden_state
    copied = copy.deepcopy(model)
    for name, parameter in copied.named_parameters():
        if ".attention.self." in name:
            torch.nn.init.zeros_(parameter)
    # As anybody would load it, and as Keyhole does.
    stored = safetensors_torch.load_file(tmp_path / "layers.safetensors")
    missing = copied.load_state_dict(stored, strict=False).missing_keys
    assert not [name for name in missing if ".attention.self." in name]
    load_weights(made("bert", heads=1, seed=1), weights)
    with torch.no_grad():
        after = copied(input_ids=IDS).last_hidden_state
    assert float((after - before).abs().max()) <= 1e-8
    again = kh.recover_model(model, method="single-head", journal=tmp_path / "answers")
    assert [result.stats.new_queries for result in again.layers.values()] == [0, 0]
    with ThreadPoolExecutor(2) as executor:
        shared = kh.recover_model(model, method="single-head", executor=executor, progress=False)
    assert list(shared.layers) == list(found.layers)
    assert set(shared.weights) == set(found.weights)
    for name, weight in found.weights.items():
        assert np.allclose(shared.weights[name], weight, atol=1e-12), name


@pytest.mark.skipif("multi-head" not in METHODS, reason="the method multi-head is not there yet")
@pytest.mark.parametrize("kind", ["bert", "albert", "gpt2"])
def test_a_model_of_several_heads_is_recovered_and_loaded_back(kind: str) -> None:
    model = copy.deepcopy(model_of(kind))
    found = kh.recover_model(model)
    assert not found.left_out
    for place in attention_in(model):
        assert kh.distance(found.layers[place.name].params, heads_of(place.module)) <= 1e-6
    with torch.no_grad():
        before = model(input_ids=IDS).last_hidden_state
        found.load_into(model)
        after = model(input_ids=IDS).last_hidden_state
    assert float((after - before).abs().max()) <= 1e-6


def test_a_model_that_cannot_be_recovered_says_so() -> None:
    """Three heads are not one: every layer admits it, and nothing is handed out as weights."""
    found = kh.recover_model(model_of("bert"), method="single-head", throw=False)
    assert len(found.layers) == 2
    assert not found.certified
    assert not found.weights
    assert not found.arrays()
    with pytest.raises(kh.RecoveryFailed) as caught:
        kh.recover_model(model_of("bert"), layers=[1], method="single-head")
    assert list(caught.value.partial.layers) == ["encoder.layer.1.attention"]


def test_all_layers_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    made("bert", heads=1).save_pretrained("model")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["recover", *words])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    target = "transformers:model#layer=all"
    code, out, _ = run(target, "--method", "single-head", "--out", "run")
    assert code == 0, out
    assert "encoder.layer.1.attention: CERTIFIED, 1 head, relative distance" in out
    assert "run/layers.safetensors" in out
    assert set(load_layers("run/layers.safetensors")[0]) == {f"encoder.layer.{n}.attention" for n in (0, 1)}
    code, out, _ = run(target, "--method", "single-head", "--json", "--budget", "3")
    said = json.loads(out)
    assert (code, said["certified"]) == (1, False)
    assert said["layers"]["encoder.layer.0.attention"]["outcome"] == "BUDGET_EXHAUSTED"
    code, _, err = run(f"{target}&part=layer")
    assert (code, "leave part out" in err) == (2, True)
    code, _, err = run("transformers:nowhere#layer=all")
    assert (code, "never fetched" in err) == (2, True)


# --- refused, with the remedy -----------------------------------------------------------------------------------


class Evil:
    """Prints when it is unpickled by who trusts pickles."""

    def __reduce__(self) -> Any:
        return print, ("EXECUTED",)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as a transformers model"),
        (lambda folder: (folder / "config.json").write_text("{}"), r"names no architecture \(model_type\)"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no weights.*model\.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "cannot be read.*SafetensorError"),
        (lambda folder: _of_type(folder, "unheard-of"), "cannot be read.*unheard-of.*open it yourself.*TorchOracle"),
        (lambda folder: _without(folder, "encoder.layer.1.attention.self.key.weight"), "lacks 1.*self.key.weight"),
        (lambda folder: _pickled(folder, {"evil": Evil()}), "a pickle, and.*safetensors"),
        (lambda folder: (_pickled(folder), (folder / "pytorch_model.bin").write_bytes(b"junk")), "a pickle"),
    ],
)
def test_spoilt_folders(spoil: Any, said: str, bert: Path, capsys: Any) -> None:
    spoil(bert)
    with pytest.raises(FileError, match=f"(?s){said}"):
        kh.TransformersOracle(bert, 0)
    assert "EXECUTED" not in capsys.readouterr().out


def _of_type(folder: Path, kind: str) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"model_type": kind}))


def _without(folder: Path, name: str) -> None:
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    del tensors[name]
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _pickled(folder: Path, more: dict[str, Any] | None = None) -> None:
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, **(more or {})}, folder / "pytorch_model.bin")


def test_a_pickle_of_weights_alone_is_read(bert: Path) -> None:
    expected = kh.TransformersOracle(bert, 0).name
    _pickled(bert)
    assert kh.TransformersOracle(bert, 0).name == expected


@pytest.mark.parametrize("kind", ["bert", "unheard-of"])
def test_code_in_a_folder_is_never_run(kind: str, bert: Path, capsys: Any) -> None:
    (bert / "evil.py").write_text("print('EXECUTED')\nclass Model: ...\nclass Config: ...\n")
    about = json.loads((bert / "config.json").read_text())
    about |= {"model_type": kind, "auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}}
    (bert / "config.json").write_text(json.dumps(about))
    if kind == "bert":  # a kind that the library has itself
        assert kh.TransformersOracle(bert, 0).name == kh.TransformersOracle(model_of("bert"), 0).name
    else:
        with pytest.raises(FileError, match="cannot be read as a transformers model"):
            kh.TransformersOracle(bert, 0)
    assert "EXECUTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("bert", {"layer": 2}, "no layer 2: its 2 attention layers are counted from 0 to 1"),
        ("albert", {"layer": 3}, "no layer 3: its 2 .*layers that it shares count once"),
        ("bert", {"layer": "first"}, "no layer 'first'"),
        ("bert", {"layer": "all"}, r"keyhole\.recover_model"),
        ("bert", {"layer": 0, "part": "ffn"}, "part must be one of attention, attention-block, layer"),
        (3, {"layer": 0}, "a transformers model or a folder with one, not int"),
        (torch.nn.Linear(2, 2), {"layer": 0}, r"no transformers model that can be run.*TorchOracle\("),
    ],
)
def test_nonsense(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kh.TransformersOracle(model_of(model) if isinstance(model, str) else model, **options)


def test_what_else_a_model_has_is_listed() -> None:
    """A model without attention names its modules; one that cannot be run here says which attention can."""
    config = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=20, state_size=4)
    model = transformers.MambaModel(config).double().eval()
    with pytest.raises(UsageError, match=r"no self-attention .*it has .*layers\.0\.mixer \(MambaMixer\).*TorchOracle"):
        kh.TransformersOracle(model, 0)
    flash = copy.deepcopy(model_of("llama"))
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UsageError, match=r"computed by 'flash_attention_2', so call .*set_attn_implementation\('eager'\)"
    ):
        kh.TransformersOracle(flash, 0)
    plain, mask = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.zeros(5, 5)
    with pytest.raises(UsageError, match=r"attn_mask.*should be \(3, 3\).*a mask for tokens\.shape\[1\] tokens"):
        kh.TorchOracle(plain, call=lambda module, x: module(x, x, x, attn_mask=mask)[0])


def test_attention_without_a_module_around_it_is_asked_alone() -> None:
    config = transformers.XLMConfig(vocab_size=50, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=32)
    torch.manual_seed(0)
    model = transformers.XLMModel(config).double().eval()
    oracle = kh.TransformersOracle(model, 1)  # its calls share a cache, of which each is given a copy
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    assert torch.equal(oracle(tokens), oracle(tokens))
    for part in ("attention-block", "layer"):
        with pytest.raises(UsageError, match="ask the part 'attention'"):
            kh.TransformersOracle(model, 1, part)


def test_layers_that_listen_to_sound_are_asked_any_length() -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 8,
    }
    sound = {"conv_dim": (4, 4), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    config = transformers.Wav2Vec2Config(**sizes, **sound, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    torch.manual_seed(0)
    model = transformers.Wav2Vec2Model(config).double().eval()
    for part in ("attention", "attention-block", "layer"):
        oracle = kh.TransformersOracle(model, 0, part)
        assert oracle(torch.randn(2, 9, 16, dtype=torch.float64)).shape == (2, 16)


def test_names_are_never_fetched() -> None:
    with pytest.raises(FileError, match="never fetched by its name"):
        kh.TransformersOracle("bert-base-uncased", 0)


def test_train_mode() -> None:
    with pytest.raises(UsageError, match=r"train mode.*module\.eval\(\)"):
        kh.TransformersOracle(made("bert").train(), 0)


def test_a_block_is_more_than_its_heads() -> None:
    with pytest.raises(UsageError, match="ask the part 'attention'"):
        kh.TransformersOracle(model_of("bert"), 0, "attention-block").heads()


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_without_the_libraries_the_extra_is_named(library: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"TransformersOracle needs {library}.*'keyhole\[transformers\]'"):
        kh.TransformersOracle(folders / "bert", 0)
