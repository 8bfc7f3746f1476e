"""A value with its error, and one function evaluated at many weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from surefoot.calculus.leaves import captured
from surefoot.errors import EvaluationError, UnsupportedOperation, describe
from surefoot.graph.nodes import in_double
from surefoot.valuation.joints import Joints, joints_of
from surefoot.valuation.passes import Constants, Run
from surefoot.valuation.propagation import Errors, errors, forward_errors
from surefoot.valuation.single import is_exact_here
from surefoot.valuation.slopes import Slopes, slopes_of
from surefoot.valuation.tape import Tape, tape_of
from surefoot.value import Evaluation, InfiniteValue

# How far parameters may move, relative to their norms, before slopes are asked for anew.
_WIDEST, _LEAST = 1.0, 0.01
_ATTEMPTS = 4
_HOPELESS = 64.0
_PLENTY = 2.0**-4  # of an error that is enough: what forward mode has to reach before passes are light again
_PREVAIL = 2.0**6  # errors of second order, over those of first: from there on long chains are looked for
_AMPLE = 2.0**-8  # likewise, before it need not keep samples apart


class Valuer:
    """Evaluates one function at many weights.

    What is known of its operations is kept as long as it holds (:mod:`surefoot.valuation.slopes`).

    Args:
        tape: the operations.
        constants: inputs, targets and buffers, and what is computed from them (:meth:`Tape.constants`); or what
            returns them, when they are needed.
        several: whether passes may be made with other inputs and targets of the same shapes. Then what is known
            of the operations holds for all inputs up to a size, and not only for these.
    """

    def __init__(
        self, tape: Tape, constants: Constants | Callable[[], Constants], *, several: bool = False
    ) -> None:
        self.tape, self._constants, self.several = tape, constants, several
        self._slopes: Slopes | None = None
        self._drift = _WIDEST
        self._forward_decides = True  # at the last passes that might have been light
        self._is_ample = True  # whether its error was so small that samples need not be kept apart
        self.in_single: Valuer | None = None  # the same, where that may decide
        self._joints: Joints | None = None  # states of long chains
        self._is_linked = False  # whether slopes were asked for where errors go from state to state
        self.obstacle = ""  # the operation beyond which nothing was proved at the last pass, in words

    @classmethod
    def of(cls, model: nn.Module, x: Any, objective: nn.Module, *, single: bool = False) -> Valuer:
        """The valuer for the objective of a model on a batch; if ``single`` is set, with the one in single
        precision where there is one (:mod:`surefoot.valuation.single`).

        Raises:
            CaptureError: if the model cannot be read.
            ObjectiveError: if the objective does not fit the outputs.
        """
        graph, values = captured(model, x, objective)
        tape = tape_of(graph)
        found = cls(tape, lambda: tape.constants(values))
        if single and tape.fits:
            narrow = tape_of(graph, single=True)
            found.in_single = cls(narrow, narrow.constants(values))
        return found

    @cached_property
    def constants(self) -> Constants:
        """Inputs, targets and buffers, and what is computed from them."""
        return self._constants() if callable(self._constants) else self._constants

    def evaluate(self, weights: Mapping[str, Tensor], enough: float = 0.0) -> Evaluation:
        """The interval at these weights: in single precision, if there is such a valuer and that is enough."""
        narrow = self.in_single if enough and is_exact_here(weights) else None
        if narrow is not None:
            run = narrow.run(weights)
            found = narrow.enclosed(run, enough) if math.isfinite(run.value) else None
            if found is not None and found.error <= enough:
                return found
        return self.enclosed(self.run(weights), enough)

    def run(
        self,
        weights: Mapping[str, Tensor],
        *,
        derivatives: bool = True,
        constants: Constants | None = None,
        light: bool = False,
    ) -> Run:
        """One pass at these weights, by path; with other inputs and targets if these are several.

        With ``light`` it notes no costates where errors by forward mode were small of late. Where they were very
        small, it does not keep samples apart either: norms and slopes are then those of all samples together, as
        in any function whose samples do not stay apart, which proves as much and is less sharp.
        """
        by_name = {leaf.name: weights[leaf.path] for leaf in self.tape.graph.parameters}
        plan = None if self._slopes is None else self._slopes.plan
        chosen = self.constants if constants is None else constants
        light = light and plan is not None and self._forward_decides
        rough = light and self._is_ample and not self.tape.single
        return self.tape.run(by_name, chosen, derivatives=derivatives, plan=plan, light=light, rough=rough)

    def gradient(self, run: Run) -> dict[str, Tensor]:
        """The gradient of a pass, by path."""
        found = run.gradient
        return {leaf.path: in_double(found[leaf.name]) for leaf in self.tape.graph.parameters}

    def foreseen(self, run: Run, enough: float) -> Run:
        """The pass itself if an error below ``enough`` can be told from it; else, of a light one, a full one.

        To be asked before its gradient, which costs as much as two passes.
        """
        if not run.light or not math.isfinite(run.value) or self._by_forward(run, enough) <= enough:
            return run
        self._forward_decides = False
        return self._full(run)

    def _full(self, run: Run) -> Run:
        plan = None if self._slopes is None else self._slopes.plan
        return self.tape.run(run.parameters, run.constants, derivatives=run.derivatives, plan=plan)

    def _by_forward(self, run: Run, enough: float) -> float:
        """The error of a light pass by forward mode, if it is known; else infinite."""
        if run.error is None or enough < run.error < math.inf:
            found = None if self._slopes is None else self._renewed(run, self._slopes, enough)
            run.error = math.inf if found is None else found[1]
            if 0 < enough < math.inf:
                self._is_ample = run.error <= _AMPLE * enough
        return run.error

    def enclosed(self, run: Run, enough: float = 0.0) -> Evaluation:
        """The interval of the exact value: by reverse mode, or by forward mode if no derivatives were asked for
        or that says enough.

        Args:
            run: the pass.
            enough: an error below which nothing is done to make it smaller.

        Raises:
            InfiniteValue: if the value is not finite.
            UnsupportedOperation: naming an operation that has no rule.
        """
        if not math.isfinite(run.value):
            raise InfiniteValue(
                f"the objective is {run.value} at these weights: check data and weights for NaN and huge entries"
            )
        value = run.value
        if run.light:
            error = self._by_forward(run, enough)
            if error <= enough:
                return Evaluation(value, error)
            run = self._full(run)
        found = None if self._slopes is None else self._renewed(run, self._slopes, enough)
        if found is None:
            run = run if run.whole else self.tape.run(run.parameters, run.constants, derivatives=run.derivatives)
            found = self._anew(run, enough)
        run, known = found
        return Evaluation(
            value, known if run.value == value else (known + abs(run.value - value)) * (1 + 2.0**-50)
        )

    def _renewed(self, run: Run, slopes: Slopes, enough: float) -> tuple[Run, float] | None:
        """A pass at the same weights and its error, from the slopes that are there, renewed where they do not hold
        and, all of them, for smaller neighbourhoods of the weights, where the error is too large; ``None`` if that
        takes all values, or slopes for other errors.
        """
        for _ in range(_ATTEMPTS):
            if not run.values.keys() >= slopes.plan.keep:  # a pass may be older than the slopes
                return None
            run, found = self._found(run, slopes, enough)
            if run.links is not None and not self._is_linked:
                return None  # slopes for errors by norms, which may be huge
            if run.derivatives and not run.light and 0 < enough < math.inf:
                plenty = 0.5 if self.tape.single else _PLENTY
                self._forward_decides = found.apart[self.tape.output] <= plenty * enough
            names = frozenset(slopes.outside(run, found.apart))
            if not names:
                if not self._is_settled(run, found, enough):
                    names = slopes.moved(run, narrow=self._drift > _LEAST and not run.light)
                if not names:
                    known = 0 <= found.total < math.inf
                    return (run, found.total if known else math.inf) if known or run.whole else None
                self._drift = self._drift if run.light else max(self._drift / 4, _LEAST)
            elif (run.light and self._is_linked) or not all(math.isfinite(found.apart.get(n, 0.0)) for n in names):
                return None
            slopes.renew(run, names, self._drift, found.apart)
        return None

    def _is_settled(self, run: Run, found: Errors, enough: float) -> bool:
        """Whether slopes for a smaller neighbourhood would not make the error much smaller, or need not; nor will
        they do where single precision is far from enough.
        """
        hopeless = self.tape.single and 0 < _HOPELESS * enough < found.total
        return not run.derivatives or hopeless or found.total <= max(2 * found.leading, enough)

    def _anew(self, run: Run, enough: float) -> tuple[Run, float]:
        """A pass at the same weights and its error, from slopes that are asked for again: with room for errors
        larger than sizes, and for as wide a neighbourhood of the weights as does not matter for the error.
        """
        wide: Mapping[str, float] = {}
        attempts, self.obstacle, self._is_linked = 0, "", False
        while attempts < _ATTEMPTS:
            self._slopes, fresh = self._asked(run, wide)
            run, found = self._found(run, fresh, enough)
            self._is_linked = run.links is not None
            holds = not fresh.outside(run, found.apart)
            if holds and (self._is_settled(run, found, enough) or self._drift <= _LEAST):
                self._note(found)
                return run, found.total if found.total >= 0 else math.inf
            if holds or (self._drift > _LEAST and not all(map(math.isfinite, found.apart.values()))):
                self._drift /= 4
                continue
            self._note(found)
            wide = found.apart
            attempts += 1
        return run, math.inf

    def _note(self, found: Errors) -> None:
        """The first operation whose error is not known, if there is one."""
        nodes = (node for node in self.tape.graph.nodes if not math.isfinite(found.apart[node.name]))
        first = next(nodes, None)
        self.obstacle = "" if first is None else f"'{first.op}' in {describe(first.module)}"

    def _asked(self, run: Run, wide: Mapping[str, float]) -> tuple[Slopes | None, Slopes]:
        """The slopes that may be kept, and those of this pass."""
        if self.several:
            try:
                common = slopes_of(self.tape, run, self._drift, several=True, errors=wide)
            except UnsupportedOperation:  # a rule that asks for the values of inputs
                return None, slopes_of(self.tape, run, self._drift, errors=wide)
            return common, common
        fresh = slopes_of(self.tape, run, self._drift, errors=wide)
        return fresh, fresh

    def _found(self, run: Run, slopes: Slopes, enough: float) -> tuple[Run, Errors]:
        """The errors by forward or reverse mode; where those of second order prevail by far, of another pass, with
        the derivatives between the states of long chains if there are such.
        """
        if run.light or not run.derivatives:
            return run, forward_errors(self.tape, run, slopes)
        found, most = errors(self.tape, run, slopes), 2.0 if self._drift <= _LEAST else _PREVAIL
        useful = min(enough, 1 + abs(run.value))  # slopes for larger errors are of no use to later passes
        for anew in (False, True):
            if found.total <= max(most * found.leading, useful):
                break
            if anew:
                self._joints = self._chosen(run, slopes)
            if self._joints is not None and (run.links is None or run.links.joints != self._joints):
                plan = None if run.whole else slopes.plan
                run = self.tape.run(
                    run.parameters, run.constants, derivatives=True, plan=plan, joints=self._joints
                )
                found = errors(self.tape, run, slopes)
        return run, found

    def _chosen(self, run: Run, slopes: Slopes) -> Joints | None:
        """The states to cut long chains at."""
        if self.tape.single:
            return None
        distances = slopes.distances(run)
        steep = {node.name: slopes.by_name[node.name].at(distances) for node in self.tape.varying}
        return joints_of(self.tape.varying, self.tape.graph, steep)


__all__ = ["Evaluation", "EvaluationError", "InfiniteValue", "Valuer"]
