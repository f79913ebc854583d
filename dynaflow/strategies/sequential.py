from dynaflow.planner import Planner
from dynaflow.strategy import Strategy


class Sequential(Strategy):
    """caller | A  B  C  D ...      the graph as it is"""

    def schedule(self, flow: Planner) -> None:
        flow.sequential("strategy Sequential")
