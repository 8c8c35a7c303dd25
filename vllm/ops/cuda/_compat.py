"""What triton 3.6 needs where its kernels are interpreted on a CPU."""

from __future__ import annotations

from typing import Any


def allow_loops_over_loaded_bounds() -> None:
    """Let interpreted kernels have loops whose bounds were loaded, which NumPy 2.4 and triton 3.6 do not together.

    https://github.com/triton-lang/triton/issues/9171: the interpreter turns an array of one number into an int as NumPy
    no longer permits. Remove it when the oldest triton that we support is later than 3.6.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
