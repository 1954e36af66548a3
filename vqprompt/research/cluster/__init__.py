"""Other machines: which of them can be used, how to reach them, and how to send files there and back."""
