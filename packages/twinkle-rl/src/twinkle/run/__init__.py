"""What surrounds a run: its folder, progress, curves and memory."""

from twinkle.run._curves import write_curves
from twinkle.run._folder import RunFolder
from twinkle.run._interruption import Interruption
from twinkle.run._memory import PeakMemory
from twinkle.run._metrics import METRICS_FILE, Metrics, require_tracker
from twinkle.run._progress import Progress, say

__all__ = ["METRICS_FILE", "Interruption", "Metrics", "PeakMemory", "Progress", "RunFolder", "require_tracker", "say", "write_curves"]
