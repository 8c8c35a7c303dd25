"""What a machine with a GPU tells of the CUDA form of both engines, in one command (``__main__.py``)."""
