"""For loops with Accelerate: epochs are accepted if the objective of all data is proved to be lower after them."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from surefoot.optim import KeepIfLower


def keep_if_lower(
    accelerator: Any, model: nn.Module, optimizer: Any, loss: nn.Module, data: Any, *, slower: float = 0.5
) -> KeepIfLower:
    """The check for your loop: after an epoch, ``keep()`` accepts the weights or rolls back.

    With several processes each has a part of the data, as dealt out by ``accelerator.prepare(loader)``, and all of
    them call ``keep()``: they get the value for all samples together and decide alike. Set ``even_batches=False``
    in its ``DataLoaderConfiguration``, or some samples count twice.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        model: the model that ``accelerator.prepare`` returned.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        loss: without targets.
        data: re-iterable batches ``(x, y)`` without augmentation.
        slower: factor of the learning rate after weights were rolled back.

    >>> from types import SimpleNamespace
    >>> from surefoot.integrations.accelerate import keep_if_lower
    >>> accelerator = SimpleNamespace(unwrap_model=lambda m: m, num_processes=1)  # accelerate.Accelerator()
    >>> model, data = nn.Linear(2, 1), [(torch.eye(2), torch.ones(2, 1))]
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> keep = keep_if_lower(accelerator, model, sgd, sf.Square(), data)
    >>> sf.Square(data[0][1])(model(data[0][0])).backward()
    >>> sgd.step()
    >>> keep()
    True
    """
    group = distributed.group.WORLD if accelerator.num_processes > 1 else None
    return KeepIfLower(accelerator.unwrap_model(model), optimizer, loss, data, slower=slower, group=group)
