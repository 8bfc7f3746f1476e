"""Names as they were: gone once every reader imports from ``call`` and ``record``."""

from surefoot.operations.call import Along, Bounds, Call, Pair, Slot, label
from surefoot.operations.record import Rule, register_rule, rule_for, rules

__all__ = ["Along", "Bounds", "Call", "Pair", "Rule", "Slot", "label", "register_rule", "rule_for", "rules"]
