"""The function that an optimizer minimises: its values, its gradient, and whether it is still the same."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.calculus.adjoint.gradient import ProvedGradient, proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.graph import Graph
from surefoot.objectives import Objective, Regularizer, Ridge
from surefoot.operations.captured import capture
from surefoot.optim.evaluation import Closure, OptimizerError, gradient_of, loss_of, number
from surefoot.optim.held_parameters import HeldParameters
from surefoot.optim.stored import InDouble
from surefoot.processes import Processes
from surefoot.program.checks import is_loader


class KnownFunction(HeldParameters):
    """An optimizer that knows the function it minimises: the loss of a model on data, plus a regulariser."""

    takes_loaders = False  # whether step(loader) is one on the objective of all its batches
    processes: Processes | None = None  # those that have a part of the data each
    objective: Objective
    regularizer: Regularizer | None
    until: Literal["proved"] | None
    changed: bool

    def forget(self) -> None:
        """Drop what was kept between steps and rests on the function: it is not the same any more."""

    def check_data(self, x: Any, y: Any) -> None:
        """Targets are given exactly where the objective takes them; a loader, where it is taken, brings them.

        Raises:
            OptimizerError: if they are not; on all processes, if there are several.
        """
        if self.processes is not None:
            self.processes.together(lambda: self.check_part(x, y))
        else:
            self.check_part(x, y)

    def check_part(self, x: Any, y: Any) -> None:
        """The same for what this process has."""
        if x is None:
            raise OptimizerError(
                "a step takes the batch: write step(x, y). It computes the loss and its gradient, so there is no "
                "backward() before it"
            )
        if self.takes_loaders and is_loader(x):
            if y is not None:
                raise OptimizerError("a loader brings its targets: step(loader)")
            if self.until is not None:
                raise OptimizerError("until='proved' is about one batch: join the data, or leave it out")
            return
        if (y is None) == self.objective.takes_targets:
            name = type(self.objective).__name__
            how = "step(x, y)" if self.objective.takes_targets else "step(x)"
            raise OptimizerError(f"{name} {'takes' if self.objective.takes_targets else 'has no'} targets: {how}")

    @property
    def _options(self) -> str:
        return f"{self.objective.operation}{self.objective.options}{self.regularizer}"

    def look_around(self) -> bool:
        """Whether the function was changed since the last step; then what rests on it is forgotten."""
        changed = self.watch.function_changed(self.model, self._options)
        if changed:
            self.forget()
        return changed

    def graph(self, x: Any, captured: Graph | None = None) -> Graph:
        """The graph of the model on such a batch; if the function changed, what rests on it is forgotten."""
        known = self.watch.same_graph(x) if captured is None and self.quiet else None
        if known is not None:
            return known
        graph = capture(self.model, x) if captured is None else captured
        if self.watch.other_graph(x, graph):
            self.changed = True
            self.forget()
        return graph

    def in_double(self, x: Any, y: Any, loss: float, graph: Graph) -> InDouble:
        """The objective of the batch in double precision, as its graph computes it.

        Raises:
            OptimizerError: if its value is not the loss that the model computed.
        """
        exact = InDouble(self.model, x, self.objective.bound_to(y), graph)
        self.check_value(exact.value + self.penalty, loss)
        return exact

    def proved_gradient(self, x: Any, y: Any, loss: float) -> ProvedGradient:
        """The gradient of the loss of the batch, without the regulariser, with a bound on its error.

        Raises:
            OptimizerError: if its value is not the loss that the model computed.
        """
        found = proved_gradient(Analysis.of(self.model, x, self.objective.bound_to(y)))
        self.check_value(found.value + self.penalty, loss)
        return found

    def check_value(self, proved: float, loss: float) -> None:
        """The function of which something is proved has the value of the live model, up to round-off.

        Raises:
            OptimizerError: if it has not.
        """
        unit = max(torch.finfo(value.dtype).eps for value in self.trainable.values())
        if abs(proved - loss) > 16 * math.sqrt(unit) * (1 + abs(loss)):
            raise OptimizerError(
                f"the model computes the loss {loss:g}, what can be proved is about a function of value "
                f"{proved:g}: a part of the model reads what is not among its parameters, buffers and attributes"
            )

    @property
    def penalty(self) -> float:
        """The regulariser at the present parameters, in double precision."""
        return 0.0 if self.regularizer is None else self.regularizer.enclosed(self.trainable)[0]

    @property
    def ridge(self) -> Ridge | None:
        """The regulariser, for what knows about a ridge only.

        Raises:
            OptimizerError: if it is another one.
        """
        if not isinstance(self.regularizer, Ridge | None):
            raise OptimizerError(f"second-order models take a ridge as regulariser, got {self.regularizer!r}")
        return self.regularizer

    def value(self, x: Any, y: Any = None, closure: Closure | None = None) -> float:
        """The objective at the present parameters, without derivatives.

        Raises:
            OptimizerError: if it is not finite, or the closure does not return what it should.
        """
        with torch.no_grad():
            return number(self._regularized(loss_of(self.model, self.objective, x, y, closure)))

    def value_and_gradient(
        self, x: Any, y: Any = None, closure: Closure | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """The objective and its gradient at the present parameters; ``.grad`` of each parameter holds it too.

        If the regulariser has kinks, the gradient is that of its smooth part.

        Raises:
            OptimizerError: if either is not finite, or the closure does not return what it should.
        """
        trainable = self.trainable
        with torch.enable_grad():
            loss, gradient = gradient_of(loss_of(self.model, self.objective, x, y, closure), trainable)
        if self.regularizer is None:
            return loss, gradient
        with torch.no_grad():
            loss = number(loss + float(self.regularizer(trainable)))
            for name, slope in self.regularizer.gradient(trainable).items():
                gradient[name] += slope.to(gradient[name].dtype)
        return loss, gradient

    def _regularized(self, loss: Tensor) -> Tensor:
        return loss if self.regularizer is None else loss + self.regularizer(self.trainable)
