"""When two captures of one model must agree: a key made of all that ``forward`` may read besides values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_SIMPLE = (int, float, str, bool, bytes, type(None), type)
_TABLES = ("_parameters", "_buffers", "_modules")


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """A hashable description of a model's structure, mode and settings, without the values of its weights.

    Tensors that are neither parameters nor buffers are baked into a capture, so they enter with their
    identity and version; other objects enter with their attributes, a few levels deep, or their identity.
    """
    return tuple(
        (path, type(module), *(_entry(key, value) for key, value in sorted(vars(module).items())))
        for path, module in model.named_modules(remove_duplicate=False)
    )


def _entry(key: str, value: Any) -> tuple[Any, ...]:
    if key in _TABLES:
        return key, tuple((name, _shape(item)) for name, item in value.items())
    return key, _settings(value, depth=4)


def _shape(item: Any) -> Any:
    if isinstance(item, Tensor):
        return tuple(item.shape), item.dtype, item.device, item.requires_grad
    return id(item)


def _settings(value: Any, depth: int) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if depth and isinstance(value, dict):
        return tuple((str(key), _settings(item, depth - 1)) for key, item in value.items())
    if depth and isinstance(value, list | tuple | set | frozenset):
        return tuple(_settings(item, depth - 1) for item in value)
    if depth and not isinstance(value, nn.Module) and hasattr(value, "__dict__") and not callable(value):
        return id(value), _settings(vars(value), depth - 1)
    return (type(value), len(value)) if isinstance(value, dict | list | tuple | set) else id(value)
