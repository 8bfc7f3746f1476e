"""Values, errors and prices of evaluations of thirty networks, frozen in ``tests/frozen_values.json``.

``python -m benchmarks.frozen_values write`` measures everything and writes the file; ``compare`` measures again
and prints both. A price is the processor time of value, gradient and error together at new weights, in
gradients by torch of the same model in double precision, measured in turn in one run
(:func:`benchmarks.timing.compare`).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from benchmarks.networks import problems
from benchmarks.timing import compare

FILE = Path(__file__).resolve().parent.parent / "tests" / "frozen_values.json"
TYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """A network with its data and its loss; ``scale`` multiplies its initial weights."""

    name: str
    build: Callable[[], nn.Module]
    x: Any
    loss: nn.Module
    scale: float = 1.0

    def subject(self, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        """The model and its inputs in a type, from a fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(self.scale)
        return model, _as(self.x, dtype)


def _as(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {name: _as(value, dtype) for name, value in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


def perceptron(activation: type[nn.Module], *widths: int) -> nn.Module:
    """Linear layers of these widths with an activation between them."""
    pairs = list(pairwise(widths))
    hidden = [layer for a, b in pairs[:-1] for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(*pairs[-1]))


class Attention(nn.Module):
    """A pre-norm block of soft-max attention with one head, and a classifier of the mean token."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v)
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


class Recurrent(nn.Module):
    """A recurrent layer over a sequence and a classifier of its last output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.head = getattr(nn, kind)(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


class Residual(nn.Module):
    """u'' + u of a network u at points: a model that differentiates inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 16), nn.Linear(16, 1)

    def u(self, x: Tensor) -> Tensor:
        value: Tensor = self.second(torch.tanh(self.first(x)))
        return value

    def forward(self, x: Tensor) -> Tensor:
        def scalar(point: Tensor) -> Tensor:
            return self.u(point[None])[0, 0]

        second = torch.func.vmap(torch.func.hessian(scalar))(x)
        return second[:, 0] + self.u(x)


def transformer() -> nn.Module:
    """GPT-2 of two layers, 32 wide, from its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **rates)).eval()
    return model


def letters() -> Tensor:
    """Sixteen letters from each of sixteen places of a text, as numbers."""
    text = "the quick brown fox jumps over the lazy dog and then some more words follow here. " * 3
    names = sorted(set(text))
    ids = torch.tensor([names.index(letter) for letter in text])
    return torch.stack([ids[k : k + 16] for k in range(0, 128, 8)])


def cases() -> Iterator[Case]:
    """All of them."""
    for problem in problems():
        yield Case(problem.name, problem.build, problem.x, problem.objective.bound_to(problem.y))
    draw = torch.Generator().manual_seed(1)
    x6, images, tokens, series = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((16, 6), (16, 1, 8, 8), (8, 10, 16), (12, 7, 5))
    )
    flat = torch.randn(256, 784, generator=draw, dtype=torch.float64)
    three = sf.CrossEntropy(torch.arange(16) % 3)
    wide = partial(perceptron, nn.Softplus, 784, 256, 256, 10)
    yield Case("784-256-256-10, soft-plus", wide, flat, sf.CrossEntropy(torch.arange(256) % 10))
    yield Case("6-12-12-3, tanh", partial(perceptron, nn.Tanh, 6, 12, 12, 3), x6, three)
    yield Case(
        "6-12-12-3, tanh, Huber", partial(perceptron, nn.Tanh, 6, 12, 12, 3), x6, sf.objectives.Huber(x6[:, :3])
    )
    deep = partial(perceptron, nn.Tanh, 6, *[16] * 20, 3)
    yield Case("20 layers, tanh, weights × 2", deep, x6, three, 2.0)
    normal = lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))  # noqa: E731
    yield Case("layer normalisation, GELU", normal, x6, three)
    grouped = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    yield Case("CNN, group normalisation, SiLU, mean-pooling", grouped, images, three)
    batch = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(144, 3)
    )
    yield Case("CNN, batch normalisation in training, soft-plus", batch, images, three)
    logistic = sf.objectives.BinaryCrossEntropy((images.mean((1, 2, 3)) > 0).to(torch.float64)[:, None])
    binary = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 1))  # noqa: E731
    yield Case("CNN, tanh, logistic loss", binary, images, logistic)
    yield Case("attention, GELU", partial(Attention, 16, 3), tokens, sf.CrossEntropy(torch.arange(8) % 3))
    yield Case(
        "attention, GELU, weights × 3",
        partial(Attention, 16, 3),
        tokens,
        sf.CrossEntropy(torch.arange(8) % 3),
        3.0,
    )
    for kind in ("RNN", "LSTM", "GRU"):
        yield Case(kind, partial(Recurrent, kind), series, sf.CrossEntropy(torch.arange(12) % 3))
    points = torch.rand(64, 1, generator=draw, dtype=torch.float64)
    yield Case("residual u'' + u", Residual, points, sf.Square(torch.cos(points)))
    ids = letters()
    yield Case("GPT-2, 2 layers", transformer, {"input_ids": ids, "labels": ids}, sf.objectives.ModelLoss())
    yield Case(
        "GPT-2, 2 layers, weights × 4",
        transformer,
        {"input_ids": ids, "labels": ids},
        sf.objectives.ModelLoss(),
        4.0,
    )


def measured(case: Case, dtype: torch.dtype) -> dict[str, float | str]:
    """Value and error, or the refusal."""
    model, x = case.subject(dtype)
    try:
        found = sf.evaluate(model, x, case.loss)
    except sf.errors.SurefootError as error:
        return {"refused": str(error)}
    return {"value": found.value, "error": found.error}


def priced(case: Case, pairs: int = 15) -> float:
    """What value, gradient and error cost at new weights, in gradients."""
    model, x = case.subject(torch.float64)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    several = [{name: value * (1 + 1e-6 * k) for name, value in weights.items()} for k in range(4)]
    evaluate = evaluation(model, x, case.loss)
    turn = 0

    def ours() -> None:
        nonlocal turn
        turn += 1
        evaluate(several[turn % 4])

    def theirs() -> None:
        outputs = model(**x).loss if isinstance(x, dict) else model(x)
        torch.autograd.grad(case.loss(outputs), list(model.parameters()), allow_unused=True)

    theirs()
    return compare(ours, theirs, pairs, calls=3, warm_up=3).ratio


def evaluation(model: nn.Module, x: Any, loss: nn.Module) -> Callable[[dict[str, Tensor]], object]:
    """Value, gradient and error at any weights."""
    from surefoot.valuation.valuer import Valuer

    valuer = Valuer.of(model, x, loss)

    def once(weights: dict[str, Tensor]) -> object:
        run = valuer.run(weights)
        return valuer.gradient(run), valuer.enclosed(run)

    return once


def everything() -> dict[str, dict[str, Any]]:
    """Values, errors and prices by name."""
    found: dict[str, dict[str, Any]] = {}
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases():
            row: dict[str, Any] = {name: measured(case, dtype) for name, dtype in TYPES.items()}
            row["price"] = round(priced(case), 3) if "value" in row["float64"] else None
            found[case.name] = row
            print(case.name, row, flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "compare"])
    what, found = parser.parse_args().what, everything()
    if what == "write":
        FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    else:
        frozen = json.loads(FILE.read_text())
        for name, row in found.items():
            for dtype in TYPES:
                print(f"{name:50} {dtype} error {row[dtype].get('error')} was {frozen[name][dtype].get('error')}")
            print(f"{name:50} price {row['price']} was {frozen[name]['price']}")
