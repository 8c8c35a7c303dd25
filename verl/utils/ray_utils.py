"""Ray's object store and environment under upstream's module (``verl.utils.ray_utils``)."""

from verl.single_controller.ray.object_store import get_event_loop, parallel_put, ray_noset_visible_devices

__all__ = ["get_event_loop", "parallel_put", "ray_noset_visible_devices"]
