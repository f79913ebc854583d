"""Whole calls of real systems, with DynaFlow switched on by one line: `generate` of Transformers, PEFT's adapters, Trainer, pipelines of diffusers.

    python -m benchmarks.systems [--rows GLOBS] [--json FILE]                     measure, merge into the file
    python -m benchmarks.systems --merge FILE ... | --plot | --list
    python -m benchmarks.systems --tiny --device cpu --json out/systems.json      small, without a GPU

A row is a process. Its variants share one set of weights, and run in turns:

    eager             the system without any compiler
    torch.compile     of the model's forward, or of the denoisers'; Trainer: torch_compile=True
    reduce-overhead   the same with mode="reduce-overhead" (CUDA Graphs)
    own setting       what the system itself recommends: generate with a static cache compiles its decode steps (CUDA Graphs);
                      diffusers: compile_repeated_blocks(fullgraph=True)
    dynaflow          df.optimize(target), Trainer: torch_compile_backend="dynaflow": nothing else is said
    dynaflow fixed    the same with fixed_weights=True
    dynaflow split, dynaflow branches    df.TwoBatch() and df.Branches() over ops; only where --variants names them

A speedup is the fastest baseline's time over `dynaflow`'s; that of the fastest of ours stands beside it. A time is that of a whole call with
all that the system does around its model, until the result is there; figures are per token, denoising step, training step or call.
Results are compared with the same computation in float32: see `benchmarks/systems/rows.py`.
"""  # noqa: E501 (a table)
