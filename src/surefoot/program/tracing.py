"""From a model and its objective to a program: the forward pass is run once, and each operation is written down.

Tensors that depend on weights or on real inputs are stood for by fake ones, with a shape and no entries; all
others (buffers, masks, ids, positions) are computed as the model computes them and become constants. Writing into
a tensor is followed by storage: whoever reads it later, through whatever view, reads what was written.

Element types are what the model has; a program is a function of real numbers, so casts among them are no
operations.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from surefoot.errors import CaptureError, ObjectiveError, UnsupportedOperation
from surefoot.program.builder import Builder
from surefoot.program.checks import select_outputs, with_gradients
from surefoot.program.decompositions import RULES
from surefoot.program.faithful import Witness, custom_functions, refuse_assigned
from surefoot.program.fusion import fuse
from surefoot.program.ir import Program
from surefoot.program.layout import MOVES, moved, scattered
from surefoot.program.refusals import AUTOCAST, DATA, KEEP_ALL, NO_VALUES, SHAPES, SIZES, translated
from surefoot.program.symbol import Symbol
from surefoot.torch_private import (
    BatchNormalisation,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    decompositions,
    distributions_unchecked,
    out_of_place,
    python_dispatcher,
    schema_of,
    storage_of,
    tree_leaves,
    tree_map,
    without_onednn,
)

Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and strides of a tensor in its storage

_NEW = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided", "empty_strided", "_new_zeros_with_same_feature_meta",
}  # fmt: skip
"""Operations that read a shape only."""

_DATA_DEPENDENT = {
    **dict.fromkeys(
        ("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "any", "all"), (DATA, NO_VALUES)
    ),
    **dict.fromkeys(("nonzero", "masked_select", "unique"), (SHAPES, KEEP_ALL)),
    "_pack_padded_sequence": SIZES,
}
_POSITIONS = {"argmax", "argmin", "argsort", "searchsorted", "bucketize"}
"""Operations that return positions, which stand for no nodes."""
_NO_NUMBERS = {
    "is_same_size",
    "_linalg_check_errors",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "_assert_async",
    "_has_same_storage_numel",
}
"""Operations that say something of shapes, or nothing."""


def trace(
    model: nn.Module,
    args: Sequence[Tensor] | Tensor,
    objective: Callable[[Any], Tensor] | None = None,
    *,
    kwargs: Mapping[str, Tensor] | None = None,
) -> Program:
    """Write down what a model computes.

    Parameters that ask for a gradient are inputs by their own names, tied ones once; so are the real tensors that
    the model is called with, as ``x``, or ``x.0``, ``x.1``, … where there are several, or by keyword. All else is
    constant: buffers, integers, frozen parameters, targets.

    Args:
        model: a module; one on the ``meta`` device is traced as if it were on the CPU.
        args: its positional inputs.
        objective: from what it returns to one number; the output itself if there is none.
        kwargs: its inputs by keyword.

    Returns:
        The program, whose outputs are the tensors that the model returns, or the value of the objective.

    Raises:
        CaptureError: if the operations depend on the values of tensors.
        UnsupportedOperation: if an operation has no rule.

    >>> program = trace(nn.Linear(2, 1, bias=False), torch.ones(3, 2), lambda out: out.sum())
    >>> program.parameters, [node.primitive.name for node in program.nodes]
    (('weight',), ['input', 'input', 'permute', 'matmul', 'sum'])
    """
    return traced(model, (args,) if isinstance(args, Tensor) else tuple(args), objective, kwargs or {}).program


@dataclass(frozen=True)
class Traced:
    """A program, and what was noticed on the way.

    Attributes:
        program: what the model computes.
        read: the names of buffers and frozen parameters whose values the program is made with.
        severed: tensors that depend on parameters and are cut off from their gradient: a module path, and how.
        custom: the names of functions with a hand-written backward.
        transforms: whether derivatives are taken with ``torch.func``.
    """

    program: Program
    read: frozenset[str]
    severed: tuple[tuple[str, str], ...]
    custom: tuple[str, ...]
    transforms: bool


def traced(
    model: nn.Module,
    args: Sequence[Tensor],
    objective: Callable[[Any], Any] | None,
    kwargs: Mapping[str, Tensor],
) -> Traced:
    """What :func:`trace` returns, with what was noticed."""
    device = next((v.device for v in (*model.parameters(), *args, *kwargs.values())), torch.device("cpu"))
    tracer = Tracer(Builder(device="cpu" if device.type == "meta" else device))
    builder = tracer.builder
    names = [f"x.{k}" if len(args) > 1 else "x" for k in range(len(args))]
    try:
        owned = {name: tracer.parameter(name, value) for name, value in model.named_parameters()}
        owned |= {name: tracer.fixed_tensor(name, value) for name, value in model.named_buffers()}
        inputs = tuple(tracer.data(name, value) for name, value in zip(names, args, strict=True))
        named = {name: tracer.data(name, value) for name, value in kwargs.items()}
        with _as_if_alone(model, builder.device), _paths(model, builder, owned), tracer, python_dispatcher():
            result = functional_call(model, owned, inputs, named)
            builder.path = "objective"
            outputs = select_outputs(result if objective is None else objective(result))
    except (UnsupportedOperation, ObjectiveError):
        raise
    except Exception as error:  # of any type: it comes from the model
        raise translated(error, model, (*args, *kwargs.values()), builder.path) from None
    witness = tracer.witness
    witness.refuse_states()
    results = {tracer.node_of(value): value for value in outputs}
    program = fuse(builder.finish([tracer.node_of(value) for value in outputs]))
    return Traced(
        program, frozenset(witness.read), witness.severed(results), custom_functions(outputs), witness.transforms
    )


@contextmanager
def _as_if_alone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The function and not its surroundings: in the model's own precision, with attention that has derivatives.

    The momentum of a batch normalisation enters its running statistics only.
    """
    fast, level = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    averaging = [m for m in model.modules() if isinstance(m, BatchNormalisation) and m.momentum is None]
    with ExitStack() as stack:
        stack.enter_context(with_gradients())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(without_onednn())
        stack.enter_context(distributions_unchecked())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if torch.get_default_device().type == "meta":
            stack.enter_context(device)
        logging.disable(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(
            torch.backends.mkldnn.flags(enabled=False)
        )  # whose kernels are no operations of layers
        for module in averaging:
            module.momentum = 0.0
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            logging.disable(level)
            for module in averaging:
                module.momentum = None


@contextmanager
def _paths(model: nn.Module, builder: Builder, owned: Mapping[str, Tensor]) -> Iterator[None]:
    """The path of the module that runs is that of the nodes which are written."""
    names = {id(module): name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise CaptureError(AUTOCAST[0], where=builder.path, remedy=AUTOCAST[1])
        stack.append(builder.path)
        builder.path = names.get(id(module), builder.path)

    def leave(module: nn.Module, *_: Any) -> None:
        builder.path = stack.pop()
        if module is model:  # before what was put into it is taken out again
            refuse_assigned(model, owned)

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Storage:
    """What is in the memory that several tensors share: the node of one that covers it, and those of its views."""

    place: Place
    base: int
    nodes: dict[Place, int] = field(default_factory=dict)


class Tracer(TorchDispatchMode):
    """Writes operations down while they are dispatched; see :func:`trace`."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.builder = builder
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, _Storage] = {}
        self._writing = False
        self._alive: list[Tensor] = []  # so that no storage is used twice
        self._table = decompositions()
        self.witness = Witness(builder, lambda value: self.node_of(value) if self._is_followed(value) else None)

    # What enters.

    def parameter(self, name: str, value: Tensor) -> Tensor:
        """A fake tensor in the place of a parameter; itself if it asks for no gradient."""
        if not value.requires_grad:
            return self.fixed_tensor(name, value)
        return self._input(name, value, parameter=True)

    def data(self, name: str, value: Tensor) -> Tensor:
        """A fake tensor in the place of a real input; itself if it is of integers, of which no one knows more."""
        if value.is_floating_point():
            return self._input(name, value, parameter=False)
        return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value

    def fixed_tensor(self, name: str, value: Tensor) -> Tensor:
        """A copy that the model may write to; without entries, a fake tensor for an unknown constant."""
        if value.is_meta:
            copied = self._fake(value)
            self._enter(copied, self.builder.constant(value))
        else:
            copied = (value if value.layout is torch.strided else value.to_dense()).detach().clone()
            self._alive.append(copied)
        self.witness.own(copied, "buffer", name)
        return copied

    def _input(self, name: str, value: Tensor, parameter: bool) -> Tensor:
        fake = self._fake(value)
        self.builder.dtype = value.dtype
        self._enter(fake, self.builder.input(name, value.shape, value.dtype, parameter))
        self.witness.own(fake, "parameter" if parameter else "input", name)
        return fake

    def _fake(self, value: Tensor) -> Tensor:
        with self._fakes:
            fake = torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=value.dtype,
                device=self.builder.device if value.is_meta else value.device,
            )
        return fake.requires_grad_(value.requires_grad)

    # Tensors and nodes.

    def _enter(self, value: Tensor, node: int) -> None:
        """Let a node be what is in a tensor that is new, or in a view of one that is not."""
        key, place = storage_of(value), _place(value)
        self._alive.append(value)
        if key in self._storages:
            self._storages[key].nodes[place] = node
        else:
            self._storages[key] = _Storage(place, node, {place: node})

    def is_variable(self, value: Any) -> bool:
        """Whether something is a tensor that stands for nodes."""
        return isinstance(value, Tensor) and (isinstance(value, FakeTensor) or storage_of(value) in self._storages)

    def _is_followed(self, value: Tensor) -> bool:
        """Whether it has a node; positions of maxima, for example, have none."""
        return storage_of(value) in self._storages

    def node_of(self, value: Tensor) -> int:
        """The node of a tensor."""
        if not self.is_variable(value):
            return self.builder.constant(value.detach().clone())
        storage = self._storages.get(storage_of(value))
        if storage is None:
            what = "a tensor is used whose values cannot be followed: positions of maxima, or an inner result"
            raise UnsupportedOperation(f"{what} of an operation, such as the mean of a normalisation")
        place = _place(value)
        if place not in storage.nodes:
            base = Symbol(self.builder, storage.base)
            storage.nodes[place] = base.gather(self._within(storage, value)).index
        return storage.nodes[place]

    def _within(self, storage: _Storage, value: Tensor) -> Tensor:
        """Of each entry of a view its place in the tensor that covers the storage."""
        size = value.untyped_storage().nbytes() // value.element_size()
        memory = torch.full((size,), -1, device=self.builder.device)
        offset, shape, strides = storage.place
        cover = torch.as_strided(memory, shape, strides, offset)
        cover.copy_(torch.arange(cover.numel(), device=memory.device).reshape(shape))
        return torch.as_strided(memory, value.shape, value.stride(), value.storage_offset()).clone()

    def _write(self, value: Tensor, node: int) -> None:
        """Let a node be what is in a tensor from now on, and in all that share its memory."""
        key, place = storage_of(value), _place(value)
        if key not in self._storages:  # memory with fixed entries becomes one that varies
            whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            self._enter(whole, self.builder.constant(whole.clone()))
        storage = self._storages[key]
        if place == storage.place:
            storage.base = node
        else:
            base, new = Symbol(self.builder, storage.base), Symbol(self.builder, node)
            storage.base = scattered(base, self._within(storage, value), new).index
        storage.nodes = {storage.place: storage.base, place: node}

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        variables = [value for value in tensors if self.is_variable(value)]
        if not self._writing:  # what is written into is not read for its sake
            self.witness.check(name, schema, args, kwargs, tensors, torch.Tag.nondeterministic_seeded in func.tags)
        if not variables or func.namespace == "prim":
            return func(*args, **kwargs)
        if name == "masked_select" and not self.is_variable(args[1]):
            with self:
                mask = args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape))
                return args[0].expand(mask.shape)[mask]
        if name in _DATA_DEPENDENT:
            what, remedy = _DATA_DEPENDENT[name]
            raise CaptureError(what, where=self.builder.path, remedy=remedy)
        result = self._followed(name, func, args, kwargs, variables)
        self.witness.note(name, variables, tree_leaves(result))
        return result

    def _followed(self, name: str, func: Any, args: Any, kwargs: Any, variables: Sequence[Tensor]) -> Any:
        """The result of an operation on tensors that vary."""
        schema = schema_of(func)
        if name in _NO_NUMBERS or (func.is_view and not any(map(self._is_followed, variables))):
            return func(*self._faked(args), **self._faked(kwargs))
        if name in _NEW:
            return self._new(name, func, args, kwargs)
        if "out" in kwargs:
            return self._into(kwargs["out"], func, args, {k: v for k, v in kwargs.items() if k != "out"})
        if schema.is_mutable and name.endswith("_") and not name.endswith("__"):
            return self._in_place(func, args, kwargs)
        if name in _POSITIONS:
            return func(*self._faked(args), **self._faked(kwargs))
        if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"):
            args = (args[0], _places(args[1]), *args[2:])
        if name in RULES or name in MOVES:
            return self._written_down(name, func, args, kwargs)
        formula = self._table.get(func)
        with self:
            result = NotImplemented if formula is None else formula(*args, **kwargs)
            result = func.decompose(*args, **kwargs) if result is NotImplemented else result
        if result is NotImplemented:
            raise self._unsupported(func)
        return result

    def _written_down(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Write an operation down; its result is that of the same operation on fake tensors."""
        # views of memory that was fixed and written to share it
        is_real = all(not isinstance(value, FakeTensor) for value in tree_leaves((args, kwargs)))
        result = (
            func(*args, **kwargs) if is_real and func.is_view else func(*self._faked(args), **self._faked(kwargs))
        )
        results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        real = [value for value in results if value.is_floating_point()]
        self._check_types(name, args, real)
        if real:
            self.builder.dtype = real[0].dtype
        symbols = self._symbols(name, func, args, kwargs)
        symbols = list(symbols) if isinstance(symbols, list | tuple) else [symbols]
        for value, symbol in zip(results, symbols, strict=False):
            if symbol is not None:
                if symbol.shape != value.shape:
                    raise AssertionError(f"{func}: {tuple(symbol.shape)} instead of {tuple(value.shape)}")
                self._enter(value, symbol.index)
        return result

    def _symbols(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        operands, options = tree_map(self._operand, args), tree_map(self._operand, kwargs)
        if name in RULES:
            return RULES[name](*operands, **options)
        if not isinstance(operands[0], Symbol):
            raise self._unsupported(func)
        return moved(func, *operands, **options)

    def _operand(self, value: Any) -> Any:
        return Symbol(self.builder, self.node_of(value)) if self.is_variable(value) else value

    def _faked(self, value: Any) -> Any:
        """Arguments with fake tensors in the place of all that are not."""

        def faked(item: Any) -> Any:
            real = isinstance(item, Tensor) and not isinstance(item, FakeTensor)
            return self._fakes.from_tensor(item.detach()) if real else item

        return tree_map(faked, value)

    def _new(self, name: str, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A fixed tensor like one that varies."""
        fake = func(*self._faked(args), **self._faked(kwargs))
        value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        fill = (
            args[2]
            if name == "new_full"
            else args[1]
            if name == "full_like"
            else float(name in ("ones_like", "new_ones"))
        )
        return value.fill_(fill)

    def _returned(self, formula: Any, args: Any, kwargs: Any) -> Tensor:
        """What is written, as the result of an operation that writes nothing."""
        outer, self._writing = self._writing, True
        try:
            with self:
                return formula(*args, **kwargs)
        finally:
            self._writing = outer

    def _into(self, target: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
        """An operation whose result is written into a tensor."""
        result = self._returned(func.overloadpacket, args, kwargs)
        self._write(target, self.node_of(result))
        return target

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that writes into its first argument, by the one that returns the result."""
        name, target, formula = func.overloadpacket.__name__[:-1], args[0], out_of_place(func)
        if name in ("copy", "fill", "zero"):
            symbols = RULES[name](*tree_map(self._operand, args))
        elif formula is None:
            raise self._unsupported(func)
        else:
            symbols = Symbol(self.builder, self.node_of(self._returned(formula, args, kwargs)))
        if isinstance(target, FakeTensor):
            func(*self._faked(args), **self._faked(kwargs))
        self._write(target, symbols.expand(target.shape).index)
        return target

    def _check_types(self, name: str, args: Any, results: Sequence[Tensor]) -> None:
        """Refuse complex numbers, and products of tensors of different types, which only kernels notice."""
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        if any(value.is_complex() for value in (*tensors, *results)):
            raise UnsupportedOperation(
                f"'{name}' computes with complex numbers: use their real and imaginary parts"
            )
        types = list(dict.fromkeys(value.dtype for value in tensors[-2:]))
        if name in _PRODUCTS and len(types) > 1:
            whole = [dtype for dtype in types if not dtype.is_floating_point]
            if whole:
                what, remedy = f"'{name}' computes with integers ({whole[0]}) that come from the input", _IDS
            else:
                what, remedy = f"'{name}' multiplies {' by '.join(map(str, types))}", _CONVERT
            raise CaptureError(what, where=self.builder.path, remedy=remedy)

    def _unsupported(self, func: Any) -> UnsupportedOperation:
        where = f" in module '{self.builder.path}'" if self.builder.path else ""
        return UnsupportedOperation(f"the operation '{func}'{where} has no rule")


_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "convolution", "native_layer_norm"}
_IDS = "Integer inputs can only be ids for an embedding, or masks: pass numbers as x.float()."
_CONVERT = "Convert the model or the input, for example x = x.to(torch.float64) or model.double()."


def _places(index: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with masks by the places where they are true, which says how many there are."""
    places: list[Tensor | None] = []
    for item in index:
        mask = isinstance(item, Tensor) and item.dtype == torch.bool and not isinstance(item, FakeTensor)
        places += item.nonzero(as_tuple=True) if mask and item is not None else [item]
    return places


def _place(value: Tensor) -> Place:
    return int(value.storage_offset()), tuple(value.shape), tuple(value.stride())


__all__ = ["Traced", "Tracer", "trace", "traced"]
