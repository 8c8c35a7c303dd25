"""Training ops and memory features for Ascend, behind the contracts of megatron.core."""
