"""What trainer and workers share."""
