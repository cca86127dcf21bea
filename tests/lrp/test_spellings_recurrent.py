"""Recurrent layers against their equations: sigmoid gates are constants, tanh is an activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrp.helpers import TWO_RULES, assert_alike, pictures, twins

WIDTH = 6


def lstm_by_hand(m: Any, x: Tensor) -> Tensor:
    rnn, h, c = m.rnn, x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        gates = F.linear(step, rnn.weight_ih_l0, rnn.bias_ih_l0) + F.linear(h, rnn.weight_hh_l0, rnn.bias_hh_l0)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return m.fc(h)


def gru_by_hand(m: Any, x: Tensor) -> Tensor:
    rnn, h = m.rnn, x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        a, b = F.linear(step, rnn.weight_ih_l0, rnn.bias_ih_l0), F.linear(h, rnn.weight_hh_l0, rnn.bias_hh_l0)
        (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
        z, n = (az + bz).sigmoid(), (an + (ar + br).sigmoid() * bn).tanh()
        h = (h - n) * z + n
    return m.fc(h)


def rnn_by_hand(m: Any, x: Tensor) -> Tensor:
    rnn, h = m.rnn, x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        h = torch.relu(F.linear(step, rnn.weight_ih_l0, rnn.bias_ih_l0) + F.linear(h, rnn.weight_hh_l0, rnn.bias_hh_l0))
    return m.fc(h)


def whole(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.rnn(x)[0][:, -1])


KINDS: dict[str, tuple[Any, nn.Module]] = {
    "lstm": (lstm_by_hand, nn.LSTM(5, WIDTH, batch_first=True)),
    "gru": (gru_by_hand, nn.GRU(5, WIDTH, batch_first=True)),
    "rnn": (rnn_by_hand, nn.RNN(5, WIDTH, batch_first=True, nonlinearity="relu")),
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers(kind: str, rule: str) -> None:
    by_hand, layer = KINDS[kind]
    nets = twins([by_hand, whole], rnn=layer, fc=nn.Linear(WIDTH, 3))
    options: dict[str, Any] = {"epsilon": 1e-9, "tolerance": 1e-4} if rule == "zplus" else {}
    assert_alike(*nets, pictures(2, 3, 5), rule=rule, loud=True, what=kind, **options)
