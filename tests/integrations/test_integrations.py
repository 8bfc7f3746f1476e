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
from surefoot.integrations.keeping import IntegrationError, Keeper


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


def test_without_an_optimizer_nothing_would_go_back() -> None:
    model, x, y = problem()
    with pytest.raises(IntegrationError, match="none was given"):
        Keeper(model, [], [(x, y)], sf.CrossEntropy())


def test_the_values_that_are_kept_go_down_whatever_trains() -> None:
    model, x, y = problem()
    adam = torch.optim.Adam(model.parameters(), lr=0.5)  # far too long: some epochs go up
    keeper = Keeper(model, [adam], DataLoader(TensorDataset(x, y), 16), sf.CrossEntropy())
    for _ in range(25):
        before = exact(model, x, y)
        epoch(model, adam, x, y)
        reached = exact(model, x, y)
        check = keeper.check()
        assert check.value.lower <= reached <= check.value.upper
        assert exact(model, x, y) == (reached if check.kept else before)
        assert check.kept == (reached < before)
    kept = [check.kept for check in keeper.history]
    assert 2 < sum(kept) < len(kept)
    assert adam.param_groups[0]["lr"] < 0.5
    assert keeper.value.upper < keeper.history[0].value.lower


def test_weights_that_blow_up_go_back_with_the_state_of_the_optimizer() -> None:
    model, x, y = problem()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    epoch(model, adam, x, y)
    keeper = Keeper(model, [adam], (x, y), nn.CrossEntropyLoss(), slower=0.25)
    weights = [value.clone() for value in model.parameters()]
    moments = [state["exp_avg"].clone() for state in adam.state.values()]
    for rate in (0.01 / 4, 0.01 / 16):
        epoch(model, adam, x, y)
        with torch.no_grad():
            next(iter(model.parameters())).fill_(torch.inf)
        assert not keeper.check().kept
        assert adam.param_groups[0]["lr"] == pytest.approx(rate)
        for value, before in zip(model.parameters(), weights, strict=True):
            assert torch.equal(value, before)
        for state, moment in zip(adam.state.values(), moments, strict=True):
            assert torch.equal(state["exp_avg"], moment)


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
    hooks = lightning.KeepingHooks([(x, y)], sf.CrossEntropy(), every=2)
    trainer = SimpleNamespace(optimizers=[sgd], current_epoch=0, world_size=1)
    assert hooks.history == []
    hooks.on_train_epoch_end(trainer, module)
    hooks.on_train_start(trainer, module)
    for trainer.current_epoch in range(4):
        epoch(model, sgd, x, y)
        hooks.on_train_epoch_end(trainer, module)
    assert len(hooks.history) == 3
    assert module.logged["surefoot_kept"] == 1.0
    assert module.logged["surefoot_value"] == pytest.approx(exact(model, x, y), abs=1e-12)
    assert 0 < module.logged["surefoot_error"] < 1e-10
    trainer.world_size = 2
    with pytest.raises(IntegrationError, match="one process"):
        hooks.on_train_start(trainer, module)


@pytest.mark.skipif(bool(importlib.util.find_spec("lightning")), reason="Lightning is installed")
def test_without_lightning_the_fix_is_said() -> None:
    with pytest.raises(IntegrationError, match="pip install lightning"):
        lightning.keep_if_lower([], sf.CrossEntropy())


def test_in_a_loop_of_accelerate() -> None:
    model, x, y = problem()
    if importlib.util.find_spec("accelerate"):
        accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
    else:
        accelerator = SimpleNamespace(unwrap_model=lambda m: m, num_processes=1, prepare=lambda *parts: parts)
    sgd = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapped, optimizer, loader = accelerator.prepare(model, sgd, DataLoader(TensorDataset(x, y), 16))
    keeper = accelerate.keep_if_lower(accelerator, wrapped, optimizer, loader, nn.CrossEntropyLoss())
    for _ in range(3):
        epoch(wrapped, optimizer, x, y)
        assert keeper.check().kept
    with torch.no_grad():
        model[0].weight.mul_(-1.0)
    assert not keeper.check().kept
    assert keeper.value.lower <= exact(model, x, y) <= keeper.value.upper


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

    callback = lightning.keep_if_lower([(x, y)], sf.CrossEntropy())
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    options: Any = {"max_epochs": 6, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                    "enable_progress_bar": False, "enable_model_summary": False,
                    "default_root_dir": tmp_path}  # fmt: skip
    trainer = pl.Trainer(callbacks=[callback], **options)
    trainer.fit(Module(certified=False), loader)
    assert len(callback.history) == 7
    kept = [check.value for check in callback.history if check.kept]
    assert all(after.upper < before.lower for before, after in pairwise(kept))
    assert float(trainer.callback_metrics["surefoot_value"]) == pytest.approx(kept[-1].value, rel=1e-6)
    assert kept[-1].lower <= exact(model, x, y) <= kept[-1].upper
    before = exact(model, x, y)
    pl.Trainer(**options).fit(Module(certified=True), DataLoader(TensorDataset(x, y), 48))
    assert exact(model, x, y) < before
