"""Other machines: which ones may be given work, how they are reached, and how files travel to them and back."""
