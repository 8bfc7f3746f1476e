"""What one input of a model looks like, and batches of such inputs.

The functions here describe an input from options of a builder, whose names are their arguments' names:
``@register("net", example=image)`` suits any builder with options ``in_channels`` and ``image_size``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """One input, without the batch.

    Attributes:
        shape: the shape of one sample.
        vocabulary: ``None`` for real numbers; for integer ids the number of different ids.
    """

    shape: tuple[int, ...]
    vocabulary: int | None = None

    def batch(
        self,
        count: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """So many samples: standard normal numbers, or uniform ids; on ``"meta"``, shapes without numbers.

        The same seed gives the same numbers, and the global random state is left alone.

        >>> Sample((3,), vocabulary=5).batch(2).dtype
        torch.int64
        """
        shape = (count, *self.shape)
        place = torch.get_default_device() if device is None else torch.device(device)
        real = torch.get_default_dtype() if dtype is None else dtype
        if place.type == "meta":
            return torch.empty(shape, dtype=torch.int64 if self.vocabulary else real, device=place)
        # Drawn on the CPU, so that the numbers do not depend on the device they are used on.
        generator = torch.Generator("cpu").manual_seed(seed)
        if self.vocabulary is None:
            return torch.randn(shape, generator=generator, dtype=real, device="cpu").to(place)
        return torch.randint(self.vocabulary, shape, generator=generator, device="cpu").to(place)


def vector(features: int) -> Sample:
    """A vector of real numbers."""
    return Sample((features,))


def image(in_channels: int, image_size: int) -> Sample:
    """A square image."""
    return Sample((in_channels, image_size, image_size))


def image_of_any_size(in_channels: int, small_input: bool, image_size: int | None = None) -> Sample:
    """A square image for a network that takes any: 224×224, or 32×32 if it is made for small ones."""
    return image(in_channels, image_size or (32 if small_input else 224))


def tokens(length: int, vocabulary: int) -> Sample:
    """A sequence of integer ids below ``vocabulary``."""
    return Sample((length,), vocabulary)
