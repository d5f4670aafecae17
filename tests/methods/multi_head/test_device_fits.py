"""Several heads where the oracle is on a device: tokens fitted together, large matrices worked with there."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Space, floats
from keyhole.methods.multi_head.vector import probe
from keyhole.methods.multi_head.vector.device_fits import TokensData, fit_tokens, guess_tokens
from keyhole.methods.multi_head.vector.token_fit import TokenData, fit_token, guess_logits
from support.spaces import pretend_device

torch = pytest.importorskip("torch")
ERROR = 1e-14


@pytest.mark.parametrize(("heads", "outputs", "tokens"), [(3, 9, 4), (6, 40, 2)])
def test_tokens_fitted_together_are_those_fitted_alone(heads: int, outputs: int, tokens: int) -> None:
    """First guesses, values, logits, residuals and what changes of answers do to values."""
    rng, space, groups = np.random.default_rng(heads), Space.of(torch.ones(1, dtype=torch.float64)), heads
    known, copies = rng.standard_normal((heads, outputs)), np.ones((groups, 2))
    odds = np.exp(rng.standard_normal((groups, 1, heads))) * np.array([[1.0], [4.0]])
    values, logits = rng.standard_normal((tokens, heads, outputs)), 0.7 * rng.standard_normal((tokens, groups, heads))
    new = np.exp(logits)[:, :, None, :] * copies[:, :, None]
    whole = 1 + odds + new
    answers = (new / whole) @ values[:, None] + (odds / whole) @ known
    answers += ERROR * rng.standard_normal(answers.shape)
    total = np.sum(values, axis=1)
    together = TokensData(*(space.asarray(each) for each in (answers, odds, copies, known, total)))
    guess = guess_tokens(space, together)
    assert guess is not None
    fits = fit_tokens(space, together, guess, 4 * ERROR)
    changes = rng.standard_normal((2, 2 * groups + 1, outputs))
    moved = fits.respond(space.asarray(changes) @ fits.frame[:, None])
    for n in range(tokens):
        group = np.repeat(np.arange(groups), 2)
        alone = TokenData(
            answers[n].reshape(-1, outputs), group, odds.reshape(-1, heads), copies.ravel(), known, total[n]
        )
        first = guess_logits(alone, groups)
        assert first is not None
        assert np.allclose(floats(guess[n]), first, atol=1e-8)
        fit = fit_token(alone, first, 4 * ERROR)
        assert fits.freedom == fit.freedom
        assert fits.residual[n] < 8 * ERROR
        assert fits.condition[n] == pytest.approx(fit.state.condition, rel=1e-6)
        assert np.allclose(floats(fits.values[n]), values[n], atol=1e-10)
        assert np.allclose(floats(fits.logits[n]), logits[n], atol=1e-10)
        assert np.allclose(floats(moved[0][n]), fit.respond(changes)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_heads_on_a_device_are_those_on_the_host(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries, but for those that fits which round otherwise ask again, and heads as right."""
    rng, width, heads, inner = np.random.default_rng(1), 24, 4, 6
    made = []
    for _ in range(heads):
        key, query, value, output = (rng.standard_normal((width, inner)) for _ in range(4))
        bias = 0.3 * rng.standard_normal(width) if biased else None
        made.append(kh.SingleHead(key @ query.T / width, value @ output.T / width, bias))
    truth = kh.MultiHead(made, rng.standard_normal(width) if biased else None)
    here = kh.recover(kh.FunctionOracle(truth, width=width), "multi-head", seed=0)
    pretend_device(monkeypatch)
    monkeypatch.setattr(probe, "LARGE", 1)
    like = torch.ones(1, dtype=torch.float64)
    there = kh.recover(kh.FunctionOracle(truth, width=width, like=like), "multi-head", seed=0)
    assert there.certified
    assert abs(there.stats.queries - here.stats.queries) <= 0.1 * here.stats.queries
    assert type(there.params.heads[0].score) is torch.Tensor
    assert kh.distance(there.params, truth) < 1e-8
