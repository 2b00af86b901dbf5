"""Serving with paged caches: the tokens of transformers' `generate`."""

from __future__ import annotations

import pytest

from tests.support.examples import example

pytest.importorskip("transformers", reason="the model is one of transformers")


@pytest.mark.slow
def test_served_tokens_are_those_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fp8 = example("serve").main()
    assert plain == 1.0
    assert 0.8 < fp8 <= 1.0  # tokens of a random model are nearly as likely as each other
    assert "at once" in capsys.readouterr().out
