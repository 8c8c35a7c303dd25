"""The project's tests; without this file the folder would give way to a ``tests`` that some package installs."""
