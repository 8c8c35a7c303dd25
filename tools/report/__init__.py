"""Curves, a self-contained page and a closing summary from what a run left in its directory."""
