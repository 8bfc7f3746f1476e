"""A capture is used again if nothing changed that matters, and never if something did."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from cached import Custom, X, assert_current
from torch import Tensor, nn

from surefoot import zoo
from surefoot.program import capture
from surefoot.program.fingerprint import fingerprint


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()


def test_an_unchanged_model_gives_the_same_object() -> None:
    model = small()
    program = capture(model, X)
    assert capture(model, X) is program
    assert capture(model, torch.randn(4, 3)) is program


def test_steps_of_training_do_not_capture_again() -> None:
    model = small().train()
    program = capture(model, X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
        assert capture(model, X) is program
    assert_current(model)


@pytest.mark.parametrize("name", ["mlp", "resnet18", "vit", "gpt"])
def test_models_of_the_zoo_are_captured_once(name: str) -> None:
    options = zoo.small_options(name)
    model, x = zoo.build(name, **options), zoo.example_input(name, **options)
    assert capture(model, x) is capture(model, x)


def test_shape_type_and_strides_of_the_input_are_part_of_the_key() -> None:
    model = nn.Conv2d(2, 2, 3)
    x = torch.randn(2, 2, 5, 5)
    program = capture(model, x)
    assert capture(model, x[:1]) is not program
    assert capture(model, x.to(memory_format=torch.channels_last)) is not program
    assert capture(model, x) is program
    assert capture(model.double(), x.double()) is not program


def swap_activation(model: nn.Sequential) -> None:
    model[1] = nn.Sigmoid()


def change_attribute(model: nn.Sequential) -> None:
    model[2].eps = 0.5


def train(model: nn.Sequential) -> None:
    model.train()


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def freeze_others(model: nn.Sequential) -> None:
    model[3].requires_grad_(False)


def tie(model: nn.Sequential) -> None:
    model[3].weight = model[0].weight


def drop_bias(model: nn.Sequential) -> None:
    model[3].bias = None


def append(model: nn.Sequential) -> None:
    model.append(nn.ReLU())


def hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, inputs, output: 3 * output)


def replace_forward(model: nn.Sequential) -> None:
    model[1].forward = lambda x: torch.sin(x)


def parametrize(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize(
    "change",
    [
        swap_activation, change_attribute, train, freeze, freeze_others, tie, drop_bias, append, hook,
        replace_forward, parametrize,
    ],
)  # fmt: skip
def test_a_changed_model_is_captured_again(change: Callable[[nn.Sequential], None]) -> None:
    model = small()
    program = capture(model, X)
    assert_current(model)
    change(model)
    assert capture(model, X) is not program
    assert_current(model)


scale = 2.0  # as the next model reads it, and as an attribute of the one after it is called


class ReadsGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scale * super().forward(x)


class ReadsAttribute(nn.Linear):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize(("kind", "is_read"), [(ReadsGlobal, True), (ReadsAttribute, False)])
def test_globals_count_where_they_are_read_not_where_an_attribute_has_their_name(
    kind: type[nn.Linear], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = kind(3, 2), torch.randn(4, 3)
    before = capture(model, x)
    monkeypatch.setitem(globals(), "scale", 3.0)
    assert (capture(model, x) is not before) == is_read


def test_equal_layers_may_change_places() -> None:
    model = small()
    program = capture(model, X)
    model[0], model[3] = model[3], model[0]
    assert capture(model, X) is program  # parameters go by path
    assert_current(model)


def test_a_change_undone_finds_the_old_capture() -> None:
    model = small()
    program = capture(model, X)
    assert capture(model.train(), X) is not program
    assert capture(model.eval(), X) is program


def test_defaults_of_torch_matter() -> None:
    model, x = Custom(lambda self, x: x + torch.zeros(3)).double(), X.double()
    program = capture(model, x)
    try:
        torch.set_default_dtype(torch.float64)
        assert capture(model, x) is not program
    finally:
        torch.set_default_dtype(torch.float32)
    assert capture(model, x) is program


def test_hooks_on_all_modules_matter() -> None:
    model = small()
    capture(model, X)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: 2 * output)
    try:
        assert_current(model)
    finally:
        handle.remove()
    assert_current(model)


class Masked(nn.Module):
    """What is computed from a buffer alone enters the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.exp(self.mask)


def replace_buffer(model: Masked) -> None:
    model.mask = torch.tensor([2.0, 2.0, 2.0])


def write_buffer(model: Masked) -> None:
    model.mask.fill_(3.0)


def write_buffer_data(model: Masked) -> None:
    model.mask.data[1] = 3.0


def load_buffer(model: Masked) -> None:
    model.load_state_dict({**model.state_dict(), "mask": torch.zeros(3)})


def assign_buffer(model: Masked) -> None:
    model.load_state_dict({**model.state_dict(), "mask": torch.zeros(3)}, assign=True)


@pytest.mark.parametrize("change", [replace_buffer, write_buffer, write_buffer_data, load_buffer, assign_buffer])
def test_constants_follow_the_buffers(change: Callable[[Masked], None]) -> None:
    model = Masked()
    program = capture(model, X)
    change(model)
    now = capture(model, X)
    assert now is not program  # readings of the old program may rely on the values
    assert_current(model)
    assert capture(model, X) is now


def test_running_statistics_that_change_make_a_new_program() -> None:
    model = small()
    program = capture(model, X)
    model.train()(X)
    model.eval()
    assert capture(model, X) is not program
    assert_current(model)


def test_what_cannot_be_compared_is_captured_each_time() -> None:
    class Opaque:
        __slots__ = ()

    model = Custom(lambda self, x: x, thing=Opaque())
    assert fingerprint(model) is None
    assert capture(model, X) is not capture(model, X)


def test_models_are_not_kept_alive() -> None:
    def captured() -> weakref.ref[nn.Module]:
        model = Custom(lambda self, x: x)
        model.self_reference = [model]
        model.bound = model.forward
        model.closure = lambda: model
        capture(model, X)
        return weakref.ref(model)

    reference = captured()
    gc.collect()
    assert reference() is None


def test_models_are_not_kept_alive_by_refusals() -> None:
    model = Custom(lambda self, x: x.nothing)
    with pytest.raises(ValueError, match="nothing"):
        capture(model, X)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_captures_of_one_model_are_limited() -> None:
    model = Custom(lambda self, x: x * self.number, number=0.5)
    first = weakref.ref(capture(model, X))
    for step in range(1, 20):
        model.number = float(step)
        capture(model, X)
    gc.collect()
    assert first() is None


def test_equal_models_have_equal_descriptions_and_different_ones_do_not() -> None:
    model = small()
    assert fingerprint(model) == fingerprint(model)
    assert hash(fingerprint(model)) == hash(fingerprint(model))
    assert fingerprint(model) != fingerprint(small().train())
