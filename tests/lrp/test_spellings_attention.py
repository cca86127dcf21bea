"""Attention: one rule for `@`, einsum, bmm, scaled_dot_product_attention, products and sums, torch's own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fasterisnet as fi
from lrp.helpers import (
    RULES,
    SMALL,
    TWO_RULES,
    assert_alike,
    assert_close,
    gradient_times_input,
    pictures,
    product_rule,
    quietly,
    relu_rule,
    twins,
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
TOKENS, WIDTH, HEADS = 4, 6, 2
SCALE = (WIDTH // HEADS) ** -0.5
PADDING = torch.tensor([[True, True, True, False], [True, True, True, True]]).view(2, 1, 1, 4)
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
BIAS = pictures(1, HEADS, TOKENS, TOKENS, seed=5)


def heads(t: Tensor) -> Tensor:
    return t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)


def transformer(attend: Attention) -> Callable[[Any, Tensor], Tensor]:
    """Tokens (batch, tokens, 5) through one block of attention with a residual sum."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        q, k, v = (heads(t) for t in m.qkv(x).chunk(3, -1))
        x = x + m.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return m.fc(torch.relu(m.hidden(x)).mean(1))

    return forward


def parts() -> dict[str, nn.Module]:
    return {
        "embed": nn.Linear(5, WIDTH),
        "qkv": nn.Linear(WIDTH, 3 * WIDTH),
        "out": nn.Linear(WIDTH, WIDTH),
        "hidden": nn.Linear(WIDTH, 8),
        "fc": nn.Linear(8, 3),
    }


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * SCALE).softmax(-1) @ v


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape = q.shape
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * SCALE).softmax(-1), v).view(shape)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With beta = 0 what is in the first argument does not matter, be it NaN."""
    shape = q.shape
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    rubbish = torch.full((len(q), TOKENS, TOKENS), math.nan, dtype=q.dtype)
    scores = torch.baddbmm(rubbish, q, k.transpose(1, 2), beta=0.0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v).view(shape)


def by_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for b in range(len(q)):
        rows.append(torch.stack([plain(q[b, h], k[b, h], v[b, h]) for h in range(HEADS)]))
    return torch.stack(rows)


def by_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = (q @ k.mT * SCALE).softmax(-1)
    return (attention[..., None] * v[:, :, None]).sum(-2)


def by_sums_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = ((q[:, :, :, None] * k[:, :, None]).sum(-1) * SCALE).softmax(-1)
    return (attention.unsqueeze(-1) * v.unsqueeze(-3)).sum(dim=-2)


def with_kernel(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


SPELLINGS: dict[str, Attention] = {
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1), v
    ),
    "einsum, other order": lambda q, k, v: torch.einsum(
        "bhjd,bhij->bhid", v, F.softmax(torch.einsum("bhjd,bhid->bhij", k, q) * SCALE, -1)
    ),
    "einsum then transposed": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bihd", (torch.einsum("...id,...jd->...ij", q, k) * SCALE).softmax(-1), v
    ).transpose(1, 2),
    "matmul keywords": lambda q, k, v: torch.matmul(
        input=nn.Softmax(-1)(torch.matmul(input=q, other=k.mT) * SCALE), other=v
    ),
    "bmm": by_bmm,
    "baddbmm, beta=0": by_baddbmm,
    "loop": by_loop,
    "sdpa": F.scaled_dot_product_attention,
    "sdpa, scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE),
    "sdpa, math": with_kernel(SDPBackend.MATH),
    "sdpa, flash": with_kernel(SDPBackend.FLASH_ATTENTION),
    "sdpa, contiguous": lambda q, k, v: F.scaled_dot_product_attention(q.contiguous(), k.clone(), v.contiguous()),
    "sdpa, mask of nothing": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    ),
    "sdpa, by sample": lambda q, k, v: torch.cat(
        [F.scaled_dot_product_attention(a, b, c) for a, b, c in zip(q.split(1), k.split(1), v.split(1), strict=True)]
    ),
    "keys transposed first": lambda q, k, v: torch.matmul((q @ k.permute(0, 1, 3, 2) * SCALE).softmax(dim=-1), v),
    "the other way round": lambda q, k, v: (v.mT @ (k @ q.mT * SCALE).softmax(-2)).mT,
}
# Other orders of the same steps: a stabiliser stands elsewhere.
STABILISED: dict[str, Attention] = {
    "product and sum": by_sum,
    "products and sums": by_sums_alone,
    "scaled queries": lambda q, k, v: ((q * SCALE) @ k.mT).softmax(-1) @ v,
    "divided": lambda q, k, v: (q @ k.mT / math.sqrt(WIDTH // HEADS)).softmax(-1) @ v,
    "both scaled": lambda q, k, v: ((q * SCALE**0.5) @ (k * SCALE**0.5).mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_attention(name: str, rule: str) -> None:
    nets = twins([transformer(plain), transformer(SPELLINGS[name])], **parts())
    scaled_inside = rule == "zplus" and name.startswith(("sdpa", "baddbmm"))  # so the stabiliser stands elsewhere
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule, what=name, **(SMALL if scaled_inside else {}))


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", STABILISED)
def test_attention_with_stabilisers_elsewhere(name: str, rule: str) -> None:
    nets = twins([transformer(plain), transformer(STABILISED[name])], **parts())
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule, what=name, **(SMALL if rule == "zplus" else {}))


@pytest.mark.parametrize("name", ["plain", *SPELLINGS, *STABILISED])
def test_every_factor_takes_half(name: str) -> None:
    """By value: softmax ordinary, half of each product to queries and keys, half to weights and values."""
    attend = {"plain": plain, **SPELLINGS, **STABILISED}[name]
    (net,) = twins([transformer(attend)], **parts())
    images = pictures(2, TOKENS, 5)

    def ruled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = product_rule(lambda a, b: a @ b.mT, q, k) * SCALE
        return product_rule(torch.matmul, scores.softmax(-1), v)

    def ruled(x: Tensor) -> Tensor:
        x = net.embed(x)
        q, k, v = (heads(t) for t in net.qkv(x).chunk(3, -1))
        x = x + net.out(ruled_attention(q, k, v).transpose(1, 2).flatten(2))
        return net.fc(relu_rule(net.hidden(x)).mean(1))

    assert_close(fi.explain(net, images, 1), gradient_times_input(ruled, images), 1e-9, name)


def masked(mask: Tensor) -> Attention:
    return lambda q, k, v: (q @ k.mT * SCALE).masked_fill(~mask, -math.inf).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE + BIAS).softmax(-1) @ v


def fully_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first query may look nowhere: its output is zero."""
    mask = CAUSAL.clone()
    mask[0] = False
    scores = (q @ k.mT * SCALE).masked_fill(~mask, -1e30)
    return (scores.softmax(-1) * mask.any(-1, keepdim=True)) @ v


def sdpa_fully_masked(backend: SDPBackend | None) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = CAUSAL.clone()
        mask[0] = False
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, mask)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask)

    return attend


MASKED: dict[str, tuple[Attention, Attention]] = {
    "padding": (masked(PADDING), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, PADDING)),
    "padding, where": (
        masked(PADDING),
        lambda q, k, v: torch.where(PADDING, q @ k.mT * SCALE, -math.inf).softmax(-1) @ v,
    ),
    "padding, float mask": (
        masked(PADDING),
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.zeros(2, 1, 1, 4, dtype=q.dtype).masked_fill(~PADDING, -math.inf)
        ),
    ),
    "padding, added": (
        masked(PADDING),
        lambda q, k, v: (
            (q @ k.mT * SCALE + torch.zeros(2, 1, 1, 4, dtype=q.dtype).masked_fill(~PADDING, -math.inf)).softmax(-1) @ v
        ),
    ),
    "causal": (masked(CAUSAL), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "causal mask": (masked(CAUSAL), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, CAUSAL)),
    "bias": (biased, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS)),
    "bias, math": (
        biased,
        lambda q, k, v: torch.einsum(
            "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE + BIAS).softmax(-1), v
        ),
    ),
    "fully masked row": (fully_masked, sdpa_fully_masked(None)),
    "fully masked row, math": (fully_masked, sdpa_fully_masked(SDPBackend.MATH)),
}


# A constant added to the scores takes part in their z under z+; filled in, or inside of SDPA, it does not have to.
MASKED_CASES = [
    (name, rule)
    for name in MASKED
    for rule in TWO_RULES
    if rule != "zplus" or name not in ("padding, added", "bias", "fully masked row, math")
]


@pytest.mark.parametrize(("name", "rule"), MASKED_CASES)
def test_masked_attention(name: str, rule: str) -> None:
    nets = twins([transformer(f) for f in MASKED[name]], **parts())
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule, what=name, **(SMALL if rule == "zplus" else {}))


@pytest.mark.parametrize("rule", RULES)
def test_learned_bias_of_the_scores(rule: str) -> None:
    """maxvit and swin: a parameter added to the scores, in SDPA and by hand, keeps its gradient."""

    def net(attend: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda m, x: transformer(lambda q, k, v: attend(q, k, v, m.bias))(m, x)

    bias = nn.Parameter(torch.zeros(1, HEADS, TOKENS, TOKENS))
    by_hand = lambda q, k, v, b: (q @ k.mT * SCALE + b).softmax(-1) @ v  # noqa: E731
    nets = twins([net(by_hand), net(F.scaled_dot_product_attention)], bias=bias, **parts())
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule, **(SMALL if rule == "zplus" else {}))


@pytest.mark.parametrize("rule", RULES)
def test_grouped_queries(rule: str) -> None:
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t[:, :1].repeat_interleave(HEADS, 1) for t in (k, v))
        return plain(q, k, v)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)

    nets = twins([transformer(by_hand), transformer(grouped)], **parts())
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule, **(SMALL if rule == "zplus" else {}))


def multihead(need_weights: bool) -> Callable[[Any, Tensor], Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        return m.fc(torch.relu(m.hidden(x + m.attention(x, x, x, need_weights=need_weights)[0])).mean(1))

    return forward


def multihead_by_hand(m: Any, x: Tensor) -> Tensor:
    x = m.embed(x)
    q, k, v = (heads(t) for t in F.linear(x, m.attention.in_proj_weight, m.attention.in_proj_bias).chunk(3, -1))
    y = m.attention.out_proj(plain(q, k, v).transpose(1, 2).flatten(2))
    return m.fc(torch.relu(m.hidden(x + y)).mean(1))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights: bool, rule: str, training: bool) -> None:
    nets = twins(
        [multihead_by_hand, multihead(need_weights)],
        embed=nn.Linear(5, WIDTH),
        hidden=nn.Linear(WIDTH, 8),
        fc=nn.Linear(8, 3),
        attention=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    )
    for net in nets:
        net.train(training)
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule, **(SMALL if rule == "zplus" else {}))


@pytest.mark.parametrize("rule", ["epsilon", "gamma"])
def test_transformer_encoder_layer(rule: str) -> None:
    """Torch's own layer, which has a fast path in evaluation, against its parts."""

    def whole(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.layer(m.embed(x)).mean(1))

    def apart(m: Any, x: Tensor) -> Tensor:
        x, layer = m.embed(x), m.layer
        q, k, v = (
            heads(t) for t in F.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(3, -1)
        )
        x = layer.norm1(x + layer.self_attn.out_proj(plain(q, k, v).transpose(1, 2).flatten(2)))
        return m.fc(layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x)))).mean(1))

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True)
    nets = twins([apart, whole], embed=nn.Linear(5, WIDTH), fc=nn.Linear(WIDTH, 3), layer=layer)
    assert_alike(*nets, pictures(2, TOKENS, 5), rule=rule)


def test_attention_dropout_is_a_mask() -> None:
    """The weights that SDPA drops follow the random state: finite, no warning, another draw, another map."""
    (net,) = twins([transformer(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))], **parts())
    images = pictures(2, TOKENS, 5)
    maps = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        heatmap, messages = quietly(lambda: fi.explain(net, images, 1))
        assert not messages and bool(heatmap.isfinite().all())
        maps.append(heatmap)
    assert torch.equal(maps[0], maps[1]) and not torch.allclose(maps[0], maps[2])


@pytest.mark.parametrize("rule", RULES)
def test_linear_attention(rule: str) -> None:
    """`q (k^T v)` by einsum and by matrix products."""
    by_hand: Attention = lambda q, k, v: q @ (k.mT @ v)  # noqa: E731
    einsum: Attention = lambda q, k, v: torch.einsum("bhid,bhde->bhie", q, torch.einsum("bhjd,bhje->bhde", k, v))  # noqa: E731
    assert_alike(*twins([transformer(by_hand), transformer(einsum)], **parts()), pictures(2, TOKENS, 5), rule=rule)
