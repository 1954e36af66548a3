"""Estimators for scikit-learn: features.py learns from plain feature matrices, images.py from images."""
