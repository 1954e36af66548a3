"""What lives with a user: a model that keeps learning, and what checks, tests, exports and serves it."""
