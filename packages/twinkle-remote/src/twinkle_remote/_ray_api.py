"""The parts of Ray that we use. Untyped: Ray 2.60's own annotations are partial, which strict type checking refuses."""

from typing import Any

import ray as _ray
import ray.cloudpickle as _cloudpickle
from ray._private import services as _services
from ray._raylet import GcsClient as _GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from ray.util.placement_group import placement_group as _placement_group
from ray.util.placement_group import remove_placement_group as _remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as _PlacementGroupSchedulingStrategy

ray: Any = _ray
cloudpickle: Any = _cloudpickle
services: Any = _services
GcsClient: Any = _GcsClient  # pyright: ignore[reportUnknownVariableType]
placement_group: Any = _placement_group
remove_placement_group: Any = _remove_placement_group
PlacementGroupSchedulingStrategy: Any = _PlacementGroupSchedulingStrategy
