"""Heads on a sentence: the weights are those of the model, and are kept, shown and refused as they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import FileError, UsageError
from keyhole.families.forms import Rotary
from keyhole.families.torch_layouts import heads_of
from keyhole.oracles.transformers.places import attention_in
from keyhole.sentence.token_weights import TokenWeights, load_weights_on, save_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ("[PAD] [UNK] [CLS] [SEP] [MASK] " + "the key turns in lock and old door opens again").split(" ")
SENTENCE = "the old key turns in the lock"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16
    )
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def heads_in(folder: Path) -> dict[str, Any]:
    model = transformers.AutoModel.from_pretrained(folder).double()
    return {place.name: heads_of(place.module) for place in attention_in(model)}


def test_weights_are_those_of_the_model_in_any_order_of_heads(bert: Path) -> None:
    found = {name: kh.MultiHead(heads.heads[::-1]) for name, heads in heads_in(bert).items()}
    shown = kh.attention_on(SENTENCE, bert, found)
    assert list(shown) == list(found)
    for each in shown.values():
        assert each.words == ("[CLS]", *SENTENCE.split(), "[SEP]")
        assert each.apart < 1e-5
        np.testing.assert_allclose(np.sum(each.found, axis=2), 1.0, atol=1e-12)
        assert each.looks(0)[0][0] == "[CLS]"
    by_number = kh.attention_on(SENTENCE, bert, {-1: list(found.values())[1]})
    np.testing.assert_array_equal(next(iter(by_number.values())).found, list(shown.values())[1].found)


def test_wrong_heads_are_seen_to_be_wrong(bert: Path) -> None:
    other = [kh.SingleHead(-head.score, head.value) for head in next(iter(heads_in(bert).values())).heads]
    (shown,) = kh.attention_on(SENTENCE, bert, {0: kh.MultiHead(other)}).values()
    assert shown.apart > 0.01


def test_decoders_look_back_only() -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=16,
        num_key_value_heads=2,
    )
    model = transformers.LlamaModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    rotary = [kh.FormHead(form, np.ones((8, 8))) for form in _rotary_forms(model, 2)]

    class Letters:
        def __call__(self, sentence: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": torch.tensor([[ord(each) % 20 for each in sentence]])}

        def convert_ids_to_tokens(self, numbers: list[int]) -> list[str]:
            return [f"\u2581{number}" for number in numbers]

    (shown,) = kh.attention_on("abcde", model, {0: kh.MultiHead(rotary)}, Letters()).values()
    assert shown.words[0] == str(ord("a") % 20)
    assert shown.apart < 1e-5
    assert np.all(np.triu(shown.found, 1) == 0)


def _rotary_forms(model: Any, heads: int) -> list[Any]:
    own, size = model.layers[0].self_attn, 8 // heads
    frequencies = model.rotary_emb.inv_freq.double().numpy()
    key, query = (each.weight.detach().double().numpy() for each in (own.k_proj, own.q_proj))
    return [
        Rotary(query[h * size : (h + 1) * size] / size**0.5, key[h * size : (h + 1) * size], frequencies)
        for h in range(heads)
    ]


def test_what_cannot_be_shown_is_said(bert: Path, tmp_path: Path) -> None:
    found = heads_in(bert)
    with pytest.raises(UsageError, match="no attention 'encoder'"):
        kh.attention_on(SENTENCE, bert, {"encoder": next(iter(found.values()))})
    with pytest.raises(UsageError, match="width 3"):
        kh.attention_on(SENTENCE, bert, {0: kh.SingleHead(np.ones((3, 3)), np.ones(3))})
    with pytest.raises(FileError, match="no tokenizer"):
        kh.attention_on(SENTENCE, tmp_path, found)
    with pytest.raises(UsageError, match="tokenizer="):
        kh.attention_on(SENTENCE, transformers.AutoModel.from_pretrained(bert), found)


def test_files_are_read_back_or_refused(tmp_path: Path) -> None:
    weights = TokenWeights(("a", "b"), np.array([[[0.25, 0.75], [1.0, 0.0]]]), None)
    save_weights(tmp_path / "attention.safetensors", "a b", {"layer": weights})
    sentence, layers = load_weights_on(tmp_path / "attention.safetensors")
    assert (sentence, layers["layer"].words) == ("a b", ("a", "b"))
    np.testing.assert_array_equal(layers["layer"].found, weights.found)
    save_weights(tmp_path / "bad", "a b", {"layer": TokenWeights(("a",), weights.found)})
    with pytest.raises(FileError, match="make it again"):
        load_weights_on(tmp_path / "bad")
    kh.SingleHead(np.ones((2, 2)), np.ones(2)).save(tmp_path / "head")
    with pytest.raises(FileError, match="make it again"):
        load_weights_on(tmp_path / "head")
