"""Operations whose form is known and whose bounds are not: chains are cut and costs counted, certificates
refused.
"""

from surefoot.operations.record import Form, declare

declare(
    "aten.real", "aten.imag", "aten.view_as_real", form=Form.LAYOUT, rounds=False,
)  # fmt: skip
declare(
    "aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_fft2", "aten.fft_ifft2",
    form=Form.LINEAR,
)  # fmt: skip
declare("aten.full", "aten.zeros", "aten.ones", "aten.eye", "aten.scalar_tensor", form=Form.LAYOUT, rounds=False)
declare("aten.inner", form=Form.PRODUCT, factors=("self", "other"))
declare("aten.addcmul", form=Form.PRODUCT, factors=("tensor1", "tensor2"))
