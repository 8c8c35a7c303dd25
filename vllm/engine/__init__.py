"""Engine arguments."""
