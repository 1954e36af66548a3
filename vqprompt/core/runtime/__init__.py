"""The device and its precision, seeds, and processes that compute together."""
