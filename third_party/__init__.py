"""Upstream manifests and bindings to libraries that are not Python packages."""
