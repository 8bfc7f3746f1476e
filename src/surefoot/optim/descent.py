"""Descent without a learning rate: every step is proved to descend before it is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from surefoot.objectives import Objective, Regularizer, Ridge
from surefoot.optim.ahead import AHEAD, Ahead
from surefoot.optim.base import Closure, GuaranteedOptimizer, OptimizerError, Parameters
from surefoot.optim.by_evaluation import ByEvaluation
from surefoot.optim.evaluation import explained
from surefoot.optim.record import StepRecord
from surefoot.processes import Processes
from surefoot.program.checks import is_loader


class CertifiedDescent(GuaranteedOptimizer):
    r"""Descent with steps that are proved to descend; there is no learning rate to choose.

    * ``proof="evaluation"``, the default: the objective is evaluated where the step leads, with a bound on its
      round-off, and the step is taken only if the value in exact arithmetic is lower
      (:mod:`surefoot.optim.by_evaluation`). It costs a gradient and some per step, works for everything that can
      be evaluated (rectifiers, max-pooling, batch-normalisation, attention) and along any direction.
    * ``proof="segment"``, ``"ball"`` or ``"blocks"``: the decrease is promised ahead, from bounds on derivatives,
      before anything is evaluated (:mod:`surefoot.optim.ahead`). That costs 3 to 8 gradients per step and needs
      smooth operations.

    Every record in the history holds the proof: the decrease that was proved and the one that came out.
    :meth:`stationarity` is the anytime bound on the smallest gradient norm.

    What is proved is about the objective of the batch it was given, in exact arithmetic, between the weights as
    they were and the new ones as they are stored, rounded to their type. A step without a proof is not taken, and
    the record says why; after two of them a warning does. With mini-batches every step descends on its own batch;
    for the objective of all data nothing is proved. ``step(loader)`` takes one step on the objective of all data,
    in the memory of one batch: the loader is any re-iterable of batches ``(x, y)``.

    In training mode batch-normalisation uses the statistics of the batch, in what is proved too; running
    statistics move once per step that is taken. Random layers are refused: put them into evaluation mode.

    What is kept from step to step is checked against the live model and made anew if the model was changed.

    Args:
        model: the network.
        objective: a loss without targets.
        proof: see above.
        direction: where to go. ``"lbfgs"`` (the default), ``"conjugate"``, ``"gradient"``,
            ``"gauss_newton"``; a ``torch.optim`` class
            or an instance, which proposes steps and keeps its state consistent with what was taken; or a function
            of weights and gradient, by name, that returns a direction. Promises ahead take ``"conjugate"`` (along
            segments, their default) and ``"gradient"``.
        order: Taylor coefficients along a segment, 2 to 5: more cost more and allow longer steps.
        regularizer: added to the loss; with ``proof="evaluation"``. Absolute values in it
            (:class:`surefoot.objectives.ElasticNet`) are met by proximal gradient steps, whose length is searched;
            the stationarity in the history is then the norm of the gradient mapping.
        weight_decay: the same as ``regularizer=surefoot.Ridge(weight_decay)``.
        params: the parameters that are optimised, or parameter groups; all that are trainable by default. Layers
            that are unfrozen later take part after ``add_param_group``.
        lower: a number that the objective never falls below; see :class:`GuaranteedOptimizer`.
        until: ``"proved"`` to go on until gradient descent from the weights is proved to converge, and stop there.
        progress: called with the record of each step.
        group: a process group of ``torch.distributed`` whose processes have the same model and a part of the data
            each, none at all allowed: ``step`` is then called by all of them, on the objective of all samples
            together. Process 0 decides (:mod:`surefoot.optim.shards`), and has the gradient in ``.grad``.
            ``processes.sent`` counts the bytes that cross.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(30)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 1e-3
    (True, True)
    """

    @explained
    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None = None,
        *,
        proof: str = "evaluation",
        direction: Any = None,
        order: int = 3,
        regularizer: Regularizer | None = None,
        weight_decay: float = 0.0,
        params: Parameters | None = None,
        lower: float | None = None,
        until: Literal["proved"] | None = None,
        progress: Callable[[StepRecord], object] | None = None,
        group: Any = None,
    ) -> None:
        if proof not in ("evaluation", *AHEAD):
            raise ValueError(f"proof is 'evaluation', 'segment', 'ball' or 'blocks', got {proof!r}")
        if order not in range(2, 6):
            raise ValueError(f"a segment carries 2 to 5 Taylor coefficients, got {order!r}")
        if weight_decay and regularizer is not None:
            raise ValueError("weight_decay is a ridge: give it or a regularizer, not both")
        if weight_decay:
            regularizer = Ridge(weight_decay)
        if regularizer is not None and proof != "evaluation":
            raise ValueError(
                f"proof={proof!r} promises for the loss alone: a regulariser needs proof='evaluation'"
            )
        if regularizer is not None and not regularizer.smooth:
            if direction not in (None, "gradient"):
                raise ValueError(
                    f"{regularizer!r} has kinks, where steps along a line may stall: its steps are proximal ones "
                    f"along the gradient, so leave direction={direction!r} out"
                )
            direction = "gradient"
        if group is not None and (proof != "evaluation" or until is not None or direction == "gauss_newton"):
            raise ValueError(
                "with a group, steps are proved by proof='evaluation', without until='proved', along any "
                "direction but 'gauss_newton': the others are about the data of one process"
            )
        options: dict[str, Any] = {"regularizer": regularizer, "params": params, "lower": lower, "until": until}
        super().__init__(model, objective, progress=progress, **options)
        if group is not None and not self.objective.takes_targets:
            raise ValueError("with a group, the objective is a mean over samples with targets")
        self.proof, self.processes = proof, None if group is None else Processes(group)
        self._method: ByEvaluation | Ahead = (
            ByEvaluation(self, "lbfgs" if direction is None else direction, self.processes)
            if proof == "evaluation"
            else Ahead(self, proof, direction, order)
        )

    def forget(self) -> None:
        """Drop what was kept between steps."""
        self._method.forget()

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One step that is proved to descend."""
        return self._method.advance(x, y, closure)

    takes_loaders = True

    def check_part(self, x: Any, y: Any) -> None:
        """One batch with its targets, or a loader that brings them.

        Raises:
            OptimizerError: if it is neither.
        """
        if is_loader(x) and y is None and self.proof != "evaluation":
            raise OptimizerError(f"proof={self.proof!r} is about one batch: proof='evaluation' takes a loader")
        super().check_part(x, y)

    def value(self, x: Any, y: Any = None, closure: Closure | None = None) -> float:
        """The objective at the present parameters; where it is evaluated for proofs, in double precision too."""
        if isinstance(self._method, Ahead):
            return super().value(x, y, closure)
        return self._method.value(x, y)

    def extra_state(self) -> dict[str, Any]:
        """What directions are made of, and how far the last step went."""
        return self._method.state()

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave; norms of layers are computed anew."""
        self._method.load(state)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        if not self.history:
            return "nothing yet: the first step brings its own proof"
        several = len({record.data for record in self.history}) > 1
        rest = " For the objective of all data nothing is proved." if several else ""
        return self.promises_kept() + rest
