from dynaflow.strategies.sequential import Sequential


class Auto(Sequential):
    """The graph as it is. Where its ops are the kernels that Inductor makes (partition="kernels"):

    caller | A  B  D  G ...      the fastest plan that a search finds and the device confirms,
    aux0   |    C  E    ...      if it is faster than Inductor's own order

    It never splits a batch. What it does with kernels is measured, not written here: `dynaflow/region.py`.
    """
