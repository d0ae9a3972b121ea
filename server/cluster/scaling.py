"""The number of replicas, for Ray Serve's autoscaler: so many that no image waits for a slot.

Serve copies this module into its controller by value, so it imports no other module of LinPix.
"""

import math
from typing import Any


def by_images(context: Any) -> tuple[int, dict[str, Any]]:
    """context: Serve's AutoscalingContext, with what each replica's `record_autoscaling_stats`
    returned lately.
    """
    reported = context.aggregated_metrics or {}
    images, slots = (
        sum(reported.get("images", {}).values()),
        sum(reported.get("slots", {}).values()),
    )
    if not slots:  # no replica has reported yet
        return context.target_num_replicas, {}
    a_replica = slots / len(reported["slots"])
    wanted = math.ceil(images / a_replica)
    return (
        min(
            context.capacity_adjusted_max_replicas,
            max(context.capacity_adjusted_min_replicas, wanted),
        ),
        {},
    )
