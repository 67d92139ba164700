"""What a remote_function costs beside a raw Ray actor call.

Both call a method of one actor that returns its argument, alternately in one run, so that the machine's load hits both alike. Prints the median
latencies of `--pairs` pairs and the median of their ratios, for a small argument and for an array of `--array-bytes`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import twinkle_remote as tr
from twinkle_mesh import DeviceGroup


@tr.remote_class()
class Echo:
    """The component."""

    def __init__(self, remote_group: str | None = None) -> None:
        self.group = remote_group

    @tr.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def echo(self, value: Any) -> Any:
        return value


class RawEcho:
    """The same as a plain actor."""

    def echo(self, value: Any) -> Any:
        return value


def measure(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--array-bytes", type=int, default=4 << 20)
    arguments = parser.parse_args()
    with tr.initialize("ray", groups=[DeviceGroup("one", 1, "cpu")]):
        import ray  # after initialize, which sets its options

        component = Echo(remote_group="one")
        actor: Any = ray.remote(RawEcho).options(num_cpus=0).remote()
        print(f"{'argument':>12} {'raw Ray':>10} {'twinkle':>10} {'ratio':>7}   (medians of pairs)")
        for name, value, pairs in (
            ("a number", 1, arguments.pairs),
            (f"{arguments.array_bytes >> 10} KiB", np.zeros(arguments.array_bytes, np.uint8), max(5, arguments.pairs // 10)),
        ):
            times: list[tuple[float, float]] = []
            for index in range(pairs + 5):
                pair = (measure(lambda v=value: ray.get(actor.echo.remote(v))), measure(lambda v=value: component.echo(v)))
                if index >= 5:  # the first calls open connections
                    times.append(pair)
            raw_s, ours_s = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(ours / raw for raw, ours in times)
            print(f"{name:>12} {raw_s * 1e3:>7.2f} ms {ours_s * 1e3:>7.2f} ms {ratio:>6.2f}x")


if __name__ == "__main__":
    main()
