"""How good a model is on images with known classes: measure.py counts, page.py tells."""
