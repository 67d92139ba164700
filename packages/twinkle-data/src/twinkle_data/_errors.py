"""The errors of twinkle_data.

DataError
|-- FormatError (ValueError)          a record whose fields contradict each other
|-- DatasetError (ValueError)         a row, or a function applied to a row, that fails
|-- LoaderStateError (ValueError)     a saved position that belongs to another loader
|-- TemplateError (ValueError)        a chat template that cannot render, or cannot be masked exactly
|   `-- SequenceTooLongError          a row longer than `max_length`
|-- WorkerError (RuntimeError)        a worker process that dies, fails, or does not answer in time
`-- MissingExtraError (ImportError)   an optional dependency that is not installed
"""


class DataError(Exception):
    """Base class of every error that twinkle_data raises on purpose."""


class FormatError(DataError, ValueError):
    """A record (InputFeature, Trajectory, SamplingParams, ...) whose fields contradict each other."""


class DatasetError(DataError, ValueError):
    """A row, or a function applied to a row, that fails. The message names the row's index and, where one is known, the field."""


class LoaderStateError(DataError, ValueError):
    """A saved position that belongs to a loader with other settings or other data."""


class TemplateError(DataError, ValueError):
    """A chat template that cannot render a trajectory, or whose assistant tokens cannot be told from the rest."""


class SequenceTooLongError(TemplateError):
    """An encoded row is longer than `max_length`, and the template's truncation is 'error' or 'drop'."""


class WorkerError(DataError, RuntimeError):
    """A worker process that died, failed in a way that nobody foresaw, or did not answer in time. The message says which work it was at."""


class MissingExtraError(DataError, ImportError):
    """An optional dependency is not installed. The message holds the line that installs it."""
