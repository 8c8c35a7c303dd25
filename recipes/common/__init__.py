"""What every recipe shares: its form, the tiny base model, the parts of data scripts, grading of answers."""
