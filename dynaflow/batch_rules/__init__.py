"""Split rules: which ops may run on a slice of the batch, and where their outputs carry it.

    call.py         what a rule sees: one call, and sizes as multiples of the batch
    judge.py        the verdict on one call: guards around the rule
    table.py        which rule answers for which op; `register_split_rule` for yours
    elementwise.py  pointwise ops, reductions, norms, pooling, padding
    shapes.py       views, slices, joins, constants
    contract.py     matrix products, convolutions, attention
    indexing.py     lookups and scatters
    collective.py   functional collectives
"""

from dynaflow.batch_rules import collective, contract, elementwise, indexing, shapes  # noqa: F401  (they fill the table)
from dynaflow.batch_rules.call import Call, Rule, Sizes, Verdict, tensors_in
from dynaflow.batch_rules.collective import groups
from dynaflow.batch_rules.table import find, register_split_rule, rowwise

__all__ = ["Call", "Rule", "Sizes", "Verdict", "find", "groups", "register_split_rule", "rowwise", "tensors_in"]
