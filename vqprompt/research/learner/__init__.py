"""Learners, and predictors that are snapshots of them."""
