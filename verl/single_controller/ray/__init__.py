"""Worker groups on Ray: one actor per device."""

from verl.single_controller.ray.base import RayWorkerGroup
from verl.single_controller.ray.resources import RayClassWithInitArgs, RayResourcePool

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"]
