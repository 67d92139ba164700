"""What surrounds a run: its folder, progress, curves and memory."""

from twinkle.run._curves import write_curves
from twinkle.run._folder import RunFolder
from twinkle.run._memory import PeakMemory
from twinkle.run._progress import Progress

__all__ = ["PeakMemory", "Progress", "RunFolder", "write_curves"]
