"""Mixture of experts: router, token dispatch over expert-parallel ranks, grouped experts, shared experts."""
