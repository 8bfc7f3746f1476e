"""For loops with Accelerate: epochs are kept if the objective of all data is proved to be lower after them."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from surefoot.integrations.keeping import Keeper


def keep_if_lower(
    accelerator: Any, model: nn.Module, optimizer: Any, data: Any, objective: nn.Module, *, slower: float = 0.5
) -> Keeper:
    """A keeper for your loop: after an epoch, ``keeper.check()`` keeps the weights or goes back.

    With several processes each has a part of the data, as dealt out by ``accelerator.prepare(loader)``, and all of
    them call ``check()``: they get the value for all samples together and decide alike. Set ``even_batches=False``
    in its ``DataLoaderConfiguration``, or some samples count twice.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        model: the model that ``accelerator.prepare`` returned.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        data: re-iterable batches ``(x, y)`` without augmentation.
        objective: the loss, without targets.
        slower: factor of the learning rate after weights were not kept.

    >>> from types import SimpleNamespace
    >>> from surefoot.integrations.accelerate import keep_if_lower
    >>> accelerator = SimpleNamespace(unwrap_model=lambda m: m, num_processes=1)  # accelerate.Accelerator()
    >>> model, data = nn.Linear(2, 1), [(torch.eye(2), torch.ones(2, 1))]
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> keeper = keep_if_lower(accelerator, model, sgd, data, sf.Square())
    >>> sf.Square(data[0][1])(model(data[0][0])).backward()
    >>> sgd.step()
    >>> keeper.check().kept
    True
    """
    group = distributed.group.WORLD if accelerator.num_processes > 1 else None
    return Keeper(accelerator.unwrap_model(model), [optimizer], data, objective, slower=slower, group=group)
