"""CPU references of torch_npu's ops, one file per topic; all of them are loaded with the device."""

import importlib
import pkgutil


def load_all() -> None:
    """Imports every module of this package, which registers its references."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name):
        importlib.import_module(f"{__name__}.{module.name}")
