"""The two errors that files written by strangers can cause."""


class CheckpointError(ValueError):
    """A checkpoint can not be used; the text is one sentence: what came, what was expected, the way out."""


class ChatTemplateError(ValueError):
    """A chat template or its messages can not be rendered within the limits; the text says why."""
