"""Gaussians of the classes learned so far, how they follow features that move, and classifiers solved from them.

Nothing is imported here: discriminant.py needs no PyTorch, and commands that do without it must not wait for it.
"""
