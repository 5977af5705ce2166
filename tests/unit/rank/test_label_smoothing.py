"""Label smoothing: the training loss is torch's smoothed cross-entropy, and the loss of an evaluation stays plain."""

from __future__ import annotations

import torch
from torch import nn

from bench.datasets.base import CLASSIFICATION
from bench.strategies.base import Batch
from compressors.layer import Step

SMOOTHING, CLASSES = 0.2, 5
STEP = Step(index=0, epoch=0, rank=0, world_size=1, seed=1)


def test_the_training_loss_is_smoothed() -> None:
    torch.manual_seed(1)
    ours, theirs = nn.Linear(7, CLASSES), nn.Linear(7, CLASSES)
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(6, 7), torch.arange(6) % CLASSES
    losses: list[torch.Tensor] = []
    batch = Batch(x=x, y=y, step=STEP, lr=0.1, num_parts=2, label_smoothing=SMOOTHING, on_loss=losses.append)
    batch.backward(ours)
    # the definition: the target distribution is (1 - s) at the label, plus s / classes everywhere
    targets = (1 - SMOOTHING) * nn.functional.one_hot(y, CLASSES) + SMOOTHING / CLASSES
    loss = -(targets * theirs(x).log_softmax(1)).sum(1).mean()
    loss.backward()
    torch.testing.assert_close(losses[0], loss.detach())
    torch.testing.assert_close(loss, nn.CrossEntropyLoss(label_smoothing=SMOOTHING)(theirs(x), y))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_without_it_the_loss_is_that_of_an_evaluation() -> None:
    torch.manual_seed(1)
    logits, y = torch.randn(6, CLASSES), torch.arange(6) % CLASSES
    total, _ = CLASSIFICATION.sum_loss_and_correct(logits, y)
    torch.testing.assert_close(CLASSIFICATION.loss(logits, y).double() * 6, total)
    assert CLASSIFICATION.loss(logits, y, SMOOTHING) != CLASSIFICATION.loss(logits, y)
