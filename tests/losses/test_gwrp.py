"""GWRP against the authors' numbers and against a plain full sort."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.losses import depth_shares, gwrp
from fasterisnet.losses.gwrp import full_precision

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "gwrp.npz"))
CASES = [key for key in GOLDEN if key[0] in "ab" and key.endswith((".official", ".paper"))]


def by_full_sort(values: Tensor, decay: float) -> Tensor:
    ranked = values.double().sort(dim=-1, descending=True).values
    weights = torch.tensor([decay**i for i in range(values.shape[-1])], dtype=torch.float64)
    return (ranked * weights).sum(-1) / weights.sum()


def test_golden_has_every_case() -> None:
    assert len(CASES) == 2 * 6 * 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("key", CASES)
def test_golden(key: str, dtype: torch.dtype, tolerance: float) -> None:
    case, decay = key.rsplit(".", 1)[0].split(".d")
    result = gwrp(torch.tensor(GOLDEN[f"{case}.x"], dtype=dtype), float(decay), start_dim=3)
    assert result.dtype == dtype
    torch.testing.assert_close(result, torch.tensor(GOLDEN[key], dtype=dtype), rtol=tolerance, atol=0)


@pytest.mark.parametrize("decay", ["0.7", "0.8", "1"])
def test_golden_deep_supervision(decay: str) -> None:
    losses = torch.tensor(GOLDEN["lds.x"])
    result = (depth_shares(losses, float(decay)) * losses).sum()
    torch.testing.assert_close(result, torch.tensor(GOLDEN[f"lds.d{decay}.official"]), rtol=1e-9, atol=0)


def test_deep_supervision_decay_is_that_of_the_paper() -> None:
    losses = torch.tensor(GOLDEN["lds.x"])
    assert (depth_shares(losses) * losses).sum().item() == pytest.approx(GOLDEN["lds.d0.7.official"].item(), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 3000),
    decay=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    negative=st.booleans(),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_agrees_with_a_full_sort(
    n: int, decay: float, seed: int, negative: bool, ties: bool, dtype: torch.dtype
) -> None:
    values = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    values = values if negative else values.abs()
    values = values.round() if ties else values
    error = (gwrp(values, decay).double() - by_full_sort(values, decay)).abs()
    assert (error <= 8 * torch.finfo(dtype).eps * values.abs().amax(-1)).all()


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.996, 0.999])
def test_ranks_left_out_do_not_count(decay: float) -> None:
    values = torch.rand(2, 50176, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gwrp(values, decay).double(), by_full_sort(values, decay), rtol=3e-7, atol=0)


def test_gradient_is_the_weight_of_the_rank() -> None:
    values = torch.tensor([0.2, 0.9, 0.5], dtype=torch.float64, requires_grad=True)
    gwrp(values, 0.5).backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.25, 1.0, 0.5], dtype=torch.float64) / 1.75)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99, 1.0])
def test_gradient_numerically(decay: float) -> None:
    values = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: gwrp(v, decay, start_dim=1), (values,))
    assert torch.autograd.gradgradcheck(lambda v: gwrp(v**2, decay, start_dim=1), (values,))


@pytest.mark.parametrize("shape", [(30,), (5, 6), (2, 3, 5), (1, 2, 3, 5)])
def test_any_number_of_spatial_dimensions(shape: tuple[int, ...]) -> None:
    flat = torch.rand(2, 4, 30, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(gwrp(flat.reshape(2, 4, *shape), 0.9, start_dim=2), gwrp(flat, 0.9), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_pooled_in_float32(dtype: torch.dtype) -> None:
    values = torch.rand(2, 1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gwrp(values, 0.99)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, gwrp(values.float(), 0.99), rtol=0, atol=0)


def test_full_precision_switches_autocast_off() -> None:
    product = full_precision(lambda values: values @ values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert product(torch.ones(2, 2)).dtype == torch.float32
        assert product(torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_stay_visible(decay: float, bad: float) -> None:
    values = torch.zeros(1000)
    values[3] = bad
    assert not gwrp(values, decay).isfinite()


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_impossible_decay_is_an_error(decay: float) -> None:
    with pytest.raises(InputError, match="between 0"):
        gwrp(torch.rand(3), decay)


def test_nothing_to_pool_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one value"):
        gwrp(torch.rand(3, 0), 0.9)
