"""Requests in, outputs out."""
