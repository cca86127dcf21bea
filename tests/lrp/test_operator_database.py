"""No silently wrong map for any differentiable operation in torch's own database."""

from __future__ import annotations

import pytest

from lrp.operator_database import counts, judged

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operation_is_right_or_loud(part: int) -> None:
    verdicts = judged(part, PARTS)
    silent = [
        f"{v.outcome} ({v.rule}): {v.trial.name}, {v.trial.mode}: {v.reason}"
        for v in verdicts
        if v.outcome in ("wrong", "crashed")
    ]
    assert not silent, "\n".join(silent)
    assert sum(counts(verdicts)["epsilon"].values()) >= 200 / PARTS
    assert counts(verdicts)["epsilon"]["right"] >= 80 / PARTS
