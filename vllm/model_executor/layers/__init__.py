"""Layers that know how they are sharded."""
