"""What is wrong with a checkpoint, in one exception."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, written or trusted; the message names file and tensor or field."""
