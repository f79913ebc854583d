from dynaflow.strategies.sequential import Sequential


class Auto(Sequential):
    """caller | A  B  D  G ...      the graph as it is, and where its ops are kernels that Inductor made (on CUDA, or
    aux0   |    C  E    ...      partition="kernels"): the fastest plan that is found, if it is faster than Inductor

    It never splits a batch. What it does with kernels is measured, not said here: `dynaflow/region.py`.
    """
