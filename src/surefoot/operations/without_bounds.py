"""Operations whose form is known and whose bounds are not: chains are cut and costs counted, certificates
refused.
"""

from surefoot.operations.record import Form, declare

declare(
    "aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter", "aten.real", "aten.imag",
    "aten.view_as_real", form=Form.LAYOUT, rounds=False,
)  # fmt: skip
declare("aten.index_put", form=Form.LAYOUT, selects=("indices",),
        rounds=lambda node: bool(node.arguments.get("accumulate")))  # fmt: skip
declare("aten.index_copy", form=Form.LAYOUT, selects=("index",), rounds=False)
declare("aten.scatter", selects=("index",), rounds=lambda node: node.arguments.get("reduce") is not None,
        form=lambda node: Form.LAYOUT if node.arguments.get("reduce") is None else Form.OTHER)  # fmt: skip
declare("aten.copy", form=Form.LAYOUT, lends=("self",), rounds=False)
declare("aten.index_add", "aten.scatter_add", form=Form.LINEAR, selects=("index",))
declare(
    "aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_fft2", "aten.fft_ifft2",
    form=Form.LINEAR,
)  # fmt: skip
declare("aten.inner", form=Form.PRODUCT, factors=("self", "other"))
declare("aten.addcmul", form=Form.PRODUCT, factors=("tensor1", "tensor2"))
