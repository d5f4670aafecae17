"""How often a device is waited for, counted where PyTorch's arrays are taken for those of one."""

from __future__ import annotations

from unittest import mock

import pytest

import keyhole as kh
from keyhole.families import Family
from keyhole.session import Session
from keyhole.targets.demos import random_multi_head, random_single_head
from support.spaces import pretend_device

# Looks at numbers of a device for every round of plans: whether answers are finite, whether weights saturate, how large
# forms are, and what the method decides by; two of each, as what comes to the host is counted there too.
PER_ROUND = 12


@pytest.mark.parametrize(
    ("params", "method"),
    [
        (random_single_head(16, rank=16, norm=1.0, seed=0), "single-head"),
        (random_single_head(48, rank=2, norm=1.0, seed=0), "single-head"),
        (random_multi_head(3, 24, outputs=24, seed=0), "multi-head"),
    ],
    ids=["full rank", "low rank", "several heads"],
)
def test_a_device_is_waited_for_by_rounds_not_by_batches(
    params: Family, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    device_calls = pytest.importorskip("benchmarks.support.device_calls")  # which imports PyTorch
    pretend_device(monkeypatch)
    like = torch.zeros(1, dtype=torch.float64)
    inside = params.like(like)
    counted = []
    for limit in (None, 3):
        batches: list[int] = []
        oracle = kh.FunctionOracle(
            lambda tokens, batches=batches: (batches.append(len(tokens)), inside(tokens))[1],
            width=params.width,
            like=like,
            batch_limit=limit,
        )
        measured = mock.patch.object(Session, "measure_all", autospec=True, side_effect=Session.measure_all)
        with measured as rounds, device_calls.DeviceCalls(waits_alone=True) as calls:
            result = kh.recover(oracle, method)
        counted.append((len(batches), sum(calls.waits.values()), rounds.call_count, result.stats.queries))
    (few, waits, asked, queries), (many, again, _, same) = counted
    assert many > 1.5 * few
    assert (again, same) == (waits, queries), "batches are waited for one by one"
    assert waits <= PER_ROUND * asked
