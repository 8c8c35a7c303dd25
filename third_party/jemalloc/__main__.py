"""Prints the library to preload, for a launcher; exits 1 and says so when the machine has none."""

import sys

from third_party.jemalloc.stats import LIBRARY_NAME, find_library, library_folders


def main() -> None:
    path = find_library()
    if path is None:
        folders = ", ".join(str(folder) for folder in library_folders())
        sys.exit(f"no {LIBRARY_NAME} in {folders}: install jemalloc (Debian: libjemalloc2; openEuler: jemalloc)")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
