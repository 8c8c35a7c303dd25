"""The lines of metrics that a run prints (upstream: ``verl.utils.logger``)."""
