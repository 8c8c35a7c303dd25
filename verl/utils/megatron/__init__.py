"""Glue between DataProto batches and the training engine."""
