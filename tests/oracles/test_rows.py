"""Whether samples stay apart in an operation, against its Jacobian."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.chain import Chain
from surefoot.oracles.stages import stages

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0, 2),
    "product of samples": lambda x: x.transpose(0, 1) @ x,
    "softmax over samples": lambda x: x.softmax(dim=0),
    "softmax": lambda x: x.softmax(dim=-1),
    "normalised over all": lambda x: F.layer_norm(x, [4, 4, 4]),
    "normalised": lambda x: F.layer_norm(x, [4, 4]),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "cumulative": lambda x: x.cumsum(dim=0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, dims=0),
    "mean over samples": lambda x: x - x.mean(dim=0, keepdim=True),
    "mean of everything": lambda x: x - x.mean(),
    "mean": lambda x: x - x.mean(dim=1, keepdim=True),
    "mixed by a view": lambda x: x.permute(2, 1, 0).reshape(4, 4, 4),
    "merged and split": lambda x: x.reshape(16, 4).reshape(4, 4, 4),
    "shifted": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "cut and joined": lambda x: torch.cat([x[1:], x[:1]], dim=0),
    "joined": lambda x: torch.cat([x[:, 1:], x[:, :1]], dim=1),
    "batch product": lambda x: torch.bmm(x, x),
    "one sample for all": lambda x: x + x[2],
    "convolved without a batch": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "pooled over samples": lambda x: F.avg_pool3d(x[None], 3, stride=1, padding=1)[0],
    "largest of neighbours": lambda x: F.max_pool1d(x, 3, stride=1, padding=1),
    "largest of samples": lambda x: F.max_pool3d(x[None], 3, stride=1, padding=1)[0],
    "largest without a batch": lambda x: F.max_pool2d(x, 3, stride=1, padding=1),
    "convolved backwards": lambda x: F.conv_transpose1d(x, torch.ones(4, 4, 3, dtype=x.dtype), padding=1),
    "scaled by samples": lambda x: F.layer_norm(x, [4, 4], torch.arange(16.0).reshape(4, 4)),
    "expanded": lambda x: x[:, :1].expand(4, 4, 4),
    "one sample expanded": lambda x: x[0].expand(4, 4, 4),
    "squeezed": lambda x: x.unsqueeze(1).squeeze(1),
    "samples moved in": lambda x: x.unsqueeze(0).transpose(0, 1).squeeze(1),
    "largest": lambda x: x - x.amax(dim=-1, keepdim=True),
    "largest sample": lambda x: x - x.amax(dim=0),
    "cumulative within": lambda x: x.cumsum(dim=2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention over samples": lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_mixes_samples_is_not_taken_for_one_that_does_not(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(OPERATIONS[name](torch.tanh(self.first(x)))))

    x = torch.randn(4, 4, 4)
    chain = Chain(Model(), x)
    claimed = all(stages(computation, 4).samples == 4 for computation in chain)
    jacobian = torch.autograd.functional.jacobian(OPERATIONS[name], x).reshape(4, 16, 4, 16)
    mixed = any(bool(jacobian[i, :, j].any()) for i in range(4) for j in range(4) if i != j)
    assert not (claimed and mixed)


def test_a_language_model_with_tokens_in_a_dimension_of_their_own_needs_no_large_blocks() -> None:
    """The step is that of the tokens as rows; blocks of a sample would have 16,000 × 15,984 numbers each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 6), nn.Tanh(), nn.Linear(6, 1000)).double()
    ids, y = torch.randint(0, 30, (4, 16)), torch.randint(0, 1000, (4, 16))
    whole = sf.oracles.gauss_newton(sf.Chain(model, ids), sf.CrossEntropy(y), 1e-2, "primal", tolerance=1e-8)
    rows = nn.Sequential(model, nn.Flatten(0, 1))
    flat = sf.oracles.gauss_newton(
        sf.Chain(rows, ids), sf.CrossEntropy(y.flatten()), 1e-2, "primal", tolerance=1e-8
    )
    assert whole.solved
    scale = max(float(part.abs().max()) for part in flat.direction.values())
    for path, part in whole.direction.items():
        assert float((part - flat.direction[f"0.{path}"]).abs().max()) <= 1e-6 * scale
