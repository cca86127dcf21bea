"""Networks with torch's attention modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from lrp.helpers import (
    gradient_times_input,
    parameter_gradients,
    pictures,
)
from lrp.small_nets import (
    RULES,
    assert_derivative,
    assert_explained_alike,
    attention_net,
)


def halved(t: Tensor) -> Tensor:
    """A factor that takes half of the relevance."""
    return t.detach() + 0.5 * (t - t.detach())


def written_out(attention: nn.MultiheadAttention, x: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
    """Self-attention from its parts; every product of activations gets its factors from `factor`."""
    batch, tokens, width = x.shape
    q, k, v = (
        t.view(batch, tokens, attention.num_heads, -1).transpose(1, 2)
        for t in F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    )
    scores = factor(q) @ factor(k).transpose(-2, -1) / math.sqrt(width / attention.num_heads)
    mixed = factor(scores.softmax(-1)) @ factor(v)
    return attention.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
def test_multihead_attention(rule: str, need_weights: bool) -> None:
    """Half of the relevance to each factor of every product, in eval mode as well."""

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.embed(x)
        return m.fc(m.attention(tokens, tokens, tokens, need_weights=need_weights)[0].mean(1))

    model = attention_net(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True))
    images = pictures(2, 4, 5)
    factor = halved if rule == "epsilon" else lambda t: t

    def surrogate(x: Tensor) -> Tensor:
        return model.fc(written_out(model.attention, model.embed(x), factor).mean(1))

    torch.testing.assert_close(surrogate(images), model(images), rtol=1e-10, atol=1e-12)
    expected = gradient_times_input(surrogate, images)
    heatmap = explain(model, images, 1, rule=rule, strict=True)
    torch.testing.assert_close(heatmap, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_multihead_attention_is_its_parts(rule: str) -> None:
    """The same under every rule as attention written out in the model itself, gradients included."""

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.embed(x)
        return m.fc(m.attention(tokens, tokens, tokens)[0].mean(1))

    def parts(m: Any, x: Tensor) -> Tensor:
        return m.fc(written_out(m.attention, m.embed(x), lambda t: t).mean(1))

    nets = [attention_net(f, attention=nn.MultiheadAttention(8, 2, batch_first=True)) for f in (forward, parts)]
    assert_explained_alike(*nets, pictures(2, 4, 5), rule=rule, tolerance=1e-9)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_transformer_layer_has_no_way_around_the_engine(rule: str, frozen: bool) -> None:
    """Eval mode, where torch has a fused kernel, gives the map of train mode, where it has none; under no_grad too."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="relu")
    model = attention_net(lambda m, x: m.fc(m.layer(m.embed(x)).mean(1)), layer=layer).requires_grad_(not frozen)
    images = pictures(2, 4, 5)
    slow = explain(model.train(), images, 1, rule=rule, strict=True)
    with torch.no_grad():
        fast = explain(model.eval(), images, 1, rule=rule, strict=True)
    assert slow.abs().max() > 0
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    ordinary = gradient_times_input(model.train(), images)
    assert torch.allclose(fast, ordinary, rtol=1e-8) is (rule == "gradient")


def test_transformer_encoder_in_eval_mode_trains() -> None:
    """Two layers, gelu, norm first, a padding mask: exact gradients by finite differences."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, activation="gelu", norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    model = attention_net(
        lambda m, x: m.fc(m.encoder(m.embed(x), src_key_padding_mask=padding).mean(1)), encoder=encoder
    )
    images = pictures(2, 4, 5)

    def loss(create_graph: bool = False) -> Tensor:
        return explain(model, images, 1, create_graph=create_graph, strict=True).square().sum()

    grads = parameter_gradients(model, loss(True))
    for name in ("embed.weight", "encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.1.linear1.weight"):
        assert grads[name].abs().max() > 0
        assert_derivative(loss, model.get_parameter(name).data, grads[name])
