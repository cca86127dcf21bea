"""Every training method, with and without deep supervision, through the same checks (see tester.py)."""

from __future__ import annotations

import pytest

from methods.tester import ALL, CHECKS, IDS, NETS, Tester


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "deep"), ALL, ids=IDS)
def test_method(name: str, deep: bool, check: str) -> None:
    getattr(Tester(name, deep), f"check_{check}")()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("name", "deep"), ALL, ids=IDS)
def test_finite_on_random_nets(name: str, deep: bool, net: str, seed: int) -> None:
    Tester(name, deep).finite_on(net, seed)
