"""Functions that strategies put in the place of ops."""
