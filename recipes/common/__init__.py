"""What every recipe shares: the launcher, the tiny base model, grading of answers, finished-or-nothing files."""
