"""The scaled complementary error function exp(x²) erfc(x) on every entry."""

from surefoot.operations import elementwise
from surefoot.scalar import ScalarFunction

z = ScalarFunction.variable()
exp, erfc = ScalarFunction.named("exp"), ScalarFunction.named("erfc")
elementwise("aten.special_erfcx", scalar=lambda x: exp.compose(z**2.0).compose(x) * erfc.compose(x))
