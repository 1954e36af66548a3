"""Errors that are the user's to mend: each names what was given, what was wanted and the way out."""


class UserError(ValueError):
    """Shown on the command line as its message alone, without a traceback."""


class ImageError(UserError):
    """An image, folder or archive that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint that is missing, half-written, foreign or made for something else."""


class PastImagesError(UserError):
    """Training images of a task that is not being learned now were asked for."""
