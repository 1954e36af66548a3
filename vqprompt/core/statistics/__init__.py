"""Gaussians of the classes learned so far, and how they follow features that move."""
