"""How many replicas there should be, as Ray Serve's autoscaler asks: so many that no image waits for a slot.

Serve copies this module into its controller by value: it imports nothing of ours.
"""

import math
from typing import Any


def by_images(context: Any) -> tuple[int, dict[str, Any]]:
    """context: Serve's AutoscalingContext, with what `record_autoscaling_stats` of each replica said of late."""
    told = context.aggregated_metrics or {}
    images, slots = sum(told.get("images", {}).values()), sum(told.get("slots", {}).values())
    if not slots:  # no replica has said anything yet
        return context.target_num_replicas, {}
    a_replica = slots / len(told["slots"])
    wanted = math.ceil(images / a_replica)
    return min(context.capacity_adjusted_max_replicas, max(context.capacity_adjusted_min_replicas, wanted)), {}
