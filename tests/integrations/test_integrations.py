"""Lightning and Accelerate: the logic with stand-ins for both, and both themselves where they are installed."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.integrations import accelerate, lightning
from surefoot.integrations.lightning import IntegrationError


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(48, 3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), x, (x[:, 0] > 0).long()


def exact(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean loss in double precision, by torch alone."""
    model = nn.Sequential(*model.children()) if not isinstance(model, nn.Sequential) else model
    with torch.no_grad():
        outputs = torch.func.functional_call(
            model, {k: v.double() for k, v in model.named_parameters()}, x.double()
        )
        return float(nn.functional.cross_entropy(outputs, y))


def epoch(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for part in torch.arange(len(x)).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


class FakeModule(nn.Module):
    """What a callback sees of a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.logged: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def log(self, name: str, value: float, prog_bar: bool = False) -> None:
        self.logged[name] = value


def test_the_hooks_of_the_callback() -> None:
    model, x, y = problem()
    module, sgd = FakeModule(model), torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = lightning.KeepingHooks(sf.CrossEntropy(), [(x, y)], every=2)
    trainer = SimpleNamespace(optimizers=[sgd], current_epoch=0, world_size=1)
    assert hooks.history == []
    hooks.on_train_epoch_end(trainer, module)
    hooks.on_train_start(trainer, module)
    for trainer.current_epoch in range(4):
        epoch(model, sgd, x, y)
        hooks.on_train_epoch_end(trainer, module)
    assert len(hooks.history) == 3
    assert module.logged["surefoot_accepted"] == 1.0
    assert module.logged["surefoot_value"] == pytest.approx(
        exact(model, x, y), abs=module.logged["surefoot_error"]
    )
    assert module.logged["surefoot_error"] > 0
    trainer.world_size = 2
    with pytest.raises(IntegrationError, match="one process"):
        hooks.on_train_start(trainer, module)


@pytest.mark.skipif(bool(importlib.util.find_spec("lightning")), reason="Lightning is installed")
def test_without_lightning_the_fix_is_said() -> None:
    with pytest.raises(IntegrationError, match="pip install lightning"):
        lightning.keep_if_lower(sf.CrossEntropy(), [])


def test_in_a_loop_of_accelerate() -> None:
    model, x, y = problem()
    if importlib.util.find_spec("accelerate"):
        accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
    else:
        accelerator = SimpleNamespace(unwrap_model=lambda m: m, num_processes=1, prepare=lambda *parts: parts)
    sgd = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapped, optimizer, loader = accelerator.prepare(model, sgd, DataLoader(TensorDataset(x, y), 16))
    keep = accelerate.keep_if_lower(accelerator, wrapped, optimizer, nn.CrossEntropyLoss(), loader)
    for _ in range(3):
        epoch(wrapped, optimizer, x, y)
        assert keep()
    with torch.no_grad():
        model[0].weight.mul_(-1.0)
    assert not keep()
    assert keep.value.lower <= exact(model, x, y) <= keep.value.upper


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs Lightning")
@pytest.mark.filterwarnings("ignore")
def test_in_a_trainer_of_lightning(tmp_path: Any) -> None:
    pl = importlib.import_module("lightning.pytorch")
    model, x, y = problem()

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, certified: bool) -> None:
            super().__init__()
            self.net, self.certified = model, certified
            self.automatic_optimization = not certified

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            if self.certified:
                return self.optimizers(use_pl_optimizer=False).step(*batch) and None
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            if self.certified:
                return sf.CertifiedDescent(self.net, sf.CrossEntropy())
            return torch.optim.Adam(self.parameters(), lr=0.3)

    callback = lightning.keep_if_lower(sf.CrossEntropy(), [(x, y)])
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    options: Any = {"max_epochs": 6, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                    "enable_progress_bar": False, "enable_model_summary": False,
                    "default_root_dir": tmp_path}  # fmt: skip
    trainer = pl.Trainer(callbacks=[callback], **options)
    trainer.fit(Module(certified=False), loader)
    assert len(callback.history) == 7
    accepted = [record for record in callback.history if record.accepted]
    assert all(b.value + b.error < a.value - a.error for a, b in pairwise(accepted))
    assert float(trainer.callback_metrics["surefoot_value"]) == pytest.approx(accepted[-1].value, rel=1e-6)
    assert abs(exact(model, x, y) - accepted[-1].value) <= accepted[-1].error
    before = exact(model, x, y)
    pl.Trainer(**options).fit(Module(certified=True), DataLoader(TensorDataset(x, y), 48))
    assert exact(model, x, y) < before
