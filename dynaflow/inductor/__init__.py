"""Ops compiled by Inductor, writing where they are told."""
