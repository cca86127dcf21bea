"""Any PyTorch loop makes an ISNet: the loss of a batch comes from a method, the rest is as ever."""

import torch
from bars import drawn, network, tell
from torch import nn

import fasterisnet as fi

torch.manual_seed(0)
model = network()
batches = list(zip(*(tensor.split(32) for tensor in drawn(320)), strict=True))
method = fi.Stochastic(heatmap_weight=0.85, box=(0, 1))  # what images lie in: no normalisation here
method.ranges = fi.calibrate(method, model, batches, epochs=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for _ in range(8):
    for images, labels, masks in batches:
        loss = method.loss(model, images, labels, masks).total
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
tell(model.eval())
