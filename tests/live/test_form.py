"""Forms that make no sense, refused field by field."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole.live.form import InvalidForm, read_form
from support.live import QUICK


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"family": "no-such"}, "family"),
        ({}, "family"),
        ([], "family"),
        ({"family": ["single-head"]}, "family"),
        ({"family": "served"}, "family"),  # only where a box is served
        ({**QUICK, "width": "0"}, "width"),
        ({**QUICK, "width": "-3"}, "width"),
        ({**QUICK, "width": "1e99"}, "width"),
        ({**QUICK, "width": "wide"}, "width"),
        ({**QUICK, "width": "9" * 5000}, "width"),
        ({**QUICK, "width": 7.5}, "width"),
        ({**QUICK, "width": True}, "width"),
        ({**QUICK, "width": {"a": 1}}, "width"),
        ({**QUICK, "width": "100000"}, "width"),
        ({**QUICK, "rank": "7"}, "rank"),
        ({**QUICK, "noise": "nan"}, "noise"),
        ({**QUICK, "noise": "-1"}, "noise"),
        ({**QUICK, "noise": "inf"}, "noise"),
        ({**QUICK, "rate": "0"}, "rate"),
        ({**QUICK, "budget": "1.5"}, "budget"),
        ({**QUICK, "seed": "<script>alert(1)</script>"}, "seed"),
        ({**QUICK, "heads": "3"}, "heads"),
        ({**QUICK, "target": "python:/tmp/evil.py:make"}, "target"),
        ({"family": "multi-head", "noise": "0.1"}, "noise"),
    ],
)
def test_nonsense_is_refused_field_by_field(form: Any, field: str) -> None:
    with pytest.raises(InvalidForm) as caught:
        read_form(form)
    assert list(caught.value.fields) == [field]


def test_a_form_names_a_demo_and_nothing_else() -> None:
    wish = read_form({"family": "multi-head", "width": 6, "heads": " 2 ", "seed": "5", "budget": "", "rank": None})
    assert wish.target == "demo:multi-head?heads=2&width=6&norm=1&seed=5"
    assert (wish.seed, wish.budget, wish.rate, wish.method) == (5, None, 400, "auto")
    assert read_form({"family": "relu-net", "noise": "0.01"}).method == "relu-net"
    assert read_form({"family": "single-head", "noise": "0.01"}).method == "auto"
