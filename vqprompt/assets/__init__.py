"""The default backbone and data set, as files; see README.md in this folder."""
