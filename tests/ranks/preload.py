"""What every rank imports. The fork server does it once: a rank then starts in milliseconds."""

import torch
import torch._dynamo.variables
import torch._inductor.compile_fx
import torch.distributed._functional_collectives
import torch.distributed.tensor.parallel

import dynaflow.testing.torchvision_shim  # noqa: F401  (before anything imports torchvision)

torch.set_num_threads(1)
