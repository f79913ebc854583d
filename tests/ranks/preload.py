"""What every rank imports. The fork server does it once: a rank then starts in milliseconds."""

import torch
import torch._dynamo.variables
import torch._inductor.compile_fx
import torch.distributed._functional_collectives
import torch.distributed.tensor
import torch.distributed.tensor.parallel  # noqa: F401

import dynaflow  # noqa: F401

torch.set_num_threads(1)
