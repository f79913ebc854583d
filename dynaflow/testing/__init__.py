"""The public kit for tests of strategies, plans and runtimes.

    random_flow(seed)               a flow that runs, in exact integer arithmetic, with its reference result
    flow_of(text)                   a small flow, for tests of plans
    RandomStrategy(seed, case)      every split, stream, order, merge and replacement that the interface allows
    mutate(plan, flow, seed)        the plan with one mistake in it
    show_wrong(plan, case, ...)     what an interleaving shows to be wrong with a plan; independent of the verifier
    python -m dynaflow.testing.fuzz
"""

from dynaflow.testing import mutate_groups  # noqa: F401 (it adds to MUTATIONS)
from dynaflow.testing.edits import harmless_edit, mutate_memory
from dynaflow.testing.flows import Case, random_flow
from dynaflow.testing.mutate import mutate
from dynaflow.testing.mutate_pieces import MUTATIONS
from dynaflow.testing.notation import flow_of
from dynaflow.testing.oracle import show_wrong
from dynaflow.testing.strategies import RandomStrategy

__all__ = ["MUTATIONS", "Case", "RandomStrategy", "flow_of", "harmless_edit", "mutate", "mutate_memory", "random_flow", "show_wrong"]
