"""The models: timm's and transformers' own where they are installed everywhere, plain modules of ours for diffusion."""
