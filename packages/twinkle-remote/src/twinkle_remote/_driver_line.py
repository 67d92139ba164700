"""Which line of the user's script called us."""

import os
import sys
from pathlib import Path

_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def driver_line() -> str:
    """The innermost line outside this package: 'file:line'."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
