r"""Which entries of a program belong to which sample, and the rows of the Jacobian :math:`R^\top J` that follow.

**Labels.** An entry of a tensor belongs to a sample if the output of no other sample depends on it. With random
slopes :math:`\mu_s` of the samples, its derivative is :math:`\sum_s\mu_sa_s`; with :math:`s\mu_s` it is
:math:`\sum_ss\mu_sa_s`. If it belongs to one sample, their quotient is the number of that sample, whatever the
slopes; if not, it is the same whole number for two random choices with probability zero. So four pull-backs say it
for all entries of all tensors, however the model is written.

**Rows.** Go through the program from the weights on. What is computed from weights alone is a *weight* too, until
an operation makes entries of it that belong to samples. There the rows of the weight are products of the slopes in
these entries, which come for all samples at once, one pull-back for each column of the blocks of R, and of what
the operation reads: :math:`\sum_tx_{it}\otimes G_{ijt}` for a matrix product :math:`z_{it} = x_{it}W`,
:math:`\sum_tG_{ijt}` for a shift, and the pull-back of any other operation, one sample at a time. Rows of computed
weights are pulled back to those of the model. Other parameters have theirs by one pull-back through the whole
program each. Whoever uses rows compares them with the gradient, which is a sum of them.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import vjp, vmap

from surefoot.graph import Graph, Node
from surefoot.graph.nodes import Ref, in_double, run_widened
from surefoot.operations.losses import Factor
from surefoot.oracles.problem import Problem
from surefoot.program.checks import differentiable_attention

NONE, SEVERAL = -1, -2  # labels of entries on which no output depends, or those of several samples
MOST = 1 << 27  # numbers of rows that are stored
FEW = 1 << 17  # numbers in the results up to which pull-backs are faster together than one by one
_PIECE = 1 << 22  # numbers that are made at a time
_FAINT = 1e-12  # of the largest slope in a tensor: nothing depends on such an entry
_aten: Any = torch.ops.aten
_MATRIX = {
    _aten.linear.default: ("input", "weight", "bias"),
    _aten.mm.default: ("self", "mat2", None),
    _aten.matmul.default: ("self", "other", None),
    _aten.addmm.default: ("mat1", "mat2", "self"),
}  # the slots of what is multiplied, of the matrix, and of what is added
_SAME = (_aten.alias.default, _aten.detach.default, _aten.clone.default)
_structures: WeakKeyDictionary[Graph, tuple[int, Structure]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Use:
    """A weight in an operation whose result has entries of samples.

    Attributes:
        node: the operation.
        weight: the name of the weight.
        labels: the sample of each entry of the result.
        dim: the dimension along which alone these differ.
        kind: "matrix", "shift", or "right" and "left" for one sample at a time: how arguments are aligned.
    """

    node: Node
    weight: str
    labels: Tensor
    dim: int
    kind: str

    @property
    def samples(self) -> Tensor:
        """The sample of each index along the dimension."""
        return self.labels.movedim(self.dim, 0).flatten(1).amax(1)


@dataclass(frozen=True)
class Structure:
    """Where the weights of a graph meet samples.

    Attributes:
        uses: these places.
        rest: paths of the parameters that meet them in any other way too.
        computed: the operations on weights alone, in order.
    """

    uses: tuple[Use, ...]
    rest: frozenset[str]
    computed: tuple[Node, ...] = ()

    def layers(self, graph: Graph, samples: int) -> dict[str, tuple[Use, str | None]]:
        """Weights that are read once, by linear layers with one vector per sample; and the biases of these."""
        names, all_uses = {leaf.name: leaf.path for leaf in graph.parameters}, defaultdict[str, list[Use]](list)
        for use in self.uses:
            all_uses[_source(graph, use.weight)[0] if use.kind == "matrix" else use.weight].append(use)
        found: dict[str, tuple[Use, str | None]] = {}
        for name, (use, *more) in all_uses.items():
            alone = use.kind == "matrix" and not more and names.get(name) not in (None, *self.rest)
            if (
                alone
                and use.labels.dim() == 2
                and torch.equal(use.samples.sort().values, _count(samples, use.labels))
            ):
                added = use.node.arguments.get(_MATRIX[use.node.target][2] or "")
                bias = added.name if isinstance(added, Ref) else ""
                own = len(all_uses.get(bias, ())) == 1 and names.get(bias) not in (None, *self.rest)
                found[name] = use, bias if own else None
        return found


def _count(number: int, like: Tensor) -> Tensor:
    return torch.arange(number, device=like.device)


@dataclass(frozen=True)
class Outer:
    """A linear layer that reads one vector per sample: its rows are the products of these and the slopes.

    ``weight`` and ``bias`` are paths, ``x`` samples × inputs, ``slopes`` samples × columns × outputs. Where
    ``transposed``, the weight is outputs × inputs.
    """

    weight: str
    bias: str | None
    x: Tensor
    slopes: Tensor
    transposed: bool


@dataclass(frozen=True)
class Rows:
    r""":math:`R^\top J`, of so many samples and columns: some linear layers as factors, other paths dense."""

    outers: tuple[Outer, ...]
    paths: tuple[str, ...]
    dense: Tensor
    shape: tuple[int, int]

    def push(self, v: Mapping[str, Tensor]) -> Tensor:
        """RᵀJv, samples × columns."""
        like = self.dense
        flat = torch.cat([v[path].reshape(-1).to(like) for path in self.paths] or [like.new_zeros(0)])
        result = (like @ flat).view(self.shape)
        for outer in self.outers:
            weight = v[outer.weight].to(like)
            moved = outer.x @ (weight.T if outer.transposed else weight)
            moved = moved if outer.bias is None else moved + v[outer.bias].to(like)
            result = result + torch.bmm(outer.slopes, moved.unsqueeze(2)).squeeze(2)
        return result

    def pull(self, z: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """JᵀRz, by path."""
        parts = (z.reshape(-1) @ self.dense).split([like[path].numel() for path in self.paths])
        found = {path: part.view(like[path].shape) for path, part in zip(self.paths, parts, strict=True)}
        for outer in self.outers:
            slopes = torch.bmm(z.unsqueeze(1), outer.slopes).squeeze(1)
            found[outer.weight] = slopes.T @ outer.x if outer.transposed else outer.x.T @ slopes
            if outer.bias is not None:
                found[outer.bias] = slopes.sum(0)
        return found


def labels(output: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """The sample of each entry of some tensors on which the output depends, see above; in double precision."""
    numbers = 1.0 + _count(len(output), output).view(-1, *[1] * (output.dim() - 1))
    generator, found = torch.Generator().manual_seed(0), list[Tensor]()
    for turn in range(2):
        slope = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        pairs = zip(_pulled(output, targets, slope), _pulled(output, targets, slope * numbers), strict=True)
        for k, (once, times) in enumerate(pairs):
            ratio = times / once
            sample = torch.where((ratio - ratio.round()).abs() < 1e-4, ratio.round().long() - 1, SEVERAL)
            faint = [one.abs() <= _FAINT * (one.abs().amax() if one.numel() else 0.0) for one in (once, times)]
            sample = torch.where(faint[0] & faint[1], NONE, sample)
            if turn:
                found[k] = torch.where(found[k] == sample, sample, SEVERAL)
            else:
                found.append(sample)
    return found


def _pulled(output: Tensor, targets: Sequence[Tensor], slope: Tensor) -> tuple[Tensor, ...]:
    if not targets or not output.requires_grad:
        return tuple(torch.zeros_like(target) for target in targets)
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(output, targets, slope, **options)


def gradients(output: Tensor, inputs: Sequence[Tensor], slopes: Tensor) -> list[Tensor]:
    """The gradients for many slopes at once, the slopes along the first dimension; zeros where there are none."""
    if not output.requires_grad or not len(slopes):
        return [tensor.new_zeros(len(slopes), *tensor.shape) for tensor in inputs]
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    parts: tuple[Tensor | None, ...]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # one slope at a time, as below
            parts = torch.autograd.grad(output, inputs, slopes, is_grads_batched=True, **options)
    except RuntimeError:  # an operation that cannot be batched
        each = [torch.autograd.grad(output, inputs, slope, **options) for slope in slopes]
        parts = tuple(None if some[0] is None else torch.stack(some) for some in zip(*each, strict=True))
    return [
        tensor.new_zeros(len(slopes), *tensor.shape) if part is None else part.detach()
        for part, tensor in zip(parts, inputs, strict=True)
    ]


def _runner(like: Tensor) -> Callable[[Node, Mapping[str, Any]], Any]:
    """How an operation is run in this precision."""
    return run_widened if like.dtype == torch.float64 else Node.run


def _run(problem: Problem, *, double: bool = False, only: set[str] | None = None) -> dict[str, Any]:
    """The values of all tensors, or of some, as functions of the weights."""
    graph, double = problem.chain.graph, double or problem.dtype == torch.float64
    leaves = {path: value.detach().clone().requires_grad_() for path, value in problem.parameters.items()}
    values = graph.bind({**problem.point, **leaves}, [x.detach() for x in problem.chain.inputs])
    if double:
        values = {name: in_double(v) if isinstance(v, Tensor) else v for name, v in values.items()}
    for node in graph.nodes:
        if node.name not in graph.constant_names:
            values[node.name] = run_widened(node, values) if double else node.run(values)
        for name in graph.finished[node.name]:
            if only is not None and name not in only:
                del values[name]
    return values


def structure(problem: Problem) -> Structure:
    """Where the weights of the graph of a problem meet samples; computed once for each graph."""
    graph, samples = problem.chain.graph, problem.output.shape[0] if problem.output.dim() else 1
    if graph not in _structures or _structures[graph][0] != samples:
        plan = Structure((), frozenset(leaf.path for leaf in graph.parameters))
        if samples > 1:
            with differentiable_attention(), torch.enable_grad():
                plan = _structure(graph, _run(problem, double=True))
        _structures[graph] = samples, plan
    return _structures[graph][1]


def _structure(graph: Graph, values: Mapping[str, Any]) -> Structure:
    weights = {leaf.name: frozenset([leaf.path]) for leaf in graph.parameters if leaf.spec.numel}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.requires_grad}
    moving = [node.name for node in graph.nodes if node.name in tensors]
    marks = dict(zip(moving, labels(values[graph.outputs[0]], [tensors[name] for name in moving]), strict=True))
    uses, computed = list[Use](), list[Node]()
    rest = {path for name in graph.outputs for path in weights.get(name, ())}
    tainted: set[str] = set()  # by samples
    for node in graph.nodes:
        value = values[node.name]
        if not any(part.requires_grad for part in ([value] if isinstance(value, Tensor) else value)):
            continue  # numbers of samples, whatever they depend on
        read = [name for name in node.inputs if name in weights]
        mark = marks.get(node.name)
        belongs = mark is not None and bool((mark >= 0).any()) and not bool((mark == SEVERAL).any())
        if read and not belongs and tainted.isdisjoint(node.inputs) and node.name not in graph.outputs:
            weights[node.name] = frozenset().union(*(weights[name] for name in read))
            computed.append(node)
        elif read or not tainted.isdisjoint(node.inputs):
            tainted.add(node.name)
            for name in read:
                use = _use(node, name, mark, values, weights) if mark is not None and belongs else None
                if use is None:
                    rest |= weights[name]
                else:
                    uses.append(use)
    large = {use.weight for use in uses if use.weight in graph.by_name}
    if sum(graph.numel(name) for name in large) > 4 * sum(leaf.spec.numel for leaf in graph.parameters):
        rest |= {path for name in large for path in weights[name]}
    return Structure(
        tuple(use for use in uses if not weights[use.weight] <= rest), frozenset(rest), tuple(computed)
    )


def _use(node: Node, name: str, mark: Tensor, values: Mapping[str, Any], weights: Mapping[str, Any]) -> Use | None:
    """By which formula the rows of a weight come, tried on random slopes; ``None`` if there is none."""
    arguments, weight, rank = node.arguments, values[name], mark.dim()
    refs = {slot: value.name for slot, value in arguments.items() if isinstance(value, Ref)}
    slots = [slot for slot, other in refs.items() if other == name]
    dims = [dim for dim in range(rank) if _alike(mark.movedim(dim, 0).flatten(1))]
    if not dims or len(slots) != 1 or len(refs) != len(node.inputs) or not isinstance(weight, Tensor):
        return None
    dim, (x, matrix, added) = dims[0], _MATRIX.get(node.target, (None, None, None))
    if all(arguments.get(key, 1) == 1 for key in ("alpha", "beta")):
        if slots[0] == matrix and dim < rank - 1 and weight.dim() == 2 and refs[x or ""] not in weights:
            return Use(node, name, mark, dim, "matrix")
        shape = (1,) * (rank - weight.dim()) + tuple(weight.shape)
        adds = slots[0] == added or node.target in (_aten.add.Tensor, _aten.expand.default)
        if adds and len(shape) == rank and shape[dim] == 1 != mark.shape[dim]:
            return Use(node, name, mark, dim, "shift")
    slope = torch.randn(mark.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        mark.device
    )
    slope = torch.where(mark >= 0, slope, 0.0)
    given = {other: values[other].detach() for other in node.inputs}
    expected = vjp(lambda w: run_widened(node, {**given, name: w}), given[name])[1](slope)[0].flatten()
    for kind in ("right", "left"):
        use = Use(node, name, mark, dim, kind)
        try:
            rows = _sliced(use, values, slope[None], int(mark.max()) + 1).sum((0, 1))
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue  # it does not take one sample
        if float((rows - expected).abs().max()) <= 1e-9 * float(expected.abs().max()):
            return use
    return None


def _alike(lines: Tensor) -> bool:
    """Whether each row has one label at most."""
    lowest, highest = torch.where(lines == NONE, 1 << 60, lines).amin(1), lines.amax(1)
    return bool(((lowest == highest) | (highest == NONE)).all())


def _sliced(use: Use, values: Mapping[str, Any], slopes: Tensor, samples: int) -> Tensor:
    """The rows of a weight from one index along the dimension at a time: samples × columns × numbers."""
    node, dim, rank = use.node, use.dim, use.labels.dim()
    run, weight = _runner(slopes), values[use.weight].detach()
    given = {name: values[name].detach() for name in node.inputs if name != use.weight}
    places = {name: dim if use.kind == "left" else dim + value.dim() - rank for name, value in given.items()}
    size = use.labels.shape[dim]
    places = {n: at for n, at in places.items() if 0 <= at < given[n].dim() and given[n].shape[at] == size}
    pieces = {name: given[name].movedim(at, 0) for name, at in places.items()}

    def one(some: dict[str, Tensor], slope: Tensor) -> Tensor:
        own = {**given, **{name: piece.unsqueeze(places[name]) for name, piece in some.items()}}
        back = vjp(lambda w: run(node, {**own, use.weight: w}), weight)[1]
        return vmap(lambda s: back(s.unsqueeze(dim))[0].flatten())(slope)

    rows = slopes.new_zeros(samples, len(slopes), weight.numel())
    for some in (use.samples >= 0).nonzero().flatten().split(max(1, _PIECE // max(1, rows[0].numel()))):
        each = vmap(one)({name: piece[some] for name, piece in pieces.items()}, slopes.movedim(dim + 1, 0)[some])
        rows.index_add_(0, use.samples[some], each)
    return rows


def rows_of(problem: Problem, factor: Factor, *, outers: bool = False, whole: bool = False) -> Rows:
    """The rows of the Jacobian in the precision of the model.

    Args:
        problem: the objective around a point, of one batch.
        factor: R.
        outers: whether linear layers that read one vector per sample are stored as factors.
        whole: whether every row comes by a pull-back through the whole program.
    """
    graph, n, c = problem.chain.graph, factor.samples, factor.columns
    with differentiable_attention(), torch.enable_grad():
        plan = Structure((), frozenset(problem.parameters)) if whole else structure(problem)
        needed = {*graph.outputs, *(leaf.name for leaf in graph.parameters)}
        for node in (*(use.node for use in plan.uses), *plan.computed):
            needed.update(node.inputs, [node.name])
        values = _run(problem, only=needed)
        tapped = list(dict.fromkeys(use.node.name for use in plan.uses))
        slopes = dict(zip(tapped, _slopes(problem, factor, values, tapped), strict=True))
        layers = plan.layers(graph, n) if outers else {}
        merged = {bias for _, bias in layers.values()}
        names = {leaf.name: leaf.path for leaf in graph.parameters}
        stored: list[Outer] = []
        parts: dict[str, Tensor] = {}
        products: dict[str, list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for use in plan.uses:
            G, dim, k = slopes[use.node.name], use.dim, use.samples
            faint = G[:, use.labels == NONE].abs()
            if faint.numel() and float(faint.max()) > 1e-9 * float(G.abs().max()):
                _structures.pop(graph, None)  # on what nothing depended at another point
                return rows_of(problem, factor, outers=outers, whole=whole)
            if use.kind == "matrix":
                name, turned = _source(graph, use.weight)
                transposed = turned ^ (use.node.target is _aten.linear.default)
                x = values[use.node.arguments[_MATRIX[use.node.target][0]].name].detach().movedim(dim, 0)
                G = G.movedim(dim + 1, 0).flatten(2, -2) if G.dim() > 3 else G.movedim(dim + 1, 0).unsqueeze(2)
                x, G = _grouped(x.reshape(len(x), -1, x.shape[-1]), k, n), _grouped(G.transpose(1, 2), k, n)
                if name in layers:
                    bias = names.get(layers[name][1] or "")
                    stored.append(Outer(names[name], bias, x[:, 0], G[:, 0].contiguous(), transposed))
                else:
                    products[name].append((x, G, transposed))
            elif use.weight not in merged:
                rows = _shifted(use, values, G, n) if use.kind == "shift" else _sliced(use, values, G, n)
                parts[use.weight] = parts.get(use.weight, 0) + rows
        for name, several in products.items():
            parts[name] = parts.get(name, 0) + _multiplied(several)
        paths = tuple(path for path in problem.parameters if all(path not in (o.weight, o.bias) for o in stored))
        sizes = [problem.parameters[path].numel() for path in paths]
        types = (value.dtype for value in problem.parameters.values())
        dtype = reduce(torch.promote_types, types, problem.output.dtype)  # of models in two precisions
        dense = problem.output.new_zeros(n * c, sum(sizes), dtype=dtype)
        places = dict(zip(paths, dense.split(sizes, dim=1), strict=True))
        _collect(graph, plan, values, parts, places)
        if plan.rest:
            leaves = {leaf.path: values[leaf.name] for leaf in graph.parameters if leaf.path in plan.rest}
            _rest(problem, factor, values[graph.outputs[0]], leaves, places)
    return Rows(
        tuple(replace(o, x=o.x.to(dense), slopes=o.slopes.to(dense)) for o in stored), paths, dense, (n, c)
    )


def _slopes(problem: Problem, factor: Factor, values: Mapping[str, Any], names: Sequence[str]) -> list[Tensor]:
    """The slopes of all columns in some tensors, columns first."""
    targets, output, c = [values[name] for name in names], values[problem.chain.graph.outputs[0]], factor.columns
    if not targets or not c:
        return [target.new_zeros(c, *target.shape) for target in targets]
    problem.autodiff.calls += c
    if c > 1 and sum(target.numel() for target in targets) <= FEW:
        return gradients(output, targets, factor.all_columns(output.dtype, output.device))
    each = [target.new_empty(c, *target.shape) for target in targets]
    for j in range(c):
        column = factor.column(j, output.dtype, output.device)
        for whole, part in zip(each, _pulled(output, targets, column), strict=True):
            whole[j] = part
    return each


def _source(graph: Graph, name: str) -> tuple[str, bool]:
    """The weight of which a matrix is a copy or the transpose, and whether it is that."""
    turned = False
    while name in graph.by_name:
        node, given = graph.by_name[name], graph.by_name[name].arguments
        turns = node.target is _aten.t.default or given.get("dims") == [1, 0]
        turns |= node.target is _aten.transpose.int and {given["dim0"], given["dim1"]} in ({0, 1}, {-2, -1})
        if not turns and node.target not in _SAME:
            break
        name, turned = node.inputs[0], turned ^ turns
    return name, turned


def _grouped(tensor: Tensor, samples: Tensor, count: int) -> Tensor:
    """Indices along the first dimension by sample: samples × (the most of one · the second); zero beyond."""
    order = samples.argsort(stable=True)[int((samples < 0).sum()) :]
    own, each = samples[order], torch.bincount(samples[samples >= 0], minlength=count)
    most = max(int(each.max()), 1)
    result = tensor.new_zeros(count * most, *tensor.shape[1:])
    result[own * most + _count(len(own), own) - (each.cumsum(0) - each)[own]] = tensor[order]
    return result.view(count, most * tensor.shape[1], *tensor.shape[2:])


def _multiplied(several: Sequence[tuple[Tensor, Tensor, bool]]) -> Tensor:
    """The rows of a matrix from all products with it, in one product: samples × columns × numbers."""
    result: Any = 0
    for turned in (False, True):
        chosen = [(x, G) for x, G, transposed in several if transposed is turned]
        if chosen:
            x, G = (torch.cat(parts, dim=1) for parts in zip(*chosen, strict=True))
            n, k, c, o = G.shape
            if turned:  # outputs × inputs
                rows = torch.bmm(G.permute(0, 2, 3, 1).reshape(n, c * o, k), x).view(n, c, -1)
            else:
                rows = torch.bmm(x.mT, G.reshape(n, k, c * o)).view(n, -1, c, o).transpose(1, 2).reshape(n, c, -1)
            result = rows + result
    return result


def _shifted(use: Use, values: Mapping[str, Any], slopes: Tensor, count: int) -> Tensor:
    """The rows of what is added: samples × columns × numbers."""
    dim, weight, samples = use.dim, values[use.weight], use.samples
    each = slopes.movedim(dim + 1, 0).unsqueeze(dim + 2)  # indices × columns × the shape of one of them
    total = each.new_zeros(count, *each.shape[1:]).index_add_(0, samples[samples >= 0], each[samples >= 0])
    shape = (1,) * (use.labels.dim() - weight.dim()) + tuple(weight.shape)
    return total.sum_to_size((count, len(slopes), *shape)).flatten(2)


def _collect(
    graph: Graph, plan: Structure, values: Mapping[str, Any], parts: dict[str, Tensor], places: dict[str, Tensor]
) -> None:
    """Write rows of parameters, and of what is computed from them, to their places."""
    leaves = [leaf for leaf in graph.parameters if leaf.path in places and leaf.path not in plan.rest]
    for leaf in leaves:
        if leaf.name in parts:
            places[leaf.path] += parts[leaf.name].flatten(0, 1)
    derived = [name for name in parts if name in graph.by_name]
    if not derived:
        return
    start, run = [values[leaf.name].detach() for leaf in leaves], _runner(values[graph.outputs[0]])

    def compute(*weights: Tensor) -> tuple[Tensor, ...]:
        given = {**values, **dict(zip([leaf.name for leaf in leaves], weights, strict=True))}
        for node in plan.computed:
            given[node.name] = run(node, given)
        return tuple(given[name] for name in derived)

    back = vjp(compute, *start)[1]
    slopes = [parts[name].reshape(-1, *values[name].shape) for name in derived]
    step = max(1, _PIECE // max(1, sum(value.numel() for value in start)))
    for first in range(0, len(slopes[0]), step):
        some = tuple(slope[first : first + step] for slope in slopes)
        for leaf, rows in zip(leaves, vmap(lambda *s: back(s))(*some), strict=True):
            places[leaf.path][first : first + step] += rows.flatten(1)


def _rest(
    problem: Problem, factor: Factor, output: Tensor, leaves: Mapping[str, Tensor], places: dict[str, Tensor]
) -> None:
    """Rows by pull-backs through the whole program."""
    columns, c = factor.all_columns(output.dtype, output.device), factor.columns
    problem.autodiff.calls += factor.samples * c
    step = max(1, _PIECE // max(1, sum(node.numel for node in problem.chain.graph.nodes)))
    for numbers in _count(factor.samples * c, output).split(step):
        slopes = output.new_zeros(len(numbers), *output.shape)
        slopes[_count(len(numbers), output), numbers // c] = columns[numbers % c, numbers // c]
        for path, rows in zip(leaves, gradients(output, list(leaves.values()), slopes), strict=True):
            places[path][numbers] += rows.flatten(1)
