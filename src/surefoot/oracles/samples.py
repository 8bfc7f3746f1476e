r"""Which entries of a program belong to which sample, and the rows of the Jacobian :math:`R^\top J` that follow.

**Labels.** An entry of a tensor belongs to a sample if the output of no other sample depends on it. With random
slopes :math:`\mu_s` of the samples, its derivative is :math:`\sum_s\mu_sa_s`; with :math:`s\mu_s` it is
:math:`\sum_ss\mu_sa_s`. If it belongs to one sample, their quotient is the number of that sample, whatever the
slopes; if not, it is the same whole number for two random choices with probability zero. So four pull-backs say it
for all entries of all tensors, however the model is written.

**Rows.** Go through the program from the weights on. What is computed from weights alone is a *weight* too, until
an operation makes entries of it that belong to samples: there the rows of the weight are products of the slopes in
these entries, which come for all samples at once, one pull-back for each column of the blocks of R, and of what
the operation reads:

* a matrix product, :math:`z_{it} = x_{it}W`: :math:`\sum_tx_{it}\otimes G_{ijt}`;
* a shift: :math:`\sum_tG_{ijt}`;
* any other operation: its own pull-back, one sample at a time, or, where samples meet in it, for one sample's
  slopes at a time.

Rows of computed weights are pulled back to those of the model. What reads weights but has no entries of samples
has its rows by one pull-back through the whole program each.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

NONE, SEVERAL = -1, -2  # labels of entries of which no output depends, or those of several samples
MOST = 1 << 27  # numbers of rows that are stored
_PIECE = 1 << 22  # numbers that are made at a time
FEW = 1 << 17  # numbers in the results up to which pull-backs are faster together than one by one
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
        dim: the dimension along which alone these differ, if there is one.
        kind: "matrix", "shift", "right", "left" or "masked": by which formula; "right" and "left" say how the
            arguments are aligned with the result, of which one sample is taken at a time.
    """

    node: Node
    weight: str
    labels: Tensor
    dim: int | None
    kind: str

    @property
    def samples(self) -> Tensor:
        """The sample of each index along the dimension."""
        assert self.dim is not None
        return self.labels.movedim(self.dim, 0).flatten(1).amax(1)


@dataclass(frozen=True)
class Structure:
    """Where the weights of a graph meet samples.

    Attributes:
        uses: these places.
        rest: paths of the parameters that meet them anywhere else too.
        computed: the operations on weights alone, in order.
    """

    uses: tuple[Use, ...]
    rest: frozenset[str]
    computed: tuple[Node, ...]


@dataclass(frozen=True)
class Outer:
    """A linear layer that reads one vector per sample: its rows are :math:`x_i \\otimes G_{ij}`.

    Attributes:
        weight: path of its weight.
        bias: path of its bias, if it is part of it.
        x: what it reads, samples × inputs.
        slopes: G, samples × columns × outputs.
        transposed: whether the weight is outputs × inputs.
    """

    weight: str
    bias: str | None
    x: Tensor
    slopes: Tensor
    transposed: bool


@dataclass(frozen=True)
class Rows:
    """:math:`R^\\top J`, samples · columns × parameters.

    Attributes:
        outers: linear layers whose rows are stored as factors.
        paths: all other parameters.
        dense: their rows.
        calls: pull-backs that were made.
    """

    outers: tuple[Outer, ...]
    paths: tuple[str, ...]
    dense: Tensor
    calls: int
    shape: tuple[int, int] = field(default=(0, 0))  # samples, columns

    def push(self, v: Mapping[str, Tensor]) -> Tensor:
        """RᵀJv, samples × columns."""
        like = self.dense
        result = torch.zeros(self.shape, dtype=like.dtype, device=like.device)
        if self.paths:
            result += (like @ torch.cat([v[path].reshape(-1).to(like) for path in self.paths])).view(self.shape)
        for outer in self.outers:
            weight = v[outer.weight].to(like)
            moved = outer.x @ (weight.T if outer.transposed else weight)
            moved = moved if outer.bias is None else moved + v[outer.bias].to(like)
            result += torch.bmm(outer.slopes, moved.unsqueeze(2)).squeeze(2)
        return result

    def pull(self, z: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """JᵀRz, by path."""
        found: dict[str, Tensor] = {}
        parts = (z.reshape(-1) @ self.dense).split([like[path].numel() for path in self.paths])
        found |= {path: part.view(like[path].shape) for path, part in zip(self.paths, parts, strict=True)}
        for outer in self.outers:
            slopes = torch.bmm(z.unsqueeze(1), outer.slopes).squeeze(1)
            found[outer.weight] = slopes.T @ outer.x if outer.transposed else outer.x.T @ slopes
            if outer.bias is not None:
                found[outer.bias] = slopes.sum(0)
        return found


def labels(output: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """The sample of each entry of some tensors on which the output depends, see above; in double precision."""
    numbers = torch.arange(1.0, output.shape[0] + 1, dtype=output.dtype, device=output.device)
    numbers = numbers.view(-1, *[1] * (output.dim() - 1))
    generator, found = torch.Generator().manual_seed(0), None
    for _ in range(2):
        slope = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        both = [_pulled(output, targets, s) for s in (slope, slope * numbers)]
        fresh = []
        for once, times in zip(*both, strict=True):
            ratio = times / once
            whole = ratio.round()
            sample = torch.where((ratio - whole).abs() < 1e-4, whole.long() - 1, SEVERAL)
            faint = once.abs() <= _FAINT * (once.abs().max() if once.numel() else 0.0)
            fresh.append(torch.where(faint & (times.abs() <= _FAINT * times.abs().amax()), NONE, sample)
                         if once.numel() else sample)  # fmt: skip
        found = (
            fresh
            if found is None
            else [torch.where(a == b, a, SEVERAL) for a, b in zip(found, fresh, strict=True)]
        )
    assert found is not None
    return found


def _pulled(output: Tensor, targets: Sequence[Tensor], slope: Tensor) -> tuple[Tensor, ...]:
    if not targets or not output.requires_grad:
        return tuple(torch.zeros_like(target) for target in targets)
    return torch.autograd.grad(
        output, targets, slope, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def dimension(labels: Tensor) -> int | None:
    """The dimension along which alone labels differ."""
    for dim in range(labels.dim()):
        lines = labels.movedim(dim, 0).flatten(1)
        lowest = torch.where(lines == NONE, 1 << 60, lines).amin(1)
        if bool(((lowest == lines.amax(1)) | (lines.amax(1) == NONE)).all()):
            return dim
    return None


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


def _run(problem: Problem, *, double: bool = False, only: set[str] | None = None) -> dict[str, Any]:
    """The values of all tensors, or of some and what they are computed from, as functions of the weights."""
    graph = problem.chain.graph
    double = double or problem.dtype == torch.float64
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


def _runner(like: Tensor) -> Callable[[Node, Mapping[str, Any]], Any]:
    """How an operation is run in this precision."""
    return run_widened if like.dtype == torch.float64 else Node.run


def structure(problem: Problem) -> Structure:
    """Where the weights of the graph of a problem meet samples; found once for each graph."""
    graph, samples = problem.chain.graph, problem.output.shape[0] if problem.output.dim() else 1
    if graph not in _structures or _structures[graph][0] != samples:
        with differentiable_attention(), torch.enable_grad():
            _structures[graph] = samples, _structure(graph, _run(problem, double=True), samples)
    return _structures[graph][1]


def _structure(graph: Graph, values: Mapping[str, Any], samples: int) -> Structure:
    weights = {leaf.name: frozenset([leaf.path]) for leaf in graph.parameters if leaf.spec.numel}
    everything = frozenset(leaf.path for leaf in graph.parameters)
    if samples == 1:
        return Structure((), everything, ())
    moving = [
        node.name
        for node in graph.nodes
        if isinstance(values[node.name], Tensor) and values[node.name].requires_grad
    ]
    marks = dict(zip(moving, labels(values[graph.outputs[0]], [values[name] for name in moving]), strict=True))
    uses: list[Use] = []
    computed: list[Node] = []
    rest: set[str] = {path for name in graph.outputs for path in weights.get(name, ())}
    tainted: set[str] = set()  # by samples
    for node in graph.nodes:
        value = values[node.name]
        if not any(part.requires_grad for part in ([value] if isinstance(value, Tensor) else value)):
            continue  # numbers of samples, whatever they depend on
        read = [name for name in node.inputs if name in weights]
        mark = marks.get(node.name)
        own = mark is not None and bool((mark >= 0).any()) and not bool((mark == SEVERAL).any())
        if read and own and all(isinstance(values[name], Tensor) for name in read):
            assert mark is not None
            uses += [_use(graph, node, name, mark, values, weights) for name in read]
            tainted.add(node.name)
        elif read and tainted.isdisjoint(node.inputs) and node.name not in graph.outputs:
            weights[node.name] = frozenset().union(*(weights[name] for name in read))
            computed.append(node)
        elif read or not tainted.isdisjoint(node.inputs):
            tainted.add(node.name)
            rest |= {path for name in read for path in weights[name]}
    large = {use.weight for use in uses if use.weight in graph.by_name}
    if sum(graph.numel(name) for name in large) > 4 * sum(values[leaf.name].numel() for leaf in graph.parameters):
        rest |= {path for name in large for path in weights[name]}
    uses = [use for use in uses if not weights[use.weight] <= rest]
    return Structure(tuple(uses), frozenset(rest), tuple(computed))


def _use(
    graph: Graph, node: Node, weight: str, mark: Tensor, values: Mapping[str, Any], weights: Mapping[str, Any]
) -> Use:
    """By which formula the rows of a weight come, tried on random slopes."""
    dim, arguments = dimension(mark), node.arguments
    slots = [slot for slot, value in arguments.items() if isinstance(value, Ref) and value.name == weight]
    if dim is None or len(slots) != 1 or len(_names(node)) != len(node.inputs):
        return Use(node, weight, mark, dim, "masked")
    matrix = _MATRIX.get(node.target)
    plain = all(arguments.get(key, 1) == 1 for key in ("alpha", "beta"))
    if matrix and plain and slots[0] == matrix[1] and dim < mark.dim() - 1 and values[weight].dim() == 2:
        source = arguments[matrix[0]]
        if source.name not in weights and values[source.name].dim() == mark.dim():
            return Use(node, weight, mark, dim, "matrix")
    shape = (1,) * (mark.dim() - values[weight].dim()) + tuple(values[weight].shape)
    shifts = (matrix and slots[0] == matrix[2]) or node.target in (_aten.add.Tensor, _aten.expand.default)
    if shifts and plain and len(shape) == mark.dim() and (shape[dim] == 1 != mark.shape[dim]):
        return Use(node, weight, mark, dim, "shift")
    slope = torch.randn(mark.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope = torch.where(mark >= 0, slope.to(mark.device), 0.0)
    expected = masked_rows(node, weight, values, slope[None], torch.zeros_like(mark), 1)[0, 0]
    for kind in ("right", "left"):
        use = Use(node, weight, mark, dim, kind)
        try:
            rows = _sliced(use, values, slope[None], int(mark.max()) + 1).sum((0, 1))
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue
        if float((rows - expected).abs().max()) <= 1e-9 * (1e-300 + float(expected.abs().max())):
            return use
    return Use(node, weight, mark, dim, "masked")


def _names(node: Node) -> list[str]:
    """The tensors among the arguments; one in a list is not among them."""
    return [value.name for value in node.arguments.values() if isinstance(value, Ref)]


def masked_rows(
    node: Node, weight: str, values: Mapping[str, Any], slopes: Tensor, labels: Tensor, samples: int
) -> Tensor:
    """The rows of a weight by a pull-back of the operation for each row: samples × columns × numbers."""
    given = {name: values[name].detach() for name in node.inputs}
    given[weight] = given[weight].requires_grad_()
    with torch.enable_grad():
        result = _runner(slopes)(node, given)
    rows = [
        gradients(result, [given[weight]], torch.where(labels == sample, slopes, 0.0))[0].flatten(1)
        for sample in range(samples)
    ]
    return torch.stack(rows)


def _sliced(use: Use, values: Mapping[str, Any], slopes: Tensor, samples: int) -> Tensor:
    """The rows of a weight from one index along the dimension at a time."""
    node, dim, rank = use.node, use.dim, use.labels.dim()
    assert dim is not None
    run, weight = _runner(slopes), values[use.weight].detach()
    places: dict[str, int] = {}
    for name in node.inputs:
        at = dim if use.kind == "left" else dim + values[name].dim() - rank
        if name != use.weight and 0 <= at < values[name].dim() and values[name].shape[at] == use.labels.shape[dim]:
            places[name] = at
    others = {name: values[name].detach() for name in node.inputs if name != use.weight and name not in places}

    def one(pieces: dict[str, Tensor], slope: Tensor) -> Tensor:
        given = {**others, **{name: piece.unsqueeze(places[name]) for name, piece in pieces.items()}}
        back = vjp(lambda w: run(node, {**given, use.weight: w}), weight)[1]
        return vmap(lambda s: back(s.unsqueeze(dim))[0].flatten())(slope)

    known = (use.samples >= 0).nonzero().flatten()
    rows = slopes.new_zeros(samples, len(slopes), weight.numel())
    pieces = {name: values[name].detach().movedim(at, 0) for name, at in places.items()}
    step = max(1, _PIECE // max(1, len(slopes) * weight.numel()))
    for some in known.split(step):
        chosen = slopes.movedim(dim + 1, 0)[some]
        found = vmap(one)({name: piece[some] for name, piece in pieces.items()}, chosen)
        rows.index_add_(0, use.samples[some], found)
    return rows


def _grouped(tensor: Tensor, samples: Tensor, count: int) -> Tensor:
    """Indices along the first dimension by sample: samples × the most of one sample × the rest; zero beyond."""
    known = (samples >= 0).nonzero().flatten()
    order = known[samples[known].argsort(stable=True)]
    sorted_ = samples[order]
    each = torch.bincount(sorted_, minlength=count)
    most = int(each.max()) if len(order) else 1
    if len(order) == count * most:
        return tensor[order].reshape(count, most, *tensor.shape[1:])
    place = torch.arange(len(order), device=order.device) - (each.cumsum(0) - each)[sorted_]
    result = tensor.new_zeros(count * most, *tensor.shape[1:])
    result[sorted_ * most + place] = tensor[order]
    return result.view(count, most, *tensor.shape[1:])


def rows_of(problem: Problem, factor: Factor, *, outers: bool = False, whole: bool = False) -> Rows:
    """The rows of the Jacobian in the precision of the model.

    Args:
        problem: the objective around a point, of one batch.
        factor: R.
        outers: whether linear layers that read one vector per sample are stored as factors.
        whole: whether every row comes by a pull-back through the whole program.
    """
    graph, n, c = problem.chain.graph, factor.samples, factor.columns
    calls = problem.autodiff.calls
    with differentiable_attention(), torch.enable_grad():
        plan = structure(problem)
        if whole:
            plan = Structure((), frozenset(problem.parameters), ())
        needed = {name for use in plan.uses for name in (*use.node.inputs, use.node.name)} | set(graph.outputs)
        needed |= {name for node in plan.computed for name in (*node.inputs, node.name)}
        needed |= {leaf.name for leaf in graph.parameters}
        values = _run(problem, only=needed)
        tapped = list(dict.fromkeys(use.node.name for use in plan.uses))
        slopes = dict(zip(tapped, _slopes(problem, factor, values, tapped), strict=True))
        names = {leaf.name: leaf.path for leaf in graph.parameters}
        parts: dict[str, Tensor] = {}
        products: dict[str, list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for use in plan.uses:
            stale = slopes[use.node.name][:, use.labels == NONE]
            if stale.numel() and float(stale.abs().max()) > 1e-9 * float(slopes[use.node.name].abs().max()):
                _structures.pop(graph)  # what nothing depended on at another point
                return rows_of(problem, factor, outers=outers, whole=whole)
            if use.kind == "matrix":
                name, turned = _source(graph, use.weight)
                transposed = turned ^ (use.node.target is _aten.linear.default)
                products[name].append((*_factors(use, values, slopes[use.node.name], n), transposed))
            else:
                parts[use.weight] = parts.get(use.weight, 0) + _rows(use, values, slopes[use.node.name], n)
        alone = single(graph, plan, n) if outers else {}
        kept = []
        for name, several in products.items():
            if name in alone:
                (x, G, transposed), bias = several[0], bias_of(plan, alone[name], names)
                x, G = x[:, 0].to(problem.output.dtype), G[:, 0].to(problem.output.dtype).contiguous()
                kept.append(Outer(names[name], names.get(bias or ""), x, G, transposed))
                parts.pop(bias or "", None)
            else:
                parts[name] = parts.get(name, 0) + _multiplied(several)
        covered = {path for outer in kept for path in (outer.weight, outer.bias)}
        paths = tuple(path for path in problem.parameters if path not in covered)
        dense = problem.output.new_zeros(n * c, sum(problem.parameters[path].numel() for path in paths))
        found = dict(zip(paths, dense.split([problem.parameters[p].numel() for p in paths], dim=1), strict=True))
        _collect(graph, plan, values, parts, found)
        if plan.rest:
            leaves = {leaf.path: values[leaf.name] for leaf in graph.parameters if leaf.path in plan.rest}
            _rest(problem, factor, values[graph.outputs[0]], leaves, found)
    return Rows(tuple(kept), paths, dense, problem.autodiff.calls - calls, (n, c))


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
    """The weight of which a matrix is a copy or the transpose, and whether it is that; for linear layers too."""
    turned = False
    while name in graph.by_name:
        node = graph.by_name[name]
        given = node.arguments
        dims = {given.get("dim0"), given.get("dim1")}
        turns = node.target is _aten.t.default or given.get("dims") == [1, 0]
        turns |= node.target is _aten.transpose.int and dims in ({0, 1}, {-2, -1})
        if not turns and node.target not in _SAME:
            break
        name, turned = node.inputs[0], turned ^ turns
    return name, turned


def _factors(use: Use, values: Mapping[str, Any], slopes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What a matrix product reads and its slopes, by sample: n × k × inputs and n × k × columns × outputs."""
    source = use.node.arguments[_MATRIX[use.node.target][0]].name
    x = values[source].detach().movedim(use.dim or 0, 0)
    G = slopes.movedim((use.dim or 0) + 1, 0)  # m × columns × the rest
    x, G = x.reshape(len(x), -1, x.shape[-1]), G.reshape(len(G), len(slopes), -1, G.shape[-1])
    x, G = _grouped(x, use.samples, count), _grouped(G.transpose(1, 2), use.samples, count)
    return x.flatten(1, 2), G.flatten(1, 2)


def _multiplied(several: Sequence[tuple[Tensor, Tensor, bool]]) -> Tensor:
    """The rows of a matrix from all products with it, in one product: samples × columns × numbers."""
    result: Any = 0
    for turned in (False, True):
        x = [x for x, _, transposed in several if transposed is turned]
        G = [G for _, G, transposed in several if transposed is turned]
        if x:
            one, other = torch.cat(x, dim=1), torch.cat(G, dim=1)
            n, k, c, o = other.shape
            if turned:  # outputs × inputs
                rows = torch.bmm(other.permute(0, 2, 3, 1).reshape(n, c * o, k), one).view(n, c, -1)
            else:
                rows = torch.bmm(one.mT, other.reshape(n, k, c * o)).view(n, -1, c, o)
                rows = rows.transpose(1, 2).reshape(n, c, -1)
            result = rows + result
    return result


def _rows(use: Use, values: Mapping[str, Any], slopes: Tensor, count: int) -> Tensor:
    """The rows of a weight in one operation: samples × columns × numbers."""
    if use.kind == "masked":
        return masked_rows(use.node, use.weight, values, slopes, use.labels, count)
    if use.kind != "shift":
        return _sliced(use, values, slopes, count)
    dim, weight = use.dim or 0, values[use.weight]
    each = slopes.movedim(dim + 1, 0).unsqueeze(dim + 2)  # m × columns × the shape of one index
    known = (use.samples >= 0).nonzero().flatten()
    total = each.new_zeros(count, *each.shape[1:]).index_add_(0, use.samples[known], each[known])
    shape = (1,) * (use.labels.dim() - weight.dim()) + tuple(weight.shape)
    return total.sum_to_size((count, len(slopes), *shape)).flatten(2)


def single(graph: Graph, plan: Structure, samples: int) -> dict[str, Use]:
    """The weights of linear layers that are read once, with one vector per sample, by name."""
    names = {leaf.name: leaf.path for leaf in graph.parameters}
    uses: dict[str, list[Use]] = defaultdict(list)
    for use in plan.uses:
        uses[_source(graph, use.weight)[0] if use.kind == "matrix" else use.weight].append(use)
    derived = {name for node in plan.computed if node.name in uses for name in node.inputs}
    return {
        name: some[0]
        for name, some in uses.items()
        if len(some) == 1 and some[0].kind == "matrix" and name in names and names[name] not in plan.rest
        and name not in derived and some[0].labels.dim() == 2 and len(some[0].samples.unique()) == samples
        == len(some[0].samples)
    }  # fmt: skip


def bias_of(plan: Structure, layer: Use, names: Mapping[str, str]) -> str | None:
    """The bias of a layer, where that is a parameter that nothing else reads."""
    for use in plan.uses:
        uses = sum(other.weight == use.weight for other in plan.uses)
        if (
            use.node is layer.node
            and use.kind == "shift"
            and uses == 1
            and names.get(use.weight) not in (None, *plan.rest)
        ):
            return use.weight
    return None


def _collect(
    graph: Graph, plan: Structure, values: Mapping[str, Any], parts: dict[str, Tensor], found: dict[str, Tensor]
) -> None:
    """Write rows of parameters, and of what is computed from them, to where they are collected."""
    names = {leaf.name: leaf.path for leaf in graph.parameters}
    for name, rows in parts.items():
        if name in names and names[name] not in plan.rest:
            found[names[name]] += rows.reshape(-1, rows.shape[-1])
    derived = [name for name in parts if name not in names]
    if not derived:
        return
    leaves = [leaf for leaf in graph.parameters if leaf.path in found and leaf.path not in plan.rest]
    start = [values[leaf.name].detach() for leaf in leaves]
    run = _runner(values[graph.outputs[0]])

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
            found[leaf.path][first : first + step] += rows.flatten(1)


def _rest(
    problem: Problem, factor: Factor, output: Tensor, leaves: Mapping[str, Tensor], found: dict[str, Tensor]
) -> None:
    """Rows by pull-backs through the whole program."""
    columns, c = factor.all_columns(output.dtype, output.device), factor.columns
    count = factor.samples * c
    problem.autodiff.calls += count
    step = max(1, _PIECE // max(1, sum(node.numel for node in problem.chain.graph.nodes)))
    for first in range(0, count, step):
        numbers = torch.arange(first, min(first + step, count), device=output.device)
        slopes = output.new_zeros(len(numbers), *output.shape)
        places = torch.arange(len(numbers), device=output.device), numbers // c
        slopes[places] = columns[numbers % c, numbers // c]
        for path, rows in zip(leaves, gradients(output, list(leaves.values()), slopes), strict=True):
            found[path][first : first + step] += rows.flatten(1)


__all__ = ["MOST", "Outer", "Rows", "Structure", "dimension", "gradients", "labels", "rows_of", "structure"]
