"""The example's gradients are those of a model made of torch's norms."""

import prenorm_block
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quack_core.testing.compare import assert_accurate


class TorchNorm(nn.RMSNorm):
    """torch's module with our signature."""

    def forward(self, x, residual, prenorm):
        stream = x + residual
        return super().forward(stream), stream


def torch_rmsnorm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


@pytest.fixture
def twins(device, monkeypatch):
    """The example's model, and with the same parameters one of torch's norms."""
    torch.manual_seed(0)
    ours = prenorm_block.Model(vocabulary=64).to(device)
    monkeypatch.setattr(prenorm_block, "RMSNorm", TorchNorm)
    theirs = prenorm_block.Model(vocabulary=64).to(device)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def gradients(model, tokens):
    loss = prenorm_block.loss_of(model, tokens)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_gradients_are_those_of_torch(device, monkeypatch, twins):
    ours, theirs = twins
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(1)).to(device)
    found = gradients(ours, tokens)
    monkeypatch.setattr(prenorm_block, "rmsnorm", torch_rmsnorm)
    baseline = gradients(theirs, tokens)
    right = gradients(theirs.double(), tokens)
    names = ["loss", *dict(ours.named_parameters())]
    for name, each, exact, torchs in zip(names, found, right, baseline, strict=True):
        # Errors spread over a parameter on their way back, so the whole of it is one row.
        assert_accurate(each.flatten(), exact.flatten(), torchs.flatten(), name=name)


def test_it_learns(capsys):
    prenorm_block.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2  # guessing is log(64) = 4.2
