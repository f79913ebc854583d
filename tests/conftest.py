"""What every test needs before it imports a model."""

import torch

import dynaflow.testing.torchvision_shim  # noqa: F401  (before anything imports torchvision)

# Tests run plans on several worker threads; more threads inside one op would only compete with them.
torch.set_num_threads(1)
