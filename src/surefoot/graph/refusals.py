"""Graphs that would not say the truth about the model, and why they are refused.

Operations that cannot be followed; forward passes that are no functions, as they remember or draw; gradients that
are not the derivative of the function, as they are cut off or written by hand.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from surefoot.errors import CaptureError
from surefoot.graph.nodes import Leaf, Node, Ref, Role, Source, Spec, double_by_default, in_double, module_path
from surefoot.graph.preserve import Change
from surefoot.graph.structure import Graph, outputs_of
from surefoot.graph.trace import BACKWARDS, PURE
from surefoot.program.checks import random_dropout, select_outputs
from surefoot.torch_private import HigherOrderOperator, pre_hooks_of, schema_of

NOT_RANDOM = (
    "Call model.eval() if that stops it, or pass the random numbers as an input: a certificate covers one "
    "function."
)
_ROUNDED = 1e-12  # of the largest slope: round-off in the others
_NO_STEP = "Its gradient would not be the derivative of the function, so no step along it could be guaranteed: "


def refuse_severed(program: ExportedProgram) -> None:
    """Refuse a tensor that depends on trainable parameters, reaches the output, and is cut off from its gradient.

    This is decided on the program as it was traced: its functional form no longer says where gradients were off.
    """
    values = program.state_dict
    paths = program.graph_signature.inputs_to_parameters
    trainable = {name for name, path in paths.items() if path in values and values[path].requires_grad}
    placeholders = program.graph.find_nodes(op="placeholder")
    _check(program.graph_module, [node for node in placeholders if node.name in trainable])


def refuse_other_derivative(
    model: nn.Module,
    graph: Graph,
    args: Sequence[Tensor],
    kwargs: Mapping[str, Tensor],
    names: Sequence[str],
    lost: Exception | None = None,
) -> None:
    """Refuse hand-written backward functions that do not give the derivative of the function.

    Vector-Jacobian products of the model are compared in double precision with those of its graph, which are
    derivatives of what forward computes, at the example and at eight times it, for random slopes. That is a test
    at two inputs and no proof: a backward that is wrong elsewhere only passes. Constants and promises are
    those of what forward computes, with derivatives from the graph.
    """
    functions = " and ".join(f"'{name}'" for name in names)
    try:
        weights = list(model.parameters())
        same = not any(value.is_meta for value in (*weights, *args, *kwargs.values()))
        twin = copy.deepcopy(model).double() if same else model
        same = same and all(_same_derivative(twin, graph, args, kwargs, scale) for scale in (1.0, 8.0))
    except Exception:  # a copy or a run in double precision may fail in many ways
        same = False
    if not same and isinstance(lost, CaptureError):
        raise lost
    if not same:
        remedy = f"{_NO_STEP}write forward with differentiable operations, and pass a model with values in memory."
        if not names:
            remedy += f" {BACKWARDS}"
        what = (
            f"the backward of {functions} (torch.autograd.Function) is not seen to be the derivative of forward "
            if names
            else "beside the derivatives that forward takes, the gradient is not seen to be that of the function "
        )
        what += "at the example and at eight times it, where the two are compared"
        raise CaptureError(what, where="", remedy=remedy)


def _same_derivative(
    model: nn.Module, graph: Graph, args: Sequence[Tensor], kwargs: Mapping[str, Tensor], scale: float
) -> bool:
    inputs = [_scaled(value, scale) for value in (*args, *kwargs.values())]
    keywords = dict(zip(kwargs, inputs[len(args) :], strict=True))
    parameters = dict(model.named_parameters())
    values = {name: in_double(value.detach()) for name, value in graph.held.items()}
    values |= {leaf.name: parameters[leaf.path] for leaf in graph.parameters}
    values |= {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    variables = [value for value in (*parameters.values(), *inputs) if value.requires_grad]
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad(), double_by_default():
        live, read = select_outputs(model(*inputs[: len(args)], **keywords)), outputs_of(graph, values)
    slopes = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.device) for out in live]
    given = {id(value) for value in inputs}
    found: list[Sequence[Any]] = [
        torch.autograd.grad(sum((out * slope).sum() for out, slope in zip(outs, slopes, strict=True)), variables,
                            allow_unused=True)
        for outs in (live, read)
    ]  # fmt: skip
    pairs = [
        [torch.zeros_like(variable) if slope is None else slope for slope in pair]
        for variable, *pair in zip(variables, *found, strict=True)
        if pair[0] is not None or id(variable) not in given  # an input that is detached has nothing to compare
    ]
    if scale != 1 and not all(bool(ours.isfinite().all()) for _, ours in pairs):
        return True  # too far from the example to say anything
    sizes = [float(ours.abs().max()) for _, ours in pairs]
    least = _ROUNDED * max(sizes, default=0.0)  # a derivative that is zero, such as that of what a mean removes
    return all(
        torch.allclose(theirs, ours, rtol=1e-4, atol=max(1e-4 * size, least))
        for (theirs, ours), size in zip(pairs, sizes, strict=True)
    )


def _scaled(value: Tensor, scale: float) -> Tensor:
    return (value.detach().double() * scale).requires_grad_() if value.is_floating_point() else value


def _check(module: fx.GraphModule, sources: Iterable[fx.Node]) -> None:
    nodes = list(module.graph.nodes)
    varying = set(sources)
    for node in nodes:
        if varying.intersection(node.all_input_nodes):
            varying.add(node)
    wanted: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or wanted.intersection(node.users) or node in wanted:
            wanted.update((node, *node.all_input_nodes))
    for node in nodes:
        if node in varying and node in wanted and node.op == "call_function":
            _check_node(node, module, varying)


def _check_node(node: fx.Node, module: fx.GraphModule, varying: set[fx.Node]) -> None:
    if node.target in _DETACH and _is_real(node.meta.get("val")):
        raise _severed("is detached", node)
    if not isinstance(node.target, HigherOrderOperator):
        return
    attributes = [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    bodies = [body for a in attributes if isinstance(body := getattr(module, str(a.target), None), fx.GraphModule)]
    body = bodies[0] if bodies else None
    if str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
        # Decisions have no gradient anyway: only real numbers that leave the region are cut off.
        results = [user for user in node.users if user.target is operator.getitem and user.users]
        if any(_is_real(result.meta.get("val")) for result in results):
            computing = [inner for inner in body.graph.nodes if inner.op == "call_function"] if body else []
            raise _severed("is computed under torch.no_grad()", computing[0] if computing else node)
    elif body is not None:
        operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
        inputs = body.graph.find_nodes(op="placeholder")
        _check(body, [p for p, o in zip(inputs, operands[-len(inputs) :], strict=False) if o in varying])


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _severed(how: str, node: fx.Node) -> CaptureError:
    remedy = (
        f"{_NO_STEP}let the gradient pass (in torch.utils.checkpoint, with use_reentrant=False), or freeze these "
        "parameters with requires_grad_(False)."
    )
    what = f"a tensor that depends on the parameters {how}"
    return CaptureError(what, where=module_path(node), remedy=remedy)


_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def refuse_stored(changes: Sequence[Change], model: nn.Module) -> None:
    """Refuse a forward pass that stores a tensor on a module: the next one may read it."""
    for change in changes:
        path, attribute = _split(change.label, model)
        hooked = _computed_by_hook(model.get_submodule(path), attribute)
        if change.of_model and change.holds_tensor and not hooked:
            remedy = "Make forward a pure function: return the tensor, or keep it out of the module."
            what = f"the forward pass stores a tensor on self, as '{attribute}'"
            raise CaptureError(what, where=path, remedy=remedy)


def refuse_effects(written: Sequence[str], drawn: Sequence[str]) -> None:
    """Refuse a forward pass that writes into tensors beside parameters and buffers, or draws random numbers."""
    if written:
        raise CaptureError(f"the forward pass writes into the tensor '{written[0]}'", where="", remedy=PURE)
    if drawn:
        what = f"the forward pass draws random numbers (from {' and '.join(drawn)})"
        raise CaptureError(what, where="", remedy=NOT_RANDOM)


def refuse_other(graph: Graph, again: Graph, changes: Sequence[Change], model: nn.Module) -> None:
    """Refuse a forward pass that changes something and computes another function the next time."""
    if not same_function(graph, again):
        path, attribute = _split(changes[0].label, model)
        what = f"the forward pass changes '{attribute}', and the next one computes something else"
        remedy = "Make forward a pure function: pass what changes from call to call as an input."
        raise CaptureError(what, where=path, remedy=remedy)


def same_function(a: Graph, b: Graph) -> bool:
    """Whether two graphs are the same up to the names of their tensors."""
    if [len(a.leaves), len(a.nodes), len(a.outputs)] != [len(b.leaves), len(b.nodes), len(b.outputs)]:
        return False
    names: dict[str, str] = {}
    for leaf, other in zip(a.leaves.values(), b.leaves.values(), strict=True):
        names[other.name] = leaf.name
        if not _same_leaf(a, leaf, b, other):
            return False
    for node, twin in zip(a.nodes, b.nodes, strict=True):
        names[twin.name] = node.name
        twin = twin.renamed(names)
        if (node.target, node.args, node.kwargs, node.spec) != (twin.target, twin.args, twin.kwargs, twin.spec):
            return False
    return a.outputs == tuple(names[name] for name in b.outputs)


def _split(label: str, model: nn.Module) -> tuple[str, str]:
    """The path of the module that something was found in, and what it is called there."""
    modules, parts = dict(model.named_modules()), label.split(".")
    depth = max(k for k in range(len(parts) + 1) if ".".join(parts[:k]) in modules)
    return ".".join(parts[:depth]), ".".join(parts[depth:])


def _same_leaf(a: Graph, leaf: Leaf, b: Graph, other: Leaf) -> bool:
    if (leaf.source, leaf.spec) != (other.source, other.spec):
        return False
    if leaf.source is not Source.CONSTANT:
        return leaf.path == other.path
    first, second = a.held[leaf.name], b.held[other.name]
    return first is second or (first.device.type != "meta" and torch.equal(first, second))


def _computed_by_hook(module: nn.Module, attribute: str) -> bool:
    """Whether a hook of PyTorch sets the attribute before each call, from the parameters."""
    return any(
        isinstance(hook, WeightNorm | SpectralNorm) and hook.name == attribute for hook in pre_hooks_of(module)
    )


def refuse_unfaithful(graph: Graph) -> None:
    """Refuse what is random, depends on the data, treats integers as numbers, or ignores the input."""
    given = {leaf.name for leaf in graph.inputs if leaf.spec.dtype in INTEGERS}
    for node in graph.nodes:
        for what, remedy in (*_problems(node), *_mixed_types(graph, node), *_integers(graph, node, given)):
            raise CaptureError(what, where=node.module, remedy=remedy)
        if given.intersection(node.inputs) and any(spec.dtype in INTEGERS for spec in node.specs):
            given.add(node.name)
    if not any(Role.INPUT in graph.roles[name] for name in graph.outputs):
        remedy = "Return something that is computed from the input."
        raise CaptureError("the output does not depend on the input", where="", remedy=remedy)


def _problems(node: Node) -> Iterator[tuple[str, str]]:
    """What is wrong with an operation, and what to do about it."""
    if not node.specs:
        what = "a number is taken out of a tensor (.item(), float(), int() or tolist())"
        yield what, "Compute with the tensor itself: a number has no gradient."
    if any(size < 0 for spec in node.specs for size in spec.shape):
        what = f"the shape of what '{node.op}' returns depends on the data"
        remedy = (
            "Keep all entries and mask them, for example with torch.where(mask, x, 0), or pick from the input "
        )
        yield what, remedy + "before the model is called; a mask in a buffer is fine."
    if node.op in ("aten.embedding", "aten.embedding_bag") and node.arguments["scale_grad_by_freq"]:
        what = (
            "an embedding divides its gradient by how often an id occurs, which is the derivative of no function"
        )
        yield what, "Set scale_grad_by_freq=False."
    if node.op in ("aten.embedding", "aten.embedding_bag") and node.arguments["sparse"]:
        yield "an embedding makes sparse gradients", "Set sparse=False: gradients are then dense tensors."
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable:
        what = f"the operation '{node.op}' writes into its argument"
        yield what, "Make forward a pure function: return new tensors."
    if schema is None and node.target is not operator.getitem and not node.op.startswith("surefoot."):
        what = f"the operation '{node.op.lstrip('_')}' is no operation on tensors that can be followed"
        yield what, "Use operations of torch, or of torch.library."
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        arguments = node.arguments
        training = arguments.get("train", arguments.get("training", True))
        probability = arguments.get("p", arguments.get("dropout_p", arguments.get("dropout")))
        if "dropout" in node.op or probability is not None:  # attention and recurrent layers drop entries as well
            if training and probability:
                yield random_dropout(probability)
        elif node.op != "aten.rrelu" or (training and arguments["lower"] != arguments["upper"]):
            yield f"the operation '{node.op}' draws random numbers", NOT_RANDOM


def _integers(graph: Graph, node: Node, given: set[str]) -> Iterator[tuple[str, str]]:
    """Integers of the input may choose (ids, masks, conditions); they may not be computed with.

    They choose where no real number could stand in their place: an operation refuses 0.5 as an index.
    """
    read = given.intersection(node.inputs)
    picks = node.target is operator.getitem  # one of several results
    real = None if picks else next((spec.dtype for spec in node.specs if spec.is_real), None)
    if real and any(_runs(graph, node, {name: real}) for name in read):
        what = f"'{node.op}' computes with integers ({graph.specs(min(read))[0].dtype}) that come from the input"
        yield what, "Integer inputs can only be ids for an embedding, or masks: pass numbers as x.float()."


def _mixed_types(graph: Graph, node: Node) -> Iterator[tuple[str, str]]:
    """Tracing does not notice that two element types cannot be multiplied; running does."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):  # converts what it reads to one type
        return
    specs = {name: graph.specs(name)[0] for name in node.inputs}
    real = {name: spec.dtype for name, spec in specs.items() if spec.is_real}
    types = dict.fromkeys(real.values())
    if len(types) < 2 or _runs(graph, node, {}):
        return
    if _runs(graph, node, dict.fromkeys(real, next(iter(types)))):
        what = f"'{node.op}' multiplies {' by '.join(map(str, types))}"
        yield what, "Convert the model or the input, for example x = x.to(torch.float64) or model.double()."


def _runs(graph: Graph, node: Node, types: Mapping[str, torch.dtype]) -> bool:
    """Whether an operation accepts its arguments where these have other element types; tried on zeros."""
    try:
        at_zero(graph, node, {name: zeros(graph.specs(name)[0].shape, dtype) for name, dtype in types.items()})
    except Exception:  # kernels raise many types
        return False
    return True


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def refuse_wrong_ids(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Refuse ids that an embedding does not have."""
    given = {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        indices = node.arguments.get("indices") if node.op == "aten.embedding" else None
        if not isinstance(indices, Ref) or indices.name not in given or given[indices.name].is_meta:
            continue
        ids, size = given[indices.name], graph.specs(node.arguments["weight"].name)[0].shape[0]
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= size:
            what = f"an embedding of {size} entries is asked for ids from {smallest} to {largest}"
            remedy = "Pass ids that are smaller than the number of entries."
            raise CaptureError(what, where=node.module, remedy=remedy)


def refuse_masked_rows(graph: Graph, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Refuse an input that masks all that a soft-max may look at: it divides zero by zero.

    A mask is computed from integers, truth values and constants. Where an operation reads one and a whole row
    comes out as minus infinity, the model is run: some return zeros for such a row, and that is a function.
    """
    given = {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    varies = {*graph.parameters, *graph.frozen, *(leaf for leaf in graph.inputs if leaf.spec.is_real)}
    masks = {leaf.name for leaf in graph.leaves.values() if leaf not in varies}
    for node in graph.nodes:
        if masks.issuperset(node.inputs):
            masks.add(node.name)
    suspects = masks & (given.keys() | graph.by_name.keys())
    suspects = {name for name in suspects if graph.specs(name)[0].dtype not in INTEGERS}
    readers = [n for n in graph.nodes if n.name not in masks and suspects.intersection(n.inputs)]
    if not readers or any(value.is_meta for value in (*inputs, *graph.held.values(), *parameters.values())):
        return
    values = {**graph.constants, **given}
    with torch.no_grad():
        for node in graph.nodes:
            if node.name in masks and node.name not in values:
                values[node.name] = node.run(values)
        for node in readers:
            read = {name: values[name] for name in node.inputs if name in masks}
            if not any(value.dtype is torch.bool or bool(value.isinf().any()) for value in read.values()):
                continue
            result = at_zero(graph, node, read)
            if isinstance(result, Tensor) and result.dim() and bool(result.isneginf().all(dim=-1).any()):
                if any(bool(output.isnan().any()) for output in graph.run(parameters, inputs)):
                    what = "a mask hides everything from a row of the attention, and the model returns NaN"
                    remedy = "Leave at least one entry visible in each row, or drop the samples that have none."
                    raise CaptureError(what, where=node.module, remedy=remedy)
                return


def at_zero(graph: Graph, node: Node, values: Mapping[str, Any]) -> Any:
    """The result of an operation where all tensors are zero but those that are given."""
    device = next((value.device for value in values.values()), None)
    others = {}
    for name in node.inputs:
        several = tuple(zeros(spec.shape, spec.dtype, device) for spec in graph.specs(name))
        others[name] = several[0] if isinstance(graph.spec(name), Spec) else several
    with torch.no_grad():
        return node.run({**others, **values})


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros that share one entry."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
