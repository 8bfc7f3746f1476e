"""The loss of the live model and its gradient, refused where they are no numbers."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError
from surefoot.graph.nodes import in_double
from surefoot.objectives import Objective, as_objective
from surefoot.program.checks import as_inputs, as_targets, selected
from surefoot.valuation.streamed import batch_weight

Closure = Callable[[], tuple[Tensor, Tensor]]
P = ParamSpec("P")
_OF_TUNED_METHODS = {"lr", "learning_rate", "momentum", "betas", "beta1", "beta2", "eps", "nesterov", "amsgrad"}


class OptimizerError(SurefootError, RuntimeError):
    """A step was not taken; the parameters are what they were before."""


def loss_of(model: nn.Module, objective: Objective, x: Any, y: Any, closure: Closure | None = None) -> Tensor:
    """The loss of a batch at the present parameters, by the model or by the closure.

    Raises:
        OptimizerError: if the closure does not return the objective of its outputs.
    """
    if closure is None:
        return objective(outputs_of(model, x), y)
    found = closure()
    if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, Tensor) for part in found)):
        raise OptimizerError(f"a closure returns the pair (outputs, loss) of tensors, got {_kind(found)}")
    outputs, loss = found
    if loss.numel() != 1:
        raise OptimizerError(f"the loss of a closure is one number, got shape {tuple(loss.shape)}")
    with torch.no_grad():
        expected, returned = float(objective(outputs.detach(), y)), float(loss.detach())
    slack = math.sqrt(torch.finfo(loss.dtype).eps)
    if math.isfinite(expected) and not math.isclose(returned, expected, rel_tol=slack, abs_tol=slack):
        raise OptimizerError(
            f"the closure returns the loss {returned:g}, but {type(objective).__name__} of its outputs "
            f"is {expected:g}: the guarantee speaks of the objective, so return that"
        )
    return loss.reshape(())


def outputs_of(model: nn.Module, x: Any) -> Tensor:
    """What a model returns for a batch; gradients are on while it runs, as it may differentiate itself."""
    args, kwargs = as_inputs(x)
    with torch.enable_grad():
        outputs: Tensor = selected(model(*args, **kwargs))
    return outputs if torch.is_grad_enabled() or not isinstance(outputs, Tensor) else outputs.detach()


def weighed(
    model: nn.Module,
    objective: Objective,
    x: Any,
    y: Any,
    parameters: Mapping[str, Tensor],
    *,
    double: bool = False,
) -> tuple[float, Fraction, dict[str, Tensor]]:
    """The loss of a batch and its gradient in some parameters, both times what its mean divides by; and that.

    With ``double`` the loss is computed in double precision from the outputs, and so keeps its digits where it is
    small. Gradients are double anyway, to be added up; where a parameter is not read there is none.

    Raises:
        OptimizerError: if a gradient is wanted of a loss that has none.
    """
    outputs, targets = outputs_of(model, x), as_targets(y)
    weight = batch_weight(objective, outputs, targets)
    if not weight:
        return 0.0, weight, {}
    loss = objective(in_double(outputs), in_double(targets)) if double else objective(outputs, y)
    slopes: dict[str, Tensor] = {}
    if parameters:
        if not loss.requires_grad:
            raise OptimizerError("the loss does not depend on the parameters")
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters, found, strict=True)
        slopes = {name: slope.double() * float(weight) for name, slope in pairs if slope is not None}
    return float(weight) * float(loss.detach()), weight, slopes


def explained(constructor: Callable[P, None]) -> Callable[P, None]:
    """The same constructor, which answers a keyword that it does not take with what to write instead."""

    @wraps(constructor)
    def called(*args: P.args, **options: P.kwargs) -> None:
        if type(args[0]).__init__ is called:  # not one that a subclass calls
            _check_options(type(args[0]), options)
        constructor(*args, **options)

    return called


def _check_options(kind: type, options: Iterable[str]) -> None:
    taken: dict[str, None] = {}
    for base in kind.__mro__:
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        taken.update(dict.fromkeys(parameters))
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    for name in options:
        if name in taken:
            continue
        if name in _OF_TUNED_METHODS and "loader" in taken:
            fix = "set it where the optimizer is made, torch.optim.Adam(model.parameters(), lr=0.001)"
        elif name in _OF_TUNED_METHODS:
            fix = "there is nothing to tune: every step is as long as its proof allows. Leave it out"
            if "direction" in taken:
                fix += ", or let another optimizer propose: direction=torch.optim.SGD(model.parameters(), lr=0.1)"
        elif name == "weight_decay" and "regularizer" in taken:
            fix = "write regularizer=surefoot.Ridge(weight_decay)"
        else:
            names = [each for each in taken if each not in ("self", "options", "defaults")]
            close = difflib.get_close_matches(name, names, n=1)
            fix = f"did you mean {close[0]}=?" if close else f"its arguments are {', '.join(names)}"
        raise TypeError(f"{kind.__name__} takes no {name}=: {fix}")


def check_objective(given: object, bringing: str) -> Objective:
    """An objective of optimizers is a loss without targets; ``bringing`` says what brings them.

    Raises:
        TypeError, ValueError: if it is not.
    """
    objective = as_objective(given) if isinstance(given, nn.Module) else given
    if not isinstance(objective, Objective):
        raise TypeError(
            "the objective is a loss such as surefoot.CrossEntropy(), or surefoot.objectives.ModelLoss() if the "
            f"model returns its loss; got {type(objective).__name__}"
        )
    if objective.targets is not None:
        name = type(objective).__name__
        raise ValueError(f"pass {name}() without targets: they come with {bringing}")
    return objective


def gradient_of(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> tuple[float, dict[str, Tensor]]:
    """The value of a loss and its gradient; ``.grad`` of each parameter holds it too.

    Raises:
        OptimizerError: if either is not finite, or the loss does not depend on the parameters.
    """
    if not loss.requires_grad:
        raise OptimizerError(
            "the loss does not depend on the parameters by differentiable operations: return it from the "
            "closure without detach(), item() or no_grad()"
        )
    value = number(loss)
    slopes = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradient: dict[str, Tensor] = {}
    for (name, parameter), slope in zip(parameters.items(), slopes, strict=True):
        gradient[name] = torch.zeros_like(parameter) if slope is None else slope.detach().to_dense()
        check_slope(name, gradient[name], value)
        parameter.grad = gradient[name]
    return value, gradient


def check_slope(name: str, slope: Tensor, value: float) -> None:
    """The gradient in a parameter is finite.

    Raises:
        OptimizerError: if it is not.
    """
    if not bool(torch.isfinite(slope).all()):
        raise OptimizerError(
            f"the gradient with respect to '{name}' is not finite at loss {value:g}: look for divisions "
            "by zero and overflow there, or compute in double precision"
        )


def number(loss: Tensor | float) -> float:
    """The value of a loss.

    Raises:
        OptimizerError: if it is not finite.
    """
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    if not math.isfinite(value):
        raise OptimizerError(
            f"the loss is {value}: check the data for NaN and infinite entries, and the parameters of the model"
        )
    return value


def _kind(found: object) -> str:
    if isinstance(found, tuple | list):
        return f"{type(found).__name__} of ({', '.join(type(part).__name__ for part in found)})"
    return type(found).__name__
